"""A run on one machine: its launcher restarts the ranks, and keeps the records of it."""
