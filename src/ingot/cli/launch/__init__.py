"""ingot launch: one file per place to run."""
