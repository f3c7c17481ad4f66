"""`python -m shardwise` is the `shardwise` command, for checkouts that are not installed."""

from shardwise.cli.entry import entry

if __name__ == "__main__":
    entry()
