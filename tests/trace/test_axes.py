"""Whose traffic a group's is, and what a collective is called."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from made_jobs import Host, explained, job_member, message

from shardwise.ledger import wire_bytes
from shardwise.trace.comms.describe import axis_of, collective_of, element_bytes


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("tensor", "tensor"), ("pipeline_back", "pipeline"), ("zero", "shard"), ("sequence", "expert"),
        ("mesh_dp_shard", "shard"), ("mesh_tp", "tensor"), ("mesh_dp_replicate", "replicate"), ("mesh_cp", "context"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"), ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "replicate"), ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_TENSOR_PARALLEL_GROUP", "tensor"), ("EMBEDDING_GROUP", "pipeline"), ("default_pg", "world"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "TENSOR_AND_DATA_PARALLEL_GROUP"), ("undefined", "group 7"), ("", "group 7"),
        ("my own group", "my own group"),
    ],
)  # fmt: skip
def test_axis_of_a_description(description: str, axis: str) -> None:
    assert axis_of(description, "7") == axis


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "send_recv"), ("nccl:_all_gather_base", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"), ("c10d::alltoall_base_", "all_to_all"), ("gloo:recv", "recv"),
        ("allreduce_coalesced", "all_reduce"), ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("c10d::barrier", "barrier"), ("aten::mm", ""),
    ],
)  # fmt: skip
def test_collective_of_a_name(name: str, collective: str) -> None:
    assert collective_of(name) == collective


def test_bytes() -> None:
    assert [element_bytes(name) for name in ("c10::BFloat16", "long int", "Float8_e4m3fn", "Float", "what")] == [
        2,
        8,
        1,
        4,
        0,
    ]
    # Four ranks, 12 bytes: a ring sends each rank's part on three times.
    assert wire_bytes("all_gather", 4, 12) == 36
    assert wire_bytes("reduce_scatter", 4, 12) == wire_bytes("all_to_all", 4, 12) == 9
    assert wire_bytes("all_reduce", 4, 12) == 18
    assert wire_bytes("all_reduce", 3, 10) == Fraction(40, 3)
    assert wire_bytes("send", 2, 12) == wire_bytes("broadcast", 8, 12) == 12
    assert wire_bytes("all_reduce", 1, 12) == wire_bytes("send", 1, 12) == wire_bytes("barrier", 8, 12) == 0


def test_exposed_traffic_of_other_groups_is_communication_of_its_own(tmp_path: Path) -> None:
    """Neither world nor a group with a name of its own nor one without a name is painted as "other"."""
    host = Host()
    host.step(0, 0, 1000)
    host.launch("gemm", 0, 10, 100)
    host.launch("ncclDevKernel_AllReduce", 20, 110, 200, 9, **message("allreduce", 64, "0", 4))
    host.launch("ncclDevKernel_AllGather", 30, 310, 300, 9, **message("allgather", 64, "7", 2))
    host.launch("ncclDevKernel_SendRecv", 40, 610, 90, 9)
    groups = {"0": ("default_pg", range(4)), "7": ("embedding tables", (0, 1))}
    answers = explained(tmp_path, {0: (job_member(0, 4, groups), host.events)})
    found = {name: took for name, took in answers.categories[0].items() if took}
    assert sum(found.values()) == 1000
    assert {name: found.get(name) for name in ("world", "embedding tables", "unnamed group")} == {
        "world": 200, "embedding tables": 300, "unnamed group": 90,
    }  # fmt: skip
    categories = {span.category for span in answers.timeline.spans if span.stream != "compute"}
    assert "other" not in categories
