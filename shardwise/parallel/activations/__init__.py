"""The tensors that the forward pass saves for the backward pass, and their form: recomputed, quantized, swapped, or handed over."""
