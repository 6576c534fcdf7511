"""Checkpoints of other stacks: one file per stack, one that reads `.pt` files, one that merges slices."""
