"""Slurm: job scripts, arrays, commands."""
