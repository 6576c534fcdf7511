"""Readers and writers for MDS shards and Megatron's .bin/.idx pairs."""
