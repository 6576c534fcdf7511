"""Where a run runs: local processes."""
