"""Where a run executes: this machine, Slurm or Kubernetes."""
