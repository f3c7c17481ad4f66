"""How long a collective takes: the algorithms that NCCL has, each with its hops, its bytes and the bandwidth it reaches, and
the fastest of them.

Bytes follow nccl-tests: the whole buffer of an all-reduce, the gathered output of an all-gather, the whole input of a
reduce-scatter, what a rank holds in an all-to-all, the message of a broadcast or a send.

A ring sends (n-1)/n of the buffer over each link and passes n-1 hops, twice for an all-reduce (Patarasuk and Yuan 2009).
Between machines each member has a network card of its own, so with g members in a machine the ring crosses at g cards'
bandwidth. Trees pass log2 hops (Sanders et al. 2009); a switch that adds up itself takes the buffer once. Pipelining a buffer
through hops costs a term with the square root of its size on top of latency and bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.efficiency import constants

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
OPERATIONS: tuple[str, ...] = get_args(Operation)


def collective_seconds(
    cluster: Cluster, operation: Operation, bytes: Any, size: Any, stride: Any = 1, sharing: Any = 1
) -> Any:
    """Time of one collective over groups of `size` ranks `stride` apart, all groups of the axis at the same time.

    `sharing` says how many groups use each network card at once, where it is more than that one axis's.
    """
    fitted = constants("collectives", cluster.chip)["constants"]
    times = candidates(cluster, fitted, operation, bytes, size, stride, sharing)
    seconds = np.minimum.reduce(list(times.values()))
    if cluster.profile is not None:
        seconds = seconds * cluster.profile.collective_factor(cluster, operation, bytes, size, stride)
    seconds = np.where((np.asarray(size) > 1) & (np.asarray(bytes) > 0), seconds, 0.0)
    return seconds if seconds.ndim else float(seconds)


def choose(cluster: Cluster, operation: Operation, bytes: Any, size: Any, stride: Any = 1, sharing: Any = 1) -> Any:
    """The name of the algorithm that `collective_seconds` took."""
    fitted = constants("collectives", cluster.chip)["constants"]
    times = candidates(cluster, fitted, operation, bytes, size, stride, sharing)
    names = np.array(list(times))[np.argmin(np.stack(np.broadcast_arrays(*times.values())), axis=0)]
    return names if names.ndim else str(names)


def wire_bytes(operation: Operation, bytes: Any, size: Any) -> Any:
    """Bytes each rank has to send at least, whatever the algorithm without help from switches."""
    size = np.asarray(size, dtype=float)
    passes = {"all_reduce": 2.0, "send": 1.0, "broadcast": 1.0}.get(operation, 1.0)
    whole = operation in ("broadcast", "send")
    return np.asarray(bytes) * passes * np.where(size > 1, 1.0 if whole else (size - 1) / size, 0.0)


@dataclass(frozen=True)
class _Group:
    """A group of ranks on a cluster, as arrays: what every algorithm starts from."""

    cluster: Cluster
    fitted: dict[str, Any]
    bytes: Any
    size: Any
    inside: Any  # members in a fast-link domain
    domains: Any
    card: Any  # bytes/s of a member's network card

    def link(self, operation: str, cards: Any) -> Any:
        """Bytes/s that a ring or tree gets: of the fast link, or of `cards` network cards where the group crosses."""
        share, loss = self.fitted["shares"][operation]
        fast = (
            self.cluster.intra
            * share
            * (1 - loss / np.maximum(self.inside, 2))
            * _torus_share(self.cluster, self.inside)
        )
        slow = self.card * cards * self.fitted["inter_share"]
        return np.where(self.domains > 1, np.where(self.inside > 1, np.minimum(fast, slow), slow), fast)

    def latency(self, inside_hops: Any, crossing_hops: Any) -> Any:
        """Seconds that a first byte needs."""
        return inside_hops * self.cluster.intra_latency + crossing_hops * self.cluster.inter_latency

    def time(self, moved: Any, link: Any, inside_hops: Any, crossing_hops: Any) -> Any:
        """The better of two protocols: one that sends flags with the data, quick to start and slow, and one that fills
        buffers, which is slower to start and pays for pipelining."""
        first = self.latency(inside_hops, crossing_hops)
        flagged = self.fitted["base"] + first + moved / (link * self.fitted["flagged_share"])
        steady = moved / link
        start = self.fitted["buffered_hops"] * first
        buffered = self.fitted["buffered_base"] + start + steady + self.fitted["pipelining"] * np.sqrt(first * steady)
        return np.minimum(flagged, buffered)


def _torus_share(cluster: Cluster, size: Any) -> Any:
    """Share of a device's links that a group uses: a group of up to eight lies on one dimension of the torus, and so on."""
    if not cluster.torus_dims:
        return 1.0
    return np.clip(np.ceil(np.log2(np.maximum(size, 2)) / 3), 1, cluster.torus_dims) / cluster.torus_dims


