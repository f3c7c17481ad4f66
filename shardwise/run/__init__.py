"""The description of a job: typed config, presets, reading, deriving, checking and writing. Imports nothing above it, and no
torch."""

from shardwise.run.axes import AXES, RANK_AXES
from shardwise.run.config import ModelConfig, Run, TrainConfig
from shardwise.run.presets import PRESETS
from shardwise.run.problems import Problem, UserError, counted
from shardwise.run.read import PlannedRun, read_planned, read_run, read_served, run_from_dict
from shardwise.run.sections.adapter import AdapterConfig
from shardwise.run.sections.layout import LayoutConfig
from shardwise.run.sections.memory import MemoryConfig
from shardwise.run.write import to_dict, to_toml

__all__ = [
    "AXES",
    "PRESETS",
    "RANK_AXES",
    "AdapterConfig",
    "LayoutConfig",
    "MemoryConfig",
    "ModelConfig",
    "PlannedRun",
    "Problem",
    "Run",
    "TrainConfig",
    "UserError",
    "counted",
    "read_planned",
    "read_run",
    "read_served",
    "run_from_dict",
    "to_dict",
    "to_toml",
]
