"""Scaling laws: the loss that a model of a given size reaches on an amount of data, fitted to finished runs, with intervals."""