def candidates(
    cluster: Cluster, fitted: dict[str, Any], operation: str, bytes: Any, size: Any, stride: Any, sharing: Any
) -> dict[str, Any]:
    """Seconds by algorithm, with any constants; infinite where an algorithm cannot be used."""
    size = np.asarray(size, dtype=float)
    group = _Group(
        cluster=cluster,
        fitted=fitted,
        bytes=np.asarray(bytes, dtype=float),
        size=size,
        inside=cluster.members_in_domain(size, stride),
        domains=cluster.spans(size, stride),
        card=cluster.network(size, stride, sharing),
    )
    return {name: algorithm(group) for name, algorithm in _ALGORITHMS[operation].items()}


def _ring(operation: str, passes: float) -> Callable[[_Group], Any]:
    def seconds(group: _Group) -> Any:
        share = 1.0 if operation == "broadcast" else (group.size - 1) / group.size
        crossing = np.where(group.domains > 1, group.domains - 1, 0)
        inside = group.size - 1 - crossing
        link = group.link(operation, group.inside)
        return group.time(passes * share * group.bytes, link, passes * inside, passes * crossing)

    return seconds


def _tree(operation: str, passes: float) -> Callable[[_Group], Any]:
    """Two binary trees over machines, so that every card is busy; a chain inside a machine."""

    def seconds(group: _Group) -> Any:
        link = group.link(operation, group.inside) * group.fitted["tree_share"]
        inside = passes * (group.inside - 1)
        return group.time(passes * group.bytes, link, inside, passes * np.ceil(np.log2(np.maximum(group.domains, 1))))

    return seconds


def _in_switch(group: _Group) -> Any:
    """The fast link's switch adds up and hands out: the buffer passes each device's link once (NVLink SHARP). Across domains
    a tree joins the switches, or, with in-network reduction, the network's switches add up as well."""
    cluster, fitted = group.cluster, group.fitted
    if not cluster.in_switch:
        return np.full(np.broadcast(group.bytes, group.size).shape, np.inf)
    inside = cluster.intra * fitted["in_switch_share"]
    passes = 1.0 if cluster.sharp else 2.0
    across = group.card * group.inside * fitted["inter_share"] / passes
    link = np.where(group.domains > 1, np.minimum(inside, across), inside)
    hops = 2 * np.ceil(np.log2(np.maximum(group.domains, 1)))
    first = group.latency(2, hops)
    steady = group.bytes / link
    seconds = fitted["in_switch_base"] + first + steady + fitted["pipelining"] * np.sqrt(first * steady)
    return np.where(group.inside > 2, seconds, np.inf)


def _doubling(operation: str) -> Callable[[_Group], Any]:
    """Gathering or scattering in log2 rounds; NCCL has it (PAT, since 2.23) for groups with one rank in a machine."""

    def seconds(group: _Group) -> Any:
        link = group.link(operation, 1.0) * group.fitted["tree_share"]
        rounds = np.ceil(np.log2(np.maximum(group.size, 1)))
        moved = group.bytes * (group.size - 1) / group.size
        return np.where(group.inside > 1, np.inf, group.time(moved, link, 0, rounds))

    return seconds


def _exchange(group: _Group) -> Any:
    """Every rank sends a part to every other: those of its own domain over the fast link, the rest over its card."""
    cluster, fitted = group.cluster, group.fitted
    part = group.bytes / group.size
    share, loss = fitted["shares"]["all_to_all"]
    fast = cluster.intra * share * (1 - loss / np.maximum(group.inside, 2))
    if cluster.torus_dims:
        # A part travels a quarter of a ring in each dimension.
        fast = fast / np.maximum(group.inside ** (1 / cluster.torus_dims) * cluster.torus_dims / 4, 1)
    inside = part * (group.inside - 1) / fast
    across = part * (group.size - group.inside) / (group.card * fitted["inter_share"])
    peers = fitted["peer"] * (group.inside - 1) + fitted["inter_peer"] * (group.size - group.inside)
    steady = np.maximum(inside, across)
    first = group.latency(1, np.where(group.domains > 1, 1, 0))
    return fitted["base"] + first + peers + steady + fitted["pipelining"] * np.sqrt((first + peers) * steady)


def _send(group: _Group) -> Any:
    """One message to a neighbour in the group: over the network as soon as some neighbours stand in different domains."""
    fitted, cluster = group.fitted, group.cluster
    crosses = group.domains > 1
    fast = cluster.intra * fitted["send_share"] * _torus_share(cluster, 2)
    link = np.where(crosses, group.card * fitted["inter_share"], fast)
    first = np.where(crosses, cluster.inter_latency, cluster.intra_latency)
    steady = group.bytes / link
    return fitted["base"] + first + steady + fitted["pipelining"] * np.sqrt(first * steady)


_ALGORITHMS: dict[str, dict[str, Callable[[_Group], Any]]] = {
    "all_reduce": {"ring": _ring("all_reduce", 2), "tree": _tree("all_reduce", 2), "in-switch": _in_switch},
    "all_gather": {"ring": _ring("all_gather", 1), "doubling": _doubling("all_gather")},
    "reduce_scatter": {"ring": _ring("reduce_scatter", 1), "doubling": _doubling("reduce_scatter")},
    "all_to_all": {"direct": _exchange},
    "broadcast": {"ring": _ring("broadcast", 1), "tree": _tree("broadcast", 1)},
    "send": {"direct": _send},
}
