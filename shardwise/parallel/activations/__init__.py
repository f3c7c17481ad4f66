"""What the forward pass keeps for the backward pass, and in what form: recomputed, quantized, swapped, or handed over."""
