"""Training objectives by name. Each is a file that defines the targets of tokens, the weight of each term, and the normaliser of
the sum over the global batch."""

from __future__ import annotations

from shardwise.train.objectives.distill import Distill
from shardwise.train.objectives.dpo import DPO
from shardwise.train.objectives.grpo import Grpo
from shardwise.train.objectives.kto import KTO
from shardwise.train.objectives.objective import TrainObjective
from shardwise.train.objectives.orpo import ORPO
from shardwise.train.objectives.pretrain import Pretrain
from shardwise.train.objectives.reward import Reward
from shardwise.train.objectives.sft import SFT
from shardwise.train.objectives.simpo import SimPO

OBJECTIVES: dict[str, type[TrainObjective]] = {
    "pretrain": Pretrain,
    "sft": SFT,
    "dpo": DPO,
    "kto": KTO,
    "orpo": ORPO,
    "reward": Reward,
    "simpo": SimPO,
    "grpo": Grpo,
    "distill": Distill,
}

__all__ = ["OBJECTIVES", "TrainObjective"]
