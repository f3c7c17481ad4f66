"""Bytes of an element of each dtype. No torch."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "tf32": 4,  # stored as float32
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}
INT32, INT64 = 4, 8
"""Bytes of an integer: of what kernels count with, and of PyTorch's indices."""
