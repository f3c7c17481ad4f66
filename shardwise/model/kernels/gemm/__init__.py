"""GEMM kernels for few rows, for quantized weights, and batch-invariant ones."""
