"""What one rank of this project's trainer does in a step, to the byte: FLOPs, traffic, state and saved activations."""
