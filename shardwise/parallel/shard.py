"""Data parallelism: replicas (`replicate`), sharding (`shard`), or both at once.

Replicas alone use PyTorch's DistributedDataParallel: 2(r-1)/r of the gradient bytes per step and rank, all-reduced in buckets while
the backward pass runs. Sharding is ZeRO (Rajbhandari et al. 2020) by `fully_shard`, over z = shard x context ranks. P is the size
of a rank's parameters in bytes in the dtype they are gathered in, G in the dtype gradients are reduced in, rows padded to a
multiple of z:
- zero = 1: the optimizer state is sharded. Once a step P(z-1)/z is all-gathered, and G(z-1)/z of full gradients is
  reduce-scattered.
- zero = 2: gradients too, reduce-scattered after every microbatch.
- zero = 3: parameters too, all-gathered for every microbatch's forward and for its backward. Only parameters outside of the blocks
  stay gathered between the two, and only where the backward follows the forward at once, that is without a pipeline. There the
  embedding is a unit of its own, unless it is the head too: it is freed behind the embedding, and not gathered again. Where
  gradients are exchanged as below, so is the head: its gradient is sent while the backward pass runs.
- zero = 3 with secondary_shard = s (ZeRO++'s hpZ, Wang et al. 2023, section 3.2): after a block is gathered for a forward pass,
  each rank keeps 1/s of it until the next pass, P/s more bytes. The next pass then gathers from the s ranks of its group: P(s-1)/s.
  In a pipeline the next pass may be another microbatch's; the number of passes that follow a forward pass stays the same. For
  experts, s/e ranks of the group hold the same ones; where that is one rank, or where experts are not sharded along the first
  dimension, they are gathered from all ranks.
Parameters are gathered block by block. With replicas as well, each rank's gradient shard is all-reduced over them once a step:
2(r-1)/r of G/z. Routed experts are treated likewise, with z / e ranks (`expert_shard`) instead of z. They are sharded along the
first dimension that divides evenly, since a rank may hold fewer experts than there are ranks; where one does, nothing is padded.
Along any dimension but the first they are copied once more when gathered, and their gradients once more before the sum.
The matrices of fp8 GEMMs are gathered in fp8 (`fp8_all_gather.py`).
Both directions may use fewer bits (`compress/sharded.py`). Replicas that compress their exchange are left to `compress/`: this file
then ignores them.
Gradients are summed, not averaged: the loss is already divided by the tokens of the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.model.moe.layer import MoE
from shardwise.model.transformer import Block, Transformer
from shardwise.parallel.collectives import Group
from shardwise.parallel.compress.sharded import QuantizedAllGather, QuantizedReduceScatter
from shardwise.parallel.fp8_all_gather import Scales, enable_fp8_all_gather
from shardwise.parallel.in_place import Exchange, InPlace
from shardwise.parallel.mesh import Mesh
from shardwise.run import Problem, Run, UserError
from shardwise.run.derive import (
    exchanges_gradients,
    gathers_embedding_apart,
    gathers_head_apart,
    gathers_in_place,
    reduces_in_place,
    shard_dim,
)
from shardwise.torch_private.fully_shard import (
    communicate_in_place,
    forget_forward_passes,
    keep_secondary_shards,
    not_read_in_backward,
    reduce_sharded_gradients,
    sharded_parameters,
)


class Sharder:
    """Applies `fully_shard` to blocks and the modules around them before they have memory, so that a rank only holds its shards."""

    def __init__(self, run: Run, mesh: Mesh, frozen: bool = False, gpu: bool = False) -> None:
        """A `frozen` model runs forward passes only: nothing stays gathered for a backward pass, whatever the ZeRO stage."""
        self.run, self.gpu = run, gpu
        self.in_place, self.exchanges = gathers_in_place(run, gpu=gpu), exchanges_gradients(run, gpu=gpu)
        self.mesh = mesh
        self.frozen = frozen
        dtype = getattr(torch, run.train.dtype)
        low_precision = dtype in (torch.bfloat16, torch.float16)
        reduce = torch.float64 if dtype == torch.float64 else getattr(torch, run.train.reduce_dtype)
        self.policy = MixedPrecisionPolicy(
            param_dtype=dtype if low_precision else None,
            reduce_dtype=reduce if low_precision else None,
            cast_forward_inputs=False,
        )
        # A dry run has the policy but no GPU; memory is pinned only for a GPU.
        pins = run.train.device != "cpu"
        self.offload = CPUOffloadPolicy(pin_memory=pins) if run.layout.offload else OffloadPolicy()
        self.scales = Scales(mesh.group("zero"))

    def block(self, block: Block) -> None:
        """Shard one block's parameters, its experts over their own ranks."""
        experts = set()
        if isinstance(block.ffn, MoE):
            experts = set(block.ffn.experts.parameters())
            if self.mesh.layout.is_sharded(self.mesh.size("expert_shard")):
                self._shard(block.ffn.experts, "expert_shard")
                if all(self._along(p).dim == 0 for p in experts):
                    self._keep_secondary(block.ffn.experts, "expert_shard", self.run.layout.expert_secondary_shard)
        if self.mesh.layout.is_sharded(self.mesh.size("zero")):
            self._shard(block, "zero", experts)
            self._keep_secondary(block, "zero", self.run.layout.secondary_shard)

    def _keep_secondary(self, module: nn.Module, axis: str, ranks: int) -> None:
        if ranks > 1 and not self.frozen:
            keep_secondary_shards(module, self.mesh.secondary(axis))

    def root(self, model: Transformer) -> None:
        """Shard the parameters outside of the blocks, and set up prefetching."""
        if not self.mesh.layout.is_sharded(self.mesh.size("zero")):
            return
        experts = {p for m in model.modules() if isinstance(m, MoE) for p in m.experts.parameters()}
        apart = model.embed if gathers_embedding_apart(self.run, frozen=self.frozen) else None
        if apart is not None:
            self._shard(apart, "zero")
            not_read_in_backward(apart)
        # The backward pass begins with the head: without a pipeline, freed parameters would be gathered again at once.
        keep = self.run.layout.pipeline == 1 and not self.frozen
        if model.head is not None and gathers_head_apart(self.run, gpu=self.gpu, frozen=self.frozen):
            self._shard(model.head, "zero", keep=keep)
        self._shard(model, "zero", experts, keep=keep)
        blocks: list[FSDPModule] = [block for block in model.layers.values() if isinstance(block, FSDPModule)]
        last: list[FSDPModule] = [model.head] if isinstance(model.head, FSDPModule) else []
        ahead = self.run.layout.prefetch
        if self.in_place and isinstance(apart, FSDPModule):
            apart.set_modules_to_forward_prefetch(blocks[:1])
        for n, block in enumerate(blocks):
            if ahead > 1 or self.in_place:
                block.set_modules_to_forward_prefetch([*blocks, *last][n + 1 : n + 1 + ahead])
            if ahead > 1:
                block.set_modules_to_backward_prefetch(blocks[max(0, n - ahead) : n][::-1])
        if self.run.layout.asynchronous:
            # By default a pass prefetches for the pass that follows, which may use another version of the weights.
            for module, before in zip((*blocks, model), ([], *([block] for block in blocks)), strict=True):
                assert isinstance(module, FSDPModule)
                module.set_modules_to_backward_prefetch(before or [module])

    def fp8(self, model: Transformer) -> None:
        """Gather the matrices of fp8 GEMMs in fp8; the shards must be allocated by now."""
        if self.mesh.layout.is_sharded(self.mesh.size("zero")):
            for block in model.layers.values():
                enable_fp8_all_gather(block, self.run, self.scales, self.mesh.size("zero"))

    def _shard(
        self, module: nn.Module, axis: str, ignored: set[nn.Parameter] | None = None, keep: bool = False
    ) -> None:
        _check_integers(module)
        fully_shard(
            module,
            mesh=self.mesh.sharding(axis),
            reshard_after_forward=(self.run.layout.gathers_each_pass or self.frozen) and not keep,
            mp_policy=self.policy,
            offload_policy=self.offload,
            ignored_params=ignored or None,
            shard_placement_fn=self._along if axis == "expert_shard" else None,
        )
        assert isinstance(module, FSDPModule)
        # Plain sums: by default a factor is passed to the backend, and gloo accepts none, not even 1.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        layout = self.run.layout
        if layout.compress_weights != "none" and not self.frozen:
            gather = QuantizedAllGather(layout.compress_weights, partial(_numels, module), self.mesh.size(axis))
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
        if layout.compress_shards != "none" and not self.frozen:
            scatter = QuantizedReduceScatter(layout.compress_shards, partial(_numels, module, learned=True))
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        group, rows = self.mesh.group(axis), axis == "zero" or all(self._along(p).dim == 0 for p in module.parameters())
        if self.in_place and group is not None and rows:
            made = Exchange if self.exchanges else InPlace
            direct = made(group, self.policy.reduce_dtype or next(module.parameters()).dtype)
            communicate_in_place(module, direct, reduces=reduces_in_place(self.run, gpu=self.gpu))

    def _along(self, experts: nn.Parameter) -> Shard:
        """The dimension along which the matrices of experts are sharded."""
        return Shard(shard_dim(experts.shape, self.mesh.size("expert_shard")))


