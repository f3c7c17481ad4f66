"""Turns a run into a scheduler's job: the job, and its file for Slurm, Kubernetes or torchrun. Pure functions, no torch."""
