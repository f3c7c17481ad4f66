"""Kernels in Triton, one file each, beside a plain implementation of the same that tests hold them against. Imported where they
are used, since a machine without a GPU need not have Triton."""
