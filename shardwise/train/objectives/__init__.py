"""Objectives by name: what is learned from a batch. Each is a file: which targets tokens have, what each term weighs, and by what
the sum over the global batch is divided."""

from __future__ import annotations

from shardwise.train.objectives.objective import TrainObjective
from shardwise.train.objectives.pretrain import Pretrain

OBJECTIVES: dict[str, type[TrainObjective]] = {"pretrain": Pretrain}

__all__ = ["OBJECTIVES", "TrainObjective"]
