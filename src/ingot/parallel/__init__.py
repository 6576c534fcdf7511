"""Runs a model on one process or many: executors, device mesh, layouts, memory estimate."""
