"""Matrices in 8 or 4 bits for inference: how they are packed, rounded and multiplied."""
