"""What a user on a login node sees of a run: its state, its jobs, its logs."""
