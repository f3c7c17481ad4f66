"""Counts the bytes that a rank sends: every collective and point-to-point call, by axis and operation.

All of them, including those of DistributedDataParallel's reducer (C++) and of `fully_shard`, pass PyTorch's dispatcher as a `c10d`
operator that names its process group, so a dispatch mode sees them all. An operator or a group that this file does not know is an
error, not a gap. Bytes follow the ledger's convention (`wire_bytes`); for an all-to-all they are the bytes sent to other ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ledger import wire_bytes
from shardwise.torch_private import BareDispatchMode

Traffic = Counter[tuple[str, str]]  # bytes by axis and operation; they may be fractions
DEVICE = torch.ops.prim.device.default
"""The operator that PyTorch calls on fake tensors twice as often as any other. The tensor knows its device, so modes below this one
need not see the call."""


@functools.cache
def namespace_of(operator: Any) -> str:
    """The namespace of an operator; cached, since PyTorch reads it from the schema each time."""
    return operator.namespace


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _total(tensors: list[Tensor]) -> int:
    return sum(map(_size, tensors))


class TrafficCounter(BareDispatchMode):
    """While it is open, adds up this rank's bytes and messages by (axis, operation). `axes` maps process groups to axes."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.axes = axes
        self.traffic: Traffic = Counter()
        self.messages: Traffic = Counter()

    def reset(self) -> None:
        """Start again from zero."""
        self.traffic.clear()
        self.messages.clear()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is DEVICE:
            return args[0].device
        if "c10d" in namespace_of(operator):
            self.count(str(operator), args)
        return operator(*args, **(kwargs or {}))

    def count(self, operator: str, args: tuple[Any, ...]) -> tuple[str, str, Fraction | int] | None:
        """Add a call; returns its axis, operation and bytes, or None if this rank sends nothing in it."""
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        ranks = group.size()
        size: Fraction | int
        match operator.split(".")[1], args:
            case "allreduce_", (tensors, *_):
                operation, size = "all_reduce", wire_bytes("all_reduce", ranks, _total(tensors))
            case "_allgather_base_", (_, mine, *_):
                operation, size = "all_gather", wire_bytes("all_gather", ranks, _size(mine))
            case "allgather_" | "allgather_into_tensor_coalesced_", (_, mine, *_):
                operation, size = "all_gather", wire_bytes("all_gather", ranks, _total(mine))
            case "_reduce_scatter_base_", (_, whole, *_):
                operation, size = "reduce_scatter", wire_bytes("reduce_scatter", ranks, _size(whole))
            case "reduce_scatter_tensor_coalesced_", (_, wholes, *_):
                operation, size = "reduce_scatter", wire_bytes("reduce_scatter", ranks, _total(wholes))
            case "alltoall_base_", (_, rows, _, _, sent, *_):
                kept = sent[group.rank()] if sent else len(rows) // ranks
                operation, size = "all_to_all", _size(rows[kept:])
            case "send", (tensors, *_):
                operation, size = "send", _total(tensors)
            case "broadcast_", (tensors, _, root, *_):  # DDP agrees on its buckets this way, once, in its second step
                if root != group.rank():
                    return None
                operation, size = "broadcast", wire_bytes("broadcast", ranks, _total(tensors))
            case "recv_", _:
                return None
            case _:
                raise NotImplementedError(f"bytes of {operator}")
        if ranks == 1:
            return None
        axis = self.axes[group.group_name]
        self.traffic[axis, operation] += size  # type: ignore[assignment]
        self.messages[axis, operation] += 1
        return axis, operation, size
