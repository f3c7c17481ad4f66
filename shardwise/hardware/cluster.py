"""A cluster of devices: how many are in a machine, how many share the fast link, and the network between them.

The axes of the rank order are, from the innermost: tensor, context, shard, replicate, pipeline. A group of an axis is given
by its size and its stride, the product of the sizes inside it: members are `stride` ranks apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.hardware.chips import FABRICS, GB, Chip, Fabric, find_chip
from shardwise.hardware.efficiency import constants
from shardwise.run.problems import Problem, UserError

# Latency of a hop over a cloud's Ethernet relative to InfiniBand, since software does the work of InfiniBand cards
# there: from the published all-reduces of four B200 machines on EFA.
ETHERNET_LATENCY = 20.0
# Machines under one pair of leaf switches in the usual scalable unit; a tapered fat tree has less bandwidth above.
POD_NODES = 32


@dataclass(frozen=True)
class Cluster:
    """The properties that collectives depend on. Bandwidths are bytes/s per device and direction, latencies seconds per hop."""

    chip: Chip
    devices: int
    per_node: int
    domain: int  # devices joined by the fast link; more than per_node where it joins machines
    intra: float
    inter: float
    intra_latency: float
    inter_latency: float
    kind: Fabric = "rail"
    taper: float = 1.0  # factor by which a device's bandwidth drops beyond its pod
    pod: int = 0  # devices in a pod, within which the bandwidth is full
    torus_dims: int = 0  # dimensions of the fast link's torus; 0: it is a switch
    in_switch: bool = False  # the fast link's switch reduces (NVLink SHARP)
    sharp: bool = False  # the network's switches reduce too
    profile: Any = None
    far: bool = False  # machines are further apart than usual: small messages within a step cost time too

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return -(-self.devices // self.per_node)

    def members_in_domain(self, size: Any, stride: Any = 1) -> Any:
        """How many members of a group share one fast-link domain."""
        return np.clip(np.floor_divide(self.domain, stride), 1, size)

    def spans(self, size: Any, stride: Any = 1) -> Any:
        """How many fast-link domains a group spans."""
        return np.ceil(np.divide(size, self.members_in_domain(size, stride)))

    def network(self, size: Any, stride: Any = 1, sharing: Any = 1) -> Any:
        """Bytes/s of one device's network card for a group: less beyond a pod of a tapered tree, or when groups share the card."""
        beyond = np.where(np.multiply(size, stride) > self.pod, self.taper, 1.0)
        return self.inter / (beyond * sharing)


def make_cluster(
    chip_name: str | Chip,
    nodes: int,
    per_node: int = 0,
    intra_gbs: float = 0,
    inter_gbs: float = 0,
    power_w: float = 0,
    hbm_gbs: float = 0,
    domain: int = 0,
    taper: float = 1.0,
    fabric: str = "",
    profile: Any = None,
    latency_ms: float = 0,
    sharp: bool = False,
) -> Cluster:
    """`nodes` machines of a chip; 0 or "" means the default of that chip."""
    chip = find_chip(chip_name) if isinstance(chip_name, str) else chip_name
    problems = [
        Problem(f"is {value}, but has to be at least {least}", name)
        for name, value, least in (
            ("nodes", nodes, 1),
            ("per_node", per_node, 0),
            ("domain", domain, 0),
            ("taper", taper, 1),
        )
        if value < least
    ]
    kind = fabric or chip.fabric
    if kind not in FABRICS:
        problems.append(Problem(f'is "{fabric}", but has to be one of {", ".join(FABRICS)}', "fabric"))
    if problems:
        raise UserError(*problems)
    chip = chip.altered(power_w, hbm_gbs)
    if profile is not None:
        chip = replace(chip, profile=profile)
    per_node = per_node or chip.devices_per_node
    # A fast link across machines keeps its domain whatever per_node is; any other ends at the machine.
    domain = domain or (chip.domain if chip.domain > chip.devices_per_node else per_node)
    fitted = constants("collectives", chip)["constants"]
    torus = kind == "torus"
    return Cluster(
        chip=chip,
        devices=nodes * per_node,
        per_node=per_node,
        domain=domain,
        intra=intra_gbs * GB or chip.intra,
        inter=inter_gbs * GB or chip.inter,
        intra_latency=fitted["hop"],
        inter_latency=latency_ms * 1e-3 or fitted["inter_hop"] * (ETHERNET_LATENCY if kind == "ethernet" else 1.0),
        far=latency_ms > 0,
        kind=kind,  # type: ignore[arg-type]
        taper=taper,
        pod=POD_NODES * per_node,
        torus_dims=(2 if "tpu-v3" in (chip.name, chip.lender) else 3) if torus else 0,
        in_switch=bool(fitted.get("in_switch_share")) and not torus,
        sharp=sharp,
        profile=profile,
    )
