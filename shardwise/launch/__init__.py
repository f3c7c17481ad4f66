"""What a scheduler takes of a run: the job, and its text for Slurm, Kubernetes or torchrun. Pure functions, no torch."""
