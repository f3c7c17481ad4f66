"""Scaling laws: what loss a model of a size reaches on an amount of data, fitted to runs that were made, with intervals."""
