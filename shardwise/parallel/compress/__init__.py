"""Compressed exchange of gradients between replicas: one file per method, and the choice between them."""
