"""Memory and collectives: near what was measured, closed forms for large buffers, bounded by the links."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.hardware import (
    CHIPS,
    COLLECTIVES,
    collective_seconds,
    make_cluster,
    memory_seconds,
)
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.collectives import candidates
from shardwise.hardware.efficiency import constants
from shardwise.ledger import wire_bytes
from shardwise.run import UserError

MIB = 2**20
A100 = make_cluster("a100", 4)
H100 = make_cluster("h100", 32)


def sent(operation: str, moved: float, size: int) -> float:
    """Bytes a rank sends; the ledger counts an all-gather by what a rank puts in, nccl-tests by what comes out."""
    return float(wire_bytes(operation, size, 1)) * moved / (size if operation == "all_gather" else 1)


def chosen(cluster: Cluster, operation: str, moved: float, size: int, stride: int = 1) -> str:
    fitted = constants("collectives", cluster.chip)["constants"]
    times = candidates(cluster, fitted, operation, moved, size, stride, 1)
    return min(times, key=lambda name: times[name])


# Operation, MiB, ranks and microseconds on A100 in one machine: NCCL 2.27 (AIConfigurator), vTrain for the last three.
A100_MEASURED = [
    ("all_reduce", 8, 8, 128.0),
    ("all_reduce", 128, 4, 1000),
    ("all_reduce", 512, 2, 2781),
    ("all_gather", 128, 8, 660.3),
    ("all_gather", 512, 4, 2102),
    ("reduce_scatter", 32, 8, 210.0),
    ("reduce_scatter", 512, 8, 2207),
    ("all_to_all", 128, 8, 640.5),
    ("all_to_all", 512, 4, 2066),
    ("all_reduce", 64, 8, 579.9),
    ("all_reduce", 256, 8, 2162),
    ("all_reduce", 1024, 4, 7259),
]
# Bus bandwidth in GB/s by MiB of an all-reduce in one 8-H200 machine, the switch adding up.
H200_BUS = {1: 40, 16: 220, 64: 347, 512: 450, 16384: 482}
# The same over four 8-B200 machines on EFA.
B200_BUS = {64: 157, 1024: 362, 16384: 382}


@pytest.mark.parametrize(("operation", "mib", "ranks", "micro"), A100_MEASURED)
def test_a100_collectives_take_the_time_measured(operation: str, mib: int, ranks: int, micro: float) -> None:
    assert collective_seconds(A100, operation, mib * MIB, ranks) * 1e6 == pytest.approx(micro, rel=0.15)


def test_published_all_reduces() -> None:
    for chip, nodes, fabric, bus in (("h200", 1, "", H200_BUS), ("b200", 4, "ethernet", B200_BUS)):
        cluster = make_cluster(chip, nodes, fabric=fabric)
        moved = np.array(list(bus)) * MIB
        seconds = collective_seconds(cluster, "all_reduce", moved, cluster.devices)
        np.testing.assert_allclose(
            sent("all_reduce", moved, cluster.devices) / seconds / 1e9, list(bus.values()), rtol=0.16
        )


def test_a_device_copy_runs_at_the_measured_speed() -> None:
    """4.3 of 4.8 TB/s on an H200, less for norms and activations."""
    assert 8e9 / memory_seconds(CHIPS["h200-sxm"], 8e9) == pytest.approx(4.2e12, rel=0.06)
    assert memory_seconds(CHIPS["h200-sxm"], 0) == 0
    assert memory_seconds(CHIPS["h200-sxm"], np.array([0, 1e3]))[1] > 1e-6


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.sampled_from(sorted(CHIPS)))
def test_memory_is_monotone_and_bounded(one: float, other: float, name: str) -> None:
    small, large = sorted((one, other))
    assert memory_seconds(CHIPS[name], small) <= memory_seconds(CHIPS[name], large)
    assert memory_seconds(CHIPS[name], small) >= small / CHIPS[name].hbm


def test_a_large_ring_runs_at_the_network_cards_of_its_members() -> None:
    """Eight members in a machine have eight cards; one member has one, since its neighbours' cards serve other groups."""
    moved = 2**36
    for stride, cards in ((1, 8), (2, 4), (8, 1)):
        seconds = collective_seconds(A100, "all_gather", moved, 32 // stride, stride)
        speed = sent("all_gather", moved, 32 // stride) / seconds
        assert 0.85 * cards * 25e9 < speed < cards * 25e9
    halved = collective_seconds(A100, "all_gather", moved, 4, 8, sharing=2)
    assert halved == pytest.approx(2 * collective_seconds(A100, "all_gather", moved, 4, 8), rel=0.05)


def test_one_rank_or_nothing_to_send_takes_no_time() -> None:
    for operation in COLLECTIVES:
        assert collective_seconds(A100, operation, 1e6, 1) == 0
        assert collective_seconds(A100, operation, 0, 8) == 0


operations = st.sampled_from(COLLECTIVES)
clusters = st.sampled_from(
    [make_cluster(name, 16) for name in sorted(CHIPS)] + [make_cluster("h100", 64, fabric="fat-tree", taper=3.0)]
)


@given(clusters, operations, st.floats(1, 1e11), st.floats(1, 1e11), st.sampled_from([2, 4, 8, 16]), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_more_bytes_are_never_faster(
    cluster: object, operation: str, one: float, other: float, size: int, shift: int
) -> None:
    small, large = sorted((one, other))
    times = [collective_seconds(cluster, operation, moved, size, 2**shift) for moved in (small, large)]  # type: ignore[arg-type]
    assert times[0] <= times[1] * (1 + 1e-12)


@given(operations, st.floats(1e3, 1e11), st.sampled_from([2, 4, 8, 16, 64, 256]), st.sampled_from([1, 2, 8, 16]))
@settings(max_examples=80, deadline=None)
def test_never_faster_than_the_links(operation: str, moved: float, size: int, stride: int) -> None:
    seconds = collective_seconds(A100, operation, moved, size, stride)  # rings and trees only: no switch adds up
    assert seconds >= sent(operation, moved, size) / A100.intra
    inside = int(A100.members_in_domain(size, stride))
    if inside < size and operation != "send":
        crossing = {"all_reduce": 1.0, "broadcast": 1.0}.get(operation, (size - inside) / size)
        assert seconds >= crossing * moved / (inside * A100.inter)


def test_arrays_give_what_numbers_give() -> None:
    moved, sizes, strides = 10.0 ** np.arange(3, 11), np.array([[1], [2], [8], [64]]), np.array([[[1]], [[4]]])
    for operation in COLLECTIVES:
        together = collective_seconds(H100, operation, moved, sizes, strides)
        each = [
            [[collective_seconds(H100, operation, float(b), int(n), int(s)) for b in moved] for n in sizes[:, 0]]
            for s in strides[:, 0, 0]
        ]
        np.testing.assert_allclose(together, each, rtol=1e-12)


def test_the_algorithm_chosen_is_nccls() -> None:
    assert chosen(H100, "all_reduce", 2**30, 8) == "in-switch"
    assert chosen(A100, "all_reduce", 2**30, 8) == "ring"
    assert chosen(H100, "all_reduce", 2**16, 256) == "tree"
    assert chosen(H100, "all_gather", 2**16, 32, 8) == "doubling"
    assert chosen(H100, "all_to_all", 2**20, 64) == "direct"


def test_in_network_reduction_halves_what_crosses() -> None:
    with_sharp = dataclasses.replace(H100, sharp=True)
    assert collective_seconds(with_sharp, "all_reduce", 2**34, 256) < 0.75 * collective_seconds(
        H100, "all_reduce", 2**34, 256
    )


def test_members_of_groups_share_domains() -> None:
    assert H100.members_in_domain(16, 1) == 8
    assert H100.members_in_domain(4, 1) == 4
    assert H100.members_in_domain(32, 4) == 2
    assert H100.members_in_domain(32, 8) == H100.members_in_domain(2, 64) == 1
    assert H100.spans(16, 4) == 8
    rack = make_cluster("gb200", 36)
    assert (rack.per_node, rack.domain, rack.nodes, rack.devices) == (4, 72, 36, 144)
    assert rack.members_in_domain(64, 1) == 64


def test_a_taper_slows_groups_beyond_a_pod() -> None:
    plain, tapered = make_cluster("a100", 128), make_cluster("a100", 128, fabric="fat-tree", taper=2.0)
    inside, beyond = (("all_gather", 2**34, 32, 8), ("all_gather", 2**34, 128, 8))
    assert collective_seconds(tapered, *inside) == collective_seconds(plain, *inside)
    assert collective_seconds(tapered, *beyond) == pytest.approx(2 * collective_seconds(plain, *beyond), rel=0.1)


def test_a_cluster_takes_what_it_is_given() -> None:
    cluster = make_cluster("h100", 2, 4, intra_gbs=200, inter_gbs=12.5, power_w=500, hbm_gbs=2400)
    assert (cluster.devices, cluster.per_node, cluster.domain) == (8, 4, 4)
    assert (cluster.intra, cluster.inter, cluster.chip.hbm) == (200e9, 12.5e9, 2.4e12)
    assert cluster.chip.clock < 1


def test_a_users_mistakes_come_together() -> None:
    with pytest.raises(UserError) as caught:
        make_cluster("h100", 0, fabric="string", taper=0.5)
    assert [problem.key for problem in caught.value.problems] == ["nodes", "taper", "fabric"]


def test_switches_that_add_up_make_large_all_reduces_cheaper_and_nothing_else() -> None:
    plain, adding = (make_cluster("h100-sxm", 16, sharp=sharp) for sharp in (False, True))
    assert collective_seconds(adding, "all_reduce", 1e9, 128) < 0.8 * collective_seconds(plain, "all_reduce", 1e9, 128)
    for operation, size in (("all_gather", 128), ("reduce_scatter", 128), ("all_to_all", 128), ("all_reduce", 8)):
        assert collective_seconds(adding, operation, 1e9, size) == collective_seconds(plain, operation, 1e9, size)
