"""Text to tokens to shards."""
