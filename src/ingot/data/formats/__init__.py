"""Readers and writers of MDS shards and Megatron's .bin/.idx pairs."""
