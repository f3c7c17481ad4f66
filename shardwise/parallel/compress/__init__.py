"""Gradients between replicas in fewer bytes: one file for each method, and what chooses between them."""
