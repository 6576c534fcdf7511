"""Random faults against a real Slurm: a schedule drawn from a seed, and an oracle of how the run may end."""
