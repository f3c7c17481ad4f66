"""The section of a run that says what is trained beside frozen weights: adapters of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.run.sections.declare import key

MATRICES = ("q", "k", "v", "out", "gate", "up", "down", "q_down", "kv_down", "kv")
"""Names of matrices that may have an adapter, of attention, of feed-forward layers and of experts."""


@dataclass(frozen=True)
class AdapterConfig:
    """Adapters of low rank. With them every other parameter is frozen: it takes no gradient and no optimizer state."""

    kind: Literal["none", "lora", "dora", "qlora"] = key(
        "none",
        "none: train all parameters; lora: train only adapters; dora: adapters and the norm of each matrix row; qlora: adapters, "
        "with the frozen matrices in 4 bits",
    )
    rank: int = key(16, "rank of an adapter", least=1)
    alpha: float = key(32.0, "scale: an adapter's output is multiplied by alpha / rank", above=0)
    dropout: float = key(0.0, "dropout rate on an adapter's input during training", least=0, most=0.95)
    targets: tuple[str, ...] = key(
        ("all",), 'matrices that get an adapter, by the last part of their name ("q", "down"), or "all"'
    )
    rank_stabilized: bool = key(False, "scale by alpha / sqrt(rank) instead (rsLoRA)")
    double_quantization: bool = key(True, "qlora: store the scales of the 4-bit blocks in 8 bits")

    @property
    def used(self) -> bool:
        """Whether there are any."""
        return self.kind != "none"

    @property
    def scale(self) -> float:
        """The factor on an adapter's output (Hu et al. 2021, section 4.1; Kalajdzievski 2023 for the rank-stabilised one)."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def adapts(self, matrix: str) -> bool:
        """Whether a matrix of a layer has one, by its name without `.weight`."""
        return self.used and ("all" in self.targets or matrix.rpartition(".")[2] in self.targets)


NO_ADAPTER = AdapterConfig()
NF4_BLOCK, NF4_SCALES = 64, 256
"""qlora: weights that share a scale, and scales that share one (Dettmers et al. 2023, section 3)."""
