"""The time of a collective: NCCL's algorithms, each with its hops, bytes and bandwidth, and the fastest of them.

Bytes follow nccl-tests: the whole buffer of an all-reduce, the gathered output of an all-gather, the whole input of a
reduce-scatter, the input of a rank in an all-to-all, the message of a broadcast or a send.

A ring sends (n-1)/n of the buffer over each link and passes n-1 hops, twice for an all-reduce (Patarasuk and Yuan 2009).
Each member has its own network card, so with g members in a machine the ring crosses machines at the bandwidth of g cards.
Trees pass log2 hops (Sanders et al. 2009); with in-switch reduction the buffer passes a link once. Pipelining a buffer
through hops adds a term with the square root of its size to latency and bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.efficiency import constants

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
COLLECTIVES: tuple[str, ...] = get_args(Collective)
LARGEST_VALUE = 8
"""Bytes of a float64, in which losses and norms are summed."""


def collective_seconds(
    cluster: Cluster, operation: Collective, bytes: Any, size: Any, stride: Any = 1, sharing: Any = 1
) -> Any:
    """Seconds of one collective over groups of `size` ranks `stride` apart, with all groups of the axis active at the same time.

    `sharing` is the number of groups that use each network card at once, where other axes use it too.
    """
    fitted = constants("collectives", cluster.chip)["constants"]
    times = candidates(cluster, fitted, operation, bytes, size, stride, sharing)
    seconds = np.minimum.reduce(list(times.values()))
    if cluster.profile is not None:
        # It was measured inside a machine: a group that spans several domains is not corrected.
        factor = cluster.profile.factor(
            "collective", (operation,), cluster, (bytes, size), lambda c, *at: collective_seconds(c, operation, *at)
        )
        seconds = seconds * np.where(cluster.spans(size, stride) > 1, 1.0, factor)
    seconds = np.where((np.asarray(size) > 1) & (np.asarray(bytes) > 0), seconds, 0.0)
    return seconds if seconds.ndim else float(seconds)


@dataclass(frozen=True)
class _Group:
    """A group of ranks on a cluster, as arrays; the input of every algorithm."""

    cluster: Cluster
    fitted: dict[str, Any]
    bytes: Any
    size: Any
    inside: Any  # members in a fast-link domain
    domains: Any
    card: Any  # bytes/s of a member's network card

    def fast(self, operation: str) -> Any:
        """Bytes/s of a device's fast link; groups of two or four ranks leave some of its channels idle."""
        share, loss = self.fitted["shares"][operation]
        full = self.cluster.intra * share * _torus_share(self.cluster, self.inside)
        return full * (1 - loss / np.maximum(self.inside, 2))

    def slow(self) -> Any:
        """Bytes/s between domains: the cards of all members of one domain together."""
        return self.card * self.inside * self.fitted["inter_share"]

    def steady(self, operation: str, moved_inside: Any, moved_across: Any) -> Any:
        """Seconds on the busier of the two kinds of link."""
        fast = np.where(self.inside > 1, moved_inside / self.fast(operation), 0.0)
        return np.maximum(fast, np.where(self.domains > 1, moved_across / self.slow(), 0.0))

    def latency(self, inside_hops: Any, crossing_hops: Any) -> Any:
        """Seconds until the first byte arrives."""
        return inside_hops * self.cluster.intra_latency + crossing_hops * self.cluster.inter_latency

    def time(self, steady: Any, first: Any) -> Any:
        """The faster of two protocols: flags sent with the data (LL: quick to start, slow), or filled buffers (Simple: slower to
        start, with a cost of pipelining)."""
        fitted = self.fitted
        flagged = fitted["base"] + first + steady / fitted["flagged_share"]
        buffered = fitted["buffered_base"] + first + steady + fitted["pipelining"] * np.sqrt(first * steady)
        return np.minimum(flagged, buffered)


def _torus_share(cluster: Cluster, size: Any) -> Any:
    """Share of a device's links that a group uses: up to eight ranks lie on one dimension of the torus, and so on."""
    if not cluster.torus_dims:
        return 1.0
    return np.clip(np.ceil(np.log2(np.maximum(size, 2)) / 3), 1, cluster.torus_dims) / cluster.torus_dims


def candidates(
    cluster: Cluster, fitted: dict[str, Any], operation: str, bytes: Any, size: Any, stride: Any, sharing: Any
) -> dict[str, Any]:
    """Seconds by algorithm, with any constants; infinite where an algorithm does not apply."""
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
    if cluster.far and cluster.chip.name == "cpu":
        return {"gloo": _gloo(operation, group)}
    return {name: algorithm(group) for name, algorithm in _ALGORITHMS[operation].items()}


def _gloo(operation: str, group: _Group) -> Any:
    """Seconds with gloo on CPUs of distant machines. gloo uses rings, and in each round a rank first tells its neighbour that it
    may send: every round costs a round trip. An all-to-all has one round. An all-reduce sends two segments in turn, so that about
    half of the round trips of a large one are hidden by the other segment. Where it has fewer values than ranks, most ranks have
    nothing to send and wait for the one that travels, and a hop costs its latency only if it crosses machines."""
    rounds = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0}.get(operation, 0.0)
    spans = group.domains > 1
    latency = np.where(spans, 2 * group.cluster.inter_latency, group.cluster.intra_latency)
    if not rounds:  # in an all-to-all each card carries only the data its own rank sends
        share = (group.size - group.inside) / group.size if operation == "all_to_all" else 1.0
        inside = group.bytes / group.fast(operation if operation == "all_to_all" else "all_gather")
        return latency + np.where(spans, group.bytes * share / group.card, inside)
    moved = rounds * group.bytes * (group.size - 1) / group.size
    through = np.where(spans, group.card * group.inside, group.fast(operation))
    hops = rounds * (group.size - 1)
    if operation != "all_reduce":
        return hops * latency + moved / through
    tiny = np.where(spans, (hops * group.domains / group.size + 1) * group.cluster.inter_latency, hops * latency)
    large = np.maximum(hops * latency, hops * latency / 2 + moved / through)
    return np.where(group.bytes < LARGEST_VALUE * group.size, tiny, large)


