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
        "where AdamW's moments and the parameters in high precision are stored and updated; host: in the CPU's memory, by its "
        "threads, and the device holds the layers' matrices in the dtype of the arithmetic; disk: the same, with the moments in "
        "files of memory.folder",
    )
    activations: Literal["device", "host", "disk"] = key(
        "device",
        "where what layers save waits for the backward pass; host, disk: elsewhere, all of it, or with layout.recompute = optimal "
        "what the planner chooses",
    )
    activation_bits: Literal[0, 8, 4, 2] = key(
        0,
        "bits of what layers save for the backward pass, in groups with a range and rounded at random (ActNN); 0: as it is",
    )
    lossless: bool = key(
        False,
        "save what other saved tensors give bit for bit no second time (Gist): of a squared ReLU its root alone",
    )
    folder: str = key(
        "",
        "optimizer, activations = disk: an existing folder on a fast disk of the machine; its files are the run's while it trains",
    )
    host_threads: int = key(0, "host: threads that update; 0: as many as the process has cores", least=0)
    update_gbs: float = key(
        0.0,
        "host: GB/s that these threads read and write while they update, for the plan; 0: as `shardwise bench` measured in "
        "cluster.profile, or as many as the device's link to its host has",
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
