"""Counts the FLOPs, traffic and memory of real runs, benchmarks this machine, and compares the plan with both."""