def _numels(module: nn.Module, learned: bool = False) -> list[int]:
    """The sizes of the shards that are gathered together for a module, or of those whose gradients are reduced together."""
    every = [
        each for each in sharded_parameters(module) if not learned or getattr(each.module, each.name).requires_grad
    ]
    return [each.memory().numel() for each in every]


def _check_integers(module: nn.Module) -> None:
    """Raise an error where PyTorch is older than its fix of pytorch#177844."""
    if torch.__version__ < "2.13" and not all(each.is_floating_point() for each in module.parameters()):
        problem = f"4-bit weights of several ranks need PyTorch 2.13: {torch.__version__} shards no integers"
        raise UserError(Problem(problem, "adapter.kind"))


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules whose parameters `fully_shard` handles."""
    return (m for m in model.modules() if isinstance(m, FSDPModule))


def end_forward_passes(model: Transformer, mesh: Mesh) -> None:
    """Free what forward passes keep for their backward passes, where these never come."""
    forget_forward_passes(model)
    if mesh.layout.secondary_shard > 1:
        for module in sharded_modules(model.layers):
            module.reshard()


def wrap_ddp(model: nn.Module, mesh: Mesh, reduce_dtype: torch.dtype | None) -> DistributedDataParallel:
    """DistributedDataParallel; gradients are added in their own dtype unless another is given."""
    with warnings.catch_warnings():
        # PyTorch 2.13 has a new name for `broadcast_buffers`, which older versions do not know.
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model, process_group=mesh.group("replicate"), broadcast_buffers=False, gradient_as_bucket_view=True
        )
    if reduce_dtype not in (None, next(p for p in model.parameters() if p.requires_grad).dtype):
        # PyTorch requires a hook's annotations to be classes, or absent.
        wrapped.register_comm_hook(None, lambda _, bucket: _add_in(reduce_dtype, mesh.group("replicate"), bucket))
    return wrapped


def _add_in(dtype: torch.dtype, group: Group, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over a group, all-reduced in `dtype`."""
    added = bucket.buffer().to(dtype).div_(dist.get_world_size(group))
    work = dist.all_reduce(added, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def prepare_backward(modules: Sequence[FSDPModule], reduces: bool, last: bool, reshards: bool) -> None:
    """Set up the modules for a microbatch's backward pass. `reduces`: it reduces gradients; otherwise they stay unsharded until a
    later pass or `reduce_deferred_gradients`. `last`: it is the last of the step, and replicas sum their gradients after it.
    `reshards`: it frees parameters; the last pass always does."""
    for module in modules:
        module.set_requires_gradient_sync(reduces, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(reshards or last, recurse=False)
    for module in modules[:1]:
        module.set_is_last_backward(last)  # of all


def reduce_deferred_gradients(model: nn.Module) -> None:
    """Reduce-scatter the gradients that split backward passes have accumulated.

    A deferred weight gradient is finished outside of the passes that `fully_shard` hooks into, so its reduction is started by hand.
    """
    if not isinstance(model, FSDPModule):
        return
    for module in sharded_modules(model):
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True, recurse=False)
        module.set_requires_gradient_sync(True, recurse=False)
    reduce_sharded_gradients(model)
