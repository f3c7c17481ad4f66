"""What keeps a run alive and honest: signals, heartbeats, hangs, restarts, bad steps, and the account of time lost to them."""
