"""Sharded weights gathered in 8 bits: a rank quantises its shard before the gather, so that a parameter of a matrix that is
multiplied in 8 bits travels as one byte instead of two, and the gathered matrix takes half the memory.

Tensor-wise scaling needs the largest number of a whole matrix before any shard of it is quantised: those of all matrices of a
rank are found together and brought together by one all-reduce, four bytes a matrix, at the start of a step's passes. A row lies
on one rank, so row-wise scaling needs none; four bytes a row travel along with it. Either way the numbers are those
that a rank holding the whole matrix would have got.
`fully_shard` asks shards that have the two methods below what to send and what to make of it (torchao does the same with a
wrapping tensor; here the shard stays a plain tensor to everything else, the optimizer above all). Its protocol wants shards
padded alike, which scales by row are not where rows do not divide; and shards in the CPU's memory lose their class on the way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.model.layers import Linear
from shardwise.model.quantize import E4M3, cast, cast_rows, scale_of
from shardwise.model.quantized_matrix import QuantizedMatrix
from shardwise.parallel.collectives import Group
from shardwise.parallel.tensor import SomeHeads
from shardwise.run import Run
from shardwise.run.derive import gathers_eight_bits


class _Shard(torch.Tensor):
    """This rank's rows of a matrix that is gathered in 8 bits. Operations see a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What to send of this shard, and what to remember until the others' arrive."""
        rows = -(-outer_size[0] // mesh.size())
        eight, *sent = self.quantized()
        if eight.shape[0] < rows:
            eight = torch.cat((eight, eight.new_zeros(rows - eight.shape[0], *eight.shape[1:])))
        return (eight, *sent), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], remembered: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The matrix that has arrived; `out` is what it was made to be before, whose memory has been filled anew."""
        if out is not None:
            return None
        return QuantizedMatrix(gathered[0], self.whole_scale(gathered), dtype), gathered

    def quantized(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def whole_scale(self, gathered: tuple[Tensor, ...]) -> Tensor:
        raise NotImplementedError


class TensorWiseShard(_Shard):
    """With the scale of the whole matrix, found before."""

    largest: Tensor
    scale: Tensor

    def quantized(self) -> tuple[Tensor, ...]:
        plain: Tensor = self.as_subclass(Tensor)
        return (cast(plain, self.largest, E4M3, True, False)[0],)

    def whole_scale(self, gathered: tuple[Tensor, ...]) -> Tensor:
        return self.scale


class RowWiseShard(_Shard):
    """With the scales of its own rows."""

    def quantized(self) -> tuple[Tensor, ...]:
        return cast_rows(self.as_subclass(Tensor), E4M3)

    def whole_scale(self, gathered: tuple[Tensor, ...]) -> Tensor:
        return gathered[1]


class Scales:
    """The largest number of every matrix gathered in 8 bits with one scale, and the scales made of them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.shards: list[TensorWiseShard] = []

    def add(self, shard: TensorWiseShard) -> TensorWiseShard:
        """Take care of another matrix."""
        shard.largest, shard.scale = (torch.zeros((), device=shard.device) for _ in range(2))
        self.shards.append(shard)
        return shard

    @torch.no_grad()
    def update(self) -> None:
        """Find the scales of parameters as they are now; every rank of the group calls this."""
        if not self.shards:
            return
        # A shard may be empty, where there are fewer rows than ranks; zero is no larger than anything.
        largest = torch.zeros(len(self.shards), device=self.shards[0].device)
        here = [(place, shard) for place, shard in zip(largest.unbind(), self.shards, strict=True) if shard.numel()]
        if here:
            sizes = torch._foreach_norm([shard for _, shard in here], float("inf"))
            torch._foreach_copy_([place for place, _ in here], list(sizes))
        if self.group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        torch._foreach_copy_([shard.largest for shard in self.shards], list(largest.unbind()))
        torch._foreach_copy_([shard.scale for shard in self.shards], list(scale_of(largest, E4M3).unbind()))


def gather_in_eight_bits(block: nn.Module, run: Run, scales: Scales, ranks: int) -> None:
    """Make `fully_shard` gather the matrices of a block that multiply in 8 bits as such."""
    assert isinstance(block, FSDPModule)
    group = block._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group is not None else ():
        info = parameter._module_info
        linear = isinstance(info.module, Linear) and info.param_name == "weight"
        # Where a rank uses a part of a matrix only, it takes it of the wide one.
        if (
            not linear
            or isinstance(info.module, SomeHeads)
            or not gathers_eight_bits(run, *parameter._orig_size, ranks)
        ):
            continue
        local = parameter.sharded_param._local_tensor
        if run.train.fp8 == "tensorwise":
            parameter.sharded_param._local_tensor = scales.add(local.as_subclass(TensorWiseShard))
        else:
            parameter.sharded_param._local_tensor = local.as_subclass(RowWiseShard)
        parameter._init_extensions()  # looks again whether the shard has something to say
