"""Fault tolerance: signals, heartbeats, hangs, restarts, bad steps, silent corruption, and the account of time lost to them."""
