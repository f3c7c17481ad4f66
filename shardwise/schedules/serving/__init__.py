"""The scheduler of a serving engine: pages of the KV cache, and which tokens each step computes. Pure Python, so that the planner
plays the same steps that the engine executes.

`pages.py` allocates pages and finds cached ones, `tables.py` keeps the page table of each sequence, `queues.py` orders the waiting
and the running sequences, and `scheduler.py` makes the steps of `sequence.py`.
"""

from shardwise.schedules.serving.pages import NULL_PAGE, PagePool
from shardwise.schedules.serving.scheduler import Scheduler
from shardwise.schedules.serving.sequence import GIVEN_BACK, Chunk, Sequence, Step
from shardwise.schedules.serving.settings import Settings

__all__ = ["GIVEN_BACK", "NULL_PAGE", "Chunk", "PagePool", "Scheduler", "Sequence", "Settings", "Step"]
