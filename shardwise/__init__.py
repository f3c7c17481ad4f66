"""Shardwise plans, trains and explains large transformer models from one description of the job."""

__version__ = "0.2.0"
