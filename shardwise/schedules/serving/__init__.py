"""The scheduler of a serving engine: pages of key/value memory, and which tokens each step computes. Pure Python, so that the
planner plays what the engine executes.

`pages.py` hands out pages and finds cached ones, `tables.py` keeps the pages of each sequence, `waiting.py` says who goes next,
`running.py` who goes first, and `scheduler.py` makes the steps of `sequence.py`.
"""

from shardwise.schedules.serving.pages import NULL_PAGE, PagePool
from shardwise.schedules.serving.scheduler import Scheduler
from shardwise.schedules.serving.sequence import GIVEN_BACK, Chunk, Sequence, Step
from shardwise.schedules.serving.settings import Settings

__all__ = ["GIVEN_BACK", "NULL_PAGE", "Chunk", "PagePool", "Scheduler", "Sequence", "Settings", "Step"]
