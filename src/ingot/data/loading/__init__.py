"""From shards to batches: sample order, mixtures, the shard cache."""
