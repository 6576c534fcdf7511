"""Shards to batches: order, mixture, cache."""
