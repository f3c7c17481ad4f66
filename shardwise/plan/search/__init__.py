"""The best layouts of a job: all legal ones screened in closed form over arrays, the best played in full."""

from shardwise.plan.search.search import SearchResult, resolve, search

__all__ = ["SearchResult", "resolve", "search"]
