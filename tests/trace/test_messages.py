"""Messages by axis over several ranks, against sets of single nanoseconds: time, exposure, bytes, clocks and waiting, exactly."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_jobs import Host, explained, job_member, message, moments

from shardwise.trace.answers import spread

GROUPS = {"0": ("default_pg", (0, 1, 2, 3)), "5": ("tensor", (0, 1, 2, 3)), "6": ("mesh_dp_shard", (0, 1, 2, 3))}
AXIS = {"0": "world", "5": "tensor", "6": "shard"}
KINDS = ("allreduce", "_allgather_base", "_reduce_scatter_base")
WORDS = dict(zip(KINDS, ("all_reduce", "all_gather", "reduce_scatter"), strict=True))

round_of_messages = st.tuples(
    st.sampled_from(sorted(GROUPS)), st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 30),
    st.lists(st.integers(0, 40), min_size=4, max_size=4), st.integers(0, 60),
)  # fmt: skip


def fraction(kind: str, elements: int) -> Fraction:
    """Bytes on the wire of four ranks and floats, worked out by hand."""
    size = 4 * elements
    return {
        "allreduce": Fraction(2 * 3 * size, 4),
        "_allgather_base": Fraction(3 * size),
        "_reduce_scatter_base": Fraction(3 * size, 4),
    }[kind]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.lists(round_of_messages, min_size=3, max_size=7),
    shifts=st.lists(st.integers(-(10**6), 10**6), min_size=3, max_size=3),
    numbered=st.booleans(),
)
def test_exact_on_made_up_jobs(tmp_path: Path, rounds: list, shifts: list[int], numbered: bool) -> None:
    """Four ranks whose clocks are wrong by `shifts`; all leave a collective at the same moment."""
    wrong = [0, *shifts]
    hosts = [Host() for _ in range(4)]
    now, sent, computed = 0, [], {rank: [] for rank in range(4)}
    for number, (group, kind, elements, transfer, late, busy) in enumerate(rounds):
        arrive = [now + one for one in late]
        end = max(arrive) + transfer
        for rank, host in enumerate(hosts):
            told = message(kind, elements, group, 4, number if numbered else -1)
            host.launch(
                "ncclDevKernel_X", arrive[rank] + wrong[rank], arrive[rank] + wrong[rank], end - arrive[rank], 9, **told
            )
            if busy:
                host.launch("gemm", arrive[rank] + wrong[rank], arrive[rank] + wrong[rank], busy)
                computed[rank].append((arrive[rank], arrive[rank] + busy))
            sent.append((rank, group, kind, elements, arrive[rank], end, max(arrive)))
        now = max(end, max(arrive) + busy) + 1
    ranks = {rank: (job_member(rank, 4, GROUPS), host.events) for rank, host in enumerate(hosts)}
    answers = explained(tmp_path, ranks)

    assert {rank: clock.offset for rank, clock in answers.clocks.items()} == {r: -wrong[r] for r in range(4)}
    rows = {(row.axis, row.collective): row for row in answers.axes}
    assert set(rows) == {(AXIS[group], WORDS[kind]) for _, group, kind, *_ in sent}
    for (axis, collective), row in rows.items():
        for rank in range(4):
            mine = [one for one in sent if one[0] == rank and (AXIS[one[1]], WORDS[one[2]]) == (axis, collective)]
            moved, under_way = row.ranks[rank], moments([(one[4], one[5]) for one in mine])
            assert moved.messages == moved.sized == moved.matched == len(mine)
            assert moved.bytes == float(sum(fraction(one[2], one[3]) for one in mine))
            assert moved.time == len(under_way)
            assert moved.exposed == len(under_way - moments(computed[rank]))
            assert moved.wait == sum(one[6] - one[4] for one in mine)
            assert moved.timed == sum(one[5] - one[6] for one in mine)
    for rank in range(4):
        assert sum(answers.idle[rank].values()) == answers.ranks[rank]["idle"]
        assert sum(answers.categories[rank].values()) == answers.ranks[rank]["span"]
    path = answers.critical_path
    assert path is not None
    assert sum(path.categories.values()) == sum(path.ranks.values()) == path.length


def test_a_label_knows_better(tmp_path: Path) -> None:
    host = Host()
    host.span("cpu_op", "shardwise:message zero all_gather 100/3", 10, 20)
    host.span("cpu_op", "c10d::_allgather_base_", 12, 10)
    host.launch("ncclDevKernel_AllGather", 15, 40, 10, 9)
    host.launch("ncclDevKernel_AllGather", 17, 50, 10, 9)  # one message, two kernels
    (row,) = explained(tmp_path, {0: ("", host.events)}).axes
    assert (row.axis, row.collective) == ("shard", "all_gather")
    assert (row.total.messages, row.total.bytes, row.total.time) == (1, 100 / 3, 20)


def test_shapes_where_nothing_else_is_said(tmp_path: Path) -> None:
    host = Host()
    host.span(
        "cpu_op",
        "c10d::_allgather_base_",
        10,
        20,
        **{"Input Dims": [[64, 8], [8, 8], []], "Input type": ["float", "float", ""]},
    )
    host.span("user_annotation", "nccl:_all_gather_base", 12, 10, **{"Input Dims": [[8, 8]], "Input type": ["float"]})
    host.launch("ncclKernel_AllGather_RING", 14, 40, 100, 9)
    host.span("user_annotation", "nccl:all_to_all", 200, 10, **{"Input Dims": [[16]], "Input type": ["c10::Half"]})
    host.launch("ncclKernel_SendRecv_RING", 203, 240, 100, 9)
    host.launch("ncclKernel_SendRecv_RING", 290, 350, 100, 9)  # its call was not recorded
    answers = explained(tmp_path, {0: ('"distributedInfo": {"rank": 0, "world_size": 16}, ', host.events)})
    rows = {row.collective: row for row in answers.axes}
    assert set(rows) == {"all_gather", "all_to_all"}
    assert (rows["all_gather"].group, rows["all_gather"].total.bytes) == (8, 7 * 64 * 4)
    assert rows["all_gather"].total.algorithm_bandwidth == 8 * 64 * 4 / 100e-9
    assert (rows["all_to_all"].total.messages, rows["all_to_all"].total.sized) == (2, 1)
    assert rows["all_to_all"].total.bytes == 30  # fifteen sixteenths of 32 bytes
    assert any("1 messages is not in the profile" in said for said in answers.unseen)


def test_uneven_all_to_all(tmp_path: Path) -> None:
    host = Host()
    told = message("all_to_allv", 100, "3", 4, **{"In split size": "[10, 20, 30, 40]", "dtype": "BFloat16"})
    host.launch("ncclDevKernel_SendRecv", 0, 10, 50, 9, **told)
    member = job_member(2, 4, {"3": ("expert", (0, 1, 2, 3))})
    (row,) = explained(tmp_path, {2: (member, host.events)}).axes
    assert (row.axis, row.total.bytes) == ("expert", 2 * (10 + 20 + 40))


def test_ranks_that_disagree_are_not_matched(tmp_path: Path) -> None:
    hosts = [Host(), Host()]
    for rank, host in enumerate(hosts):
        for at in range(3 - rank):
            host.launch("nccl", 100 * at, 100 * at, 50, 9, **message("allreduce", 4, "5", 2))
    members = {rank: job_member(rank, 2, {"5": ("tensor", (0, 1))}) for rank in range(2)}
    answers = explained(tmp_path, {rank: (members[rank], host.events) for rank, host in enumerate(hosts)})
    assert [clock.uncertainty for clock in answers.clocks.values()] == [-1, -1]
    assert answers.axes[0].total.matched == 0
    assert any("could not be matched" in said for said in answers.unseen)


def test_collectives_that_do_not_end_together_are_no_match(tmp_path: Path) -> None:
    hosts = [Host(), Host()]
    for at in range(6):
        hosts[0].launch("nccl", 1000 * at, 1000 * at, 50, 9, **message("allreduce", 4, "5", 2))
        strayed = 1000 * at + (400 if at % 2 else -400)
        hosts[1].launch("nccl", strayed + 3000, strayed + 3000, 50, 9, **message("allreduce", 4, "5", 2))
    members = {rank: job_member(rank, 2, {"5": ("tensor", (0, 1))}) for rank in range(2)}
    answers = explained(tmp_path, {rank: (members[rank], host.events) for rank, host in enumerate(hosts)})
    assert answers.axes[0].total.matched == 0


def test_a_send_and_its_receive(tmp_path: Path) -> None:
    hosts = [Host(), Host()]
    hosts[0].launch("gemm", 0, 0, 300)
    hosts[0].launch(
        "ncclDevKernel_SendRecv", 290, 300, 50, 9, **message("send", 10, "8", 2, **{"Src Rank": 0, "Dst Rank": 1})
    )
    hosts[1].launch(
        "ncclDevKernel_SendRecv", 0, 10, 340, 9, **message("recv", 10, "8", 2, **{"Src Rank": 0, "Dst Rank": 1})
    )
    members = {rank: job_member(rank, 2, {"8": ("pipeline", (0, 1))}) for rank in range(2)}
    answers = explained(tmp_path, {rank: (members[rank], host.events) for rank, host in enumerate(hosts)})
    rows = {row.collective: row.total for row in answers.axes}
    assert (rows["send"].wait, rows["recv"].wait) == (0, 290)
    assert (rows["send"].bytes, rows["recv"].bytes) == (40, 0)
    path = answers.critical_path
    assert path is not None
    # The receiver's end waits for the sender, and the sender for its own product.
    assert path.ranks == {0: 300, 1: 50}
    assert path.categories == {"compute": 300, "communication pipeline": 50}


def test_spread() -> None:
    one = spread({3: 5, 1: 9, 2: 5})
    assert (one.total, one.mean, one.lowest, one.lowest_rank, one.highest, one.highest_rank) == (
        19,
        pytest.approx(19 / 3),
        5,
        2,
        9,
        1,
    )
    assert spread({}).lowest_rank == -1


def test_a_thread_that_waits_does_not_compute(tmp_path: Path) -> None:
    """Without a device: an all-reduce carried by another thread, while the one that called it waits inside an operator."""
    for asynchronous, exposed in (("False", 65), ("True", 12)):
        host = Host()
        host.span("cpu_op", "SumBackward0", 0, 75)
        host.span("cpu_op", "shardwise:message tensor all_reduce 12", 8, 14)
        values = {"Concrete Inputs": ["", "", "", "", asynchronous, "-1"], "Input Dims": [[[3]], [], [], [], [], []]}
        host.span("cpu_op", "c10d::allreduce_", 10, 10, **values)
        host.span("user_annotation", "gloo:all_reduce", 15, 65, tid=2)
        answers = explained(tmp_path, {0: (job_member(0, 2, {"5": ("tensor", (0, 1))}, "gloo"), host.events)})
        (row,) = answers.axes
        assert (row.axis, row.total.bytes, row.total.time) == ("tensor", 12, 65)
        assert row.total.exposed == exposed
        path = answers.critical_path
        assert path is not None
        assert path.categories["communication tensor"] >= 5
        assert sum(answers.categories[0].values()) == 80
