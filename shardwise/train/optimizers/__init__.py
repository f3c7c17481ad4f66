"""Optimizers: AdamW and Muon on the device, AdamW on the host, 1-bit Adam, and the learning-rate schedule."""
