"""Evaluation of a model: its loss on any data set, tasks with answers, and an adapter for lm-eval."""
