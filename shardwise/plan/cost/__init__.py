"""The cost of a model's operations on a chip, for any framework: parameters, FLOPs, bytes and seconds of one microbatch."""
