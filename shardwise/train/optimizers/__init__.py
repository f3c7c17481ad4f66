"""What updates the weights: AdamW and Muon on the device, AdamW on the host, 1-bit Adam, the schedule of the learning rate."""
