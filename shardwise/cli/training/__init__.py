"""Verbs around a training run: start it, submit it as a job, watch it, list its checkpoints."""
