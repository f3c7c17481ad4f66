"""Whose traffic a group's is, and what a collective is called."""

from __future__ import annotations

from fractions import Fraction

import pytest

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
