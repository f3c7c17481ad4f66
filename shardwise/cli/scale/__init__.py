"""`shardwise scale`, a file for each group of its verbs."""
