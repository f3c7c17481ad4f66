"""`shardwise trace`: the verb, and how it reads profiles, compares them and writes their page."""
