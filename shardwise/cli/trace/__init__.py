"""`shardwise trace`: the verb, and its reading, comparison and page of profiles."""
