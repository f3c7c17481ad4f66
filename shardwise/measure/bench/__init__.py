"""Benchmarks this machine: kernels, collectives, the host, and the steps of serving."""
