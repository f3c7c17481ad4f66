"""Triton kernels, one file each; tests hold them against reference implementations. Imported where they are used, since a machine
without a GPU need not have Triton."""
