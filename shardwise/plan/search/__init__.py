"""The best layouts of a job: all legal ones are screened in closed form over arrays, the best are simulated in full.

`space.py` lists the legal layouts, `tables.py` evaluates the hardware model once for each distinct case, `screen.py` estimates time
and memory with the closed forms of `bubbles.py`. `search.py` simulates and ranks; `advice.py` reports better changes.
"""

from shardwise.plan.search.search import SearchResult, resolve, search

__all__ = ["SearchResult", "resolve", "search"]
