"""Triton kernels, one file each; tests compare them with reference implementations. They are imported where they are used, since a
machine without a GPU need not have Triton."""
