"""The section of a run that says what is held elsewhere than in the device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.run.sections.declare import key


@dataclass(frozen=True)
class MemoryConfig:
    """What a device that is too small does not hold."""

    optimizer: Literal["device", "host", "disk"] = key(
        "device",
        "where AdamW's moments and the high-precision parameters are stored and updated; host: in CPU memory, by CPU threads, "
        "while the device holds the layers' matrices in train.dtype; disk: the same, with the moments in files in memory.folder",
    )
    activations: Literal["device", "host", "disk"] = key(
        "device",
        "where saved activations wait for the backward pass; host and disk take all of them, or with layout.recompute = optimal "
        "those that the planner chooses",
    )
    activation_bits: Literal[0, 8, 4, 2] = key(
        0,
        "bits per saved activation: quantized in groups, with stochastic rounding (ActNN); 0: not quantized",
    )
    lossless: bool = key(
        False,
        "do not save a tensor that another saved tensor gives bit for bit (Gist): for squared ReLU, save only the ReLU",
    )
    folder: str = key(
        "",
        "disk: an existing folder on a fast local disk; the run owns the files in it while it trains",
    )
    host_threads: int = key(0, "host: CPU threads that update the parameters; 0: one per core", least=0)
    update_gbs: float = key(
        0.0,
        "host: GB/s that these threads read and write during the update, for the plan; 0: as `shardwise bench` measured "
        "(cluster.profile), or else the bandwidth between device and host",
        least=0,
    )

    @property
    def swaps(self) -> bool:
        """Whether saved activations leave the device."""
        return self.activations != "device"

    @property
    def replaces_saved(self) -> bool:
        """Whether layers save something else in the place of some tensors."""
        return self.swaps or self.activation_bits > 0 or self.lossless

    @property
    def hosts_optimizer(self) -> bool:
        """Whether the optimizer is off the device."""
        return self.optimizer != "device"

    @property
    def on_disk(self) -> bool:
        """Whether its moments are in files."""
        return self.optimizer == "disk"


ALL_ON_DEVICE = MemoryConfig()