def _ring(operation: str, passes: float) -> Callable[[_Group], Any]:
    def seconds(group: _Group) -> Any:
        moved = passes * group.bytes * (1.0 if operation == "broadcast" else (group.size - 1) / group.size)
        crossing = group.domains - 1
        first = passes * group.latency(group.size - 1 - crossing, crossing)
        return group.time(group.steady(operation, moved, moved), first)

    return seconds


def _tree(operation: str, passes: float) -> Callable[[_Group], Any]:
    """Two binary trees over domains, so that every card is busy, and a chain inside each."""

    def seconds(group: _Group) -> Any:
        moved = passes * group.bytes / group.fitted["tree_share"]
        across = moved * (_tree_share(group) if operation == "all_reduce" else 1.0)
        first = passes * group.latency(group.inside - 1, np.ceil(np.log2(group.domains)))
        return group.time(group.steady(operation, moved, across), first)

    return seconds


def _tree_share(group: _Group) -> Any:
    """Two domains exchange their sums directly, which halves the crossing bytes; in larger trees some ranks forward both ways."""
    return np.where(group.domains > 2, 1.0, 0.5)


def _in_switch(group: _Group) -> Any:
    """The fast link's switch reduces and broadcasts, so the buffer passes each device's link once (NVLink SHARP). Across domains,
    trees connect the switches or, with SHARP in the network, the network's switches reduce as well."""
    cluster, fitted = group.cluster, group.fitted
    if not cluster.in_switch:
        return np.full(np.broadcast(group.bytes, group.size).shape, np.inf)
    share = 1.0 if cluster.sharp else 2.0 * _tree_share(group) / fitted["tree_share"]
    across = np.where(group.domains > 1, share * group.bytes / group.slow(), 0.0)
    steady = np.maximum(group.bytes / (cluster.intra * fitted["in_switch_share"]), across)
    first = group.latency(2, 2 * np.ceil(np.log2(group.domains)))
    seconds = fitted["in_switch_base"] + first + steady + fitted["in_switch_pipelining"] * np.sqrt(first * steady)
    return np.where(group.inside > 2, seconds, np.inf)


def _doubling(operation: str) -> Callable[[_Group], Any]:
    """Recursive doubling in log2 rounds; NCCL has it (PAT, since 2.23) for groups with one rank per machine."""

    def seconds(group: _Group) -> Any:
        moved = group.bytes * (group.size - 1) / group.size / group.fitted["tree_share"]
        first = group.latency(0, np.ceil(np.log2(group.size)))
        return np.where(group.inside > 1, np.inf, group.time(group.steady(operation, moved, moved), first))

    return seconds


def _exchange(group: _Group) -> Any:
    """Every rank sends a slice to every other: in its own domain over the fast link, to the rest over its card."""
    cluster, fitted = group.cluster, group.fitted
    part = group.bytes / group.size
    # On a torus a slice travels a quarter of the ring in each dimension on average.
    dims = cluster.torus_dims
    travelled = np.maximum(group.inside ** (1 / dims) * dims / 4, 1) if dims else 1.0
    inside = part * (group.inside - 1) * travelled / group.fast("all_to_all")
    across = part * (group.size - group.inside) / (group.card * fitted["inter_share"])
    steady = np.maximum(inside, across)
    peers = fitted["peer"] * (group.inside - 1) + fitted["inter_peer"] * (group.size - group.inside)
    first = group.latency(1, np.minimum(group.domains - 1, 1)) + peers
    return fitted["base"] + first + steady + fitted["pipelining"] * np.sqrt(first * steady)


def _send(group: _Group) -> Any:
    """One message to a neighbour in the group: over the network if any neighbours are in different domains."""
    fitted, cluster = group.fitted, group.cluster
    crosses = group.domains > 1
    fast = cluster.intra * fitted["send_share"] * _torus_share(cluster, 2)
    link = np.where(crosses, group.card * fitted["inter_share"], fast)
    return fitted["base"] + np.where(crosses, cluster.inter_latency, cluster.intra_latency) + group.bytes / link


_ALGORITHMS: dict[str, dict[str, Callable[[_Group], Any]]] = {
    "all_reduce": {"ring": _ring("all_reduce", 2), "tree": _tree("all_reduce", 2), "in-switch": _in_switch},
    "all_gather": {"ring": _ring("all_gather", 1), "doubling": _doubling("all_gather")},
    "reduce_scatter": {"ring": _ring("reduce_scatter", 1), "doubling": _doubling("reduce_scatter")},
    "all_to_all": {"direct": _exchange},
    "broadcast": {"ring": _ring("broadcast", 1), "tree": _tree("broadcast", 1)},
    "send": {"direct": _send},
}
