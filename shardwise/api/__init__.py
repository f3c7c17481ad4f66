"""The API of `import shardwise`, for users who write Python rather than TOML: a run, the verbs, and results that display
themselves.

Each verb does the same as the command of its name, with the same numbers. `run.py` is the run as a program writes it, `results.py`
has the results of the planner and the tracer, `processes.py` training and serving, which run in their own processes.
"""

from __future__ import annotations

from shardwise.api.profiling import profile
from shardwise.api.run import Run
from shardwise.api.verbs import plan, search, serve, trace, train
from shardwise.run.problems import UserError

__all__ = ["Run", "UserError", "plan", "profile", "search", "serve", "trace", "train"]
