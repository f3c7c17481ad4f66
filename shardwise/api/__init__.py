"""What `import shardwise` gives to those who write Python rather than TOML: a run, the verbs, and results that show themselves.

Each verb does what the command of its name does, with the same numbers. `run.py` is the run as a program writes it, `results.py`
what the planner and the tracer answer, `processes.py` training and serving, which are processes of their own.
"""

from __future__ import annotations

from shardwise.api.profiling import profile
from shardwise.api.run import Run
from shardwise.api.verbs import plan, search, serve, trace, train
from shardwise.run.problems import UserError

__all__ = ["Run", "UserError", "plan", "profile", "search", "serve", "trace", "train"]
