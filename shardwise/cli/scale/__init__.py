"""`shardwise scale`, with a file for each group of its verbs."""
