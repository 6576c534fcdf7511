"""Text to tokens to shards to batches."""
