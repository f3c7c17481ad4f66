"""fp8 all-gather of sharded weights: a rank quantises its shard before the all-gather, so a parameter of an fp8 GEMM travels as one
byte instead of two, and the gathered matrix takes half the memory.

Tensor-wise scaling needs the amax of a full matrix before any of its shards is quantised: the amaxes of all matrices are computed
together and all-reduced once at the start of a step's passes, four bytes per matrix. A row lies on one rank, so row-wise scaling
needs no all-reduce; four bytes per row are gathered with it. Either way the result is that of a rank holding the full matrix.
`fully_shard` asks shards that have two extension methods what to send, and how to rebuild the parameter. torchao implements them in
a wrapper tensor; here the methods are set on the shard, which stays a plain tensor to everything else, above all to the optimizer.
Two cases are gathered in 16 bits: row-wise scales where rows do not divide evenly, since the protocol wants all shards padded to
the same size; and shards in CPU memory, which lose the methods on the way to the GPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.model.layers import Linear
from shardwise.model.quantized.formats import E4M3
from shardwise.model.quantized.fp8 import Fp8Matrix
from shardwise.model.quantized.scaled import cast, cast_rows, scale_of
from shardwise.parallel.collectives import Group
from shardwise.parallel.tensor import ReplicatedKVLinear
from shardwise.run import Run
from shardwise.run.derive import uses_fp8_all_gather
from shardwise.torch_private import foreach_copy_, foreach_norm
from shardwise.torch_private.fully_shard import sharded_parameters


class Shard:
    """This rank's rows of a matrix that is gathered in fp8: decides what to send, and rebuilds the gathered matrix."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = weakref.ref(rows)  # the rows hold this object, so it holds them weakly
        rows.fsdp_pre_all_gather = self.send  # type: ignore[attr-defined]
        rows.fsdp_post_all_gather = self.receive  # type: ignore[attr-defined]

    @property
    def rows(self) -> Tensor:
        """The parameters themselves, float32."""
        rows = self._rows()
        assert rows is not None
        return rows

    def send(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """The tensors to send of this shard, and the metadata to keep until the all-gather is done, which is None."""
        rows = -(-outer_size[0] // mesh.size())
        fp8_rows, *scales = self.quantized()
        if fp8_rows.shape[0] < rows:
            fp8_rows = torch.cat((fp8_rows, fp8_rows.new_zeros(rows - fp8_rows.shape[0], *fp8_rows.shape[1:])))
        return (fp8_rows, *scales), None

    def receive(
        self, gathered: tuple[Tensor, ...], remembered: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The gathered matrix; `out` is the one built before, whose memory has been refilled."""
        if out is not None:
            return None
        return Fp8Matrix(gathered[0], self.scale_of(gathered), dtype), gathered

    def quantized(self) -> tuple[Tensor, ...]:
        """The rows in fp8, and the scales that must be sent with them, if any."""
        raise NotImplementedError

    def scale_of(self, gathered: tuple[Tensor, ...]) -> Tensor:
        """The scale of the full matrix, which stays the same tensor."""
        raise NotImplementedError


class TensorWiseShard(Shard):
    """Quantised with the scale of the full matrix, computed beforehand."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        self.amax, self.scale = (torch.zeros((), device=rows.device) for _ in range(2))

    def quantized(self) -> tuple[Tensor, ...]:
        return (cast(self.rows, self.amax, E4M3, True, False)[0],)

    def scale_of(self, gathered: tuple[Tensor, ...]) -> Tensor:
        return self.scale


class RowWiseShard(Shard):
    """Quantised with the scales of its own rows."""

    def quantized(self) -> tuple[Tensor, ...]:
        return cast_rows(self.rows, E4M3)

    def scale_of(self, gathered: tuple[Tensor, ...]) -> Tensor:
        return gathered[1]


class Scales:
    """The amax of every matrix gathered in fp8 with one scale, and the scales computed from them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.shards: list[TensorWiseShard] = []

    @torch.no_grad()
    def update(self) -> None:
        """Compute the scales of the current parameters; every rank of the group calls this."""
        if not self.shards:
            return
        # A shard may be empty, where there are fewer rows than ranks; its amax of zero never exceeds another.
        amax = torch.zeros(len(self.shards), device=self.shards[0].amax.device)
        here = [
            (place, shard.rows) for place, shard in zip(amax.unbind(), self.shards, strict=True) if shard.rows.numel()
        ]
        if here:
            sizes = foreach_norm([rows for _, rows in here], float("inf"))
            foreach_copy_([place for place, _ in here], list(sizes))
        if self.group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        foreach_copy_([shard.amax for shard in self.shards], list(amax.unbind()))
        foreach_copy_([shard.scale for shard in self.shards], list(scale_of(amax, E4M3).unbind()))


def enable_fp8_all_gather(block: nn.Module, run: Run, scales: Scales, ranks: int) -> None:
    """Make `fully_shard` gather the matrices of a block's fp8 GEMMs in fp8."""
    assert isinstance(block, FSDPModule)
    for parameter in sharded_parameters(block):
        linear = isinstance(parameter.module, Linear) and parameter.name == "weight"
        # A rank that uses only some rows of a matrix takes them from the high-precision one.
        if not linear or isinstance(parameter.module, ReplicatedKVLinear):
            continue
        rows, columns = parameter.shape
        if not uses_fp8_all_gather(run, rows, columns, ranks):
            continue
        if run.train.fp8 == "tensorwise":
            scales.shards.append(TensorWiseShard(parameter.shard))
        else:
            RowWiseShard(parameter.shard)
        parameter.extend()
