"""The best layouts of a job: all legal ones screened in closed form over arrays, the best played in full.

`space.py` lists the legal layouts, `tables.py` asks the hardware once for each case that differs, `screen.py` estimates time and
memory with the closed forms of `bubbles.py`. `search.py` plays and ranks; `advice.py` says what would do
better.
"""

from shardwise.plan.search.search import SearchResult, resolve, search

__all__ = ["SearchResult", "resolve", "search"]
