"""Applies a run's layout to its model: one line per axis, and allocation last, so that a rank never holds more than its shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.model.adapters import LowRank, LowRankExperts, put_on_adapters, row_lengths, token_keys
from shardwise.model.attention import MaskBuilder
from shardwise.model.compute_copy import ComputeCopy, keep_compute_copies
from shardwise.model.gemm.tuned import tuned_scaled_mm, use_tuned_gemms
from shardwise.model.initialize import draw
from shardwise.model.invariant.network import check_invariant, make_invariant
from shardwise.model.layers import Gemm, Linear
from shardwise.model.loss import ChunkedCrossEntropy, ScoreHead
from shardwise.model.moe.layer import Experts
from shardwise.model.quantized.fp8 import check_fp8, scaled_mm, use_fp8
from shardwise.model.quantized.nf4 import Quantizer, quantize_experts_to_nf4, quantize_to_nf4
from shardwise.model.transformer import Block, Transformer, make_stage
from shardwise.model.varlen import has_flash
from shardwise.parallel.activations.recompute import apply_recompute, recomputed_blocks, recomputed_in_graph
from shardwise.parallel.activations.swap import Swap
from shardwise.parallel.asynchronous import AsynchronousPipeline
from shardwise.parallel.context import apply_context
from shardwise.parallel.expert import apply_expert
from shardwise.parallel.local_parameter import LocalParameter, allocate_buffers, leaves, local_slice
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.observer import Observers
from shardwise.parallel.pipeline import Pipeline, Stage, split_backward
from shardwise.parallel.rendezvous import open_pairs
from shardwise.parallel.shard import Sharder, sharded_modules, wrap_ddp
from shardwise.parallel.tensor import apply_tensor
from shardwise.plan.cost.stages import layers_of_stages
from shardwise.plan.trainer.ends import handed_bytes
from shardwise.run import Run
from shardwise.run.derive import (
    chunk_bytes,
    chunks_loss,
    compiles,
    keeps_compute_copies,
    recomputes_in_graph,
    tunes_gemms,
    uses_varlen_attention,
)
from shardwise.run.parameters import Cut, Parameter, find_parameter, matrix_of
from shardwise.run.parametrization import initial_factor
from shardwise.run.ranks.boxes import box_of
from shardwise.run.sections.adapter import NF4_BLOCK
from shardwise.schedules import Schedule, make_schedule
from shardwise.torch_private import (
    cache_custom_autograd_functions,
    compile_layers_whole,
    recompute_without_random_numbers,
)
from shardwise.torch_private.fully_shard import sharded_parameters


@dataclass
class Parallel:
    """This rank's share of a model: its stages, the executor that runs them, and the parameters it holds."""

    mesh: Mesh
    models: list[Transformer]
    pipeline: Pipeline
    parameters: list[LocalParameter]

    @property
    def own_models(self) -> list[Transformer]:
        """Its stages, except copies of a stage on another rank of the pipeline."""
        held = self.pipeline.stages.items()
        return [stage.model for number, stage in held if number < self.pipeline.schedule.depth]


def apply(run: Run, mesh: Mesh, device: torch.device, frozen: bool = False) -> Parallel:
    """Build this rank's share of the run's model, with initial weights that depend only on the seed and the parameter's name. A
    `frozen` model runs forward passes only, and holds its parameters in the compute dtype."""
    check_fp8(run.train.fp8, device)
    if run.train.invariant:
        check_invariant("train.invariant", run.model, getattr(torch, run.train.dtype), device)
    layout = run.layout
    schedule = make_schedule(layout.schedule, layout.pipeline, run.accumulation, layout.stages_per_rank)
    ranges = layers_of_stages(run)
    sharder = Sharder(run, mesh, frozen, gpu=device.type == "cuda" and not mesh.through_host)
    observers = Observers()
    swap = Swap(run.memory.folder if run.memory.activations == "disk" else "") if run.memory.swaps else None
    stages: dict[int, Stage] = {}
    parameters: list[LocalParameter] = []
    for number in schedule.stages_of(mesh.index("pipeline")):
        dtype = getattr(torch, run.train.dtype)
        model = make_stage(run.model, dtype, ranges[number], schedule.is_first(number), schedule.is_last(number))
        put_on_adapters(model, run.adapter)
        gpu = device.type == "cuda"
        gemm = use_tuned_gemms(model.layers) if tunes_gemms(run, gpu=gpu) else Gemm()
        if run.model.scores:
            model.loss = ScoreHead(gemm)
        elif chunks_loss(run, gpu=gpu):
            model.loss = ChunkedCrossEntropy(chunk_bytes(run), gemm)
        model.mask_builder = MaskBuilder(run.model.sliding_window, uses_varlen_attention(run, gpu=has_flash(device)))
        apply_tensor(model, mesh)
        apply_context(model, mesh, layout.context_method)
        apply_expert(model, mesh, layout.expert_tensor, run.train.seq_len)
        _keep_in_4_bits(model, run, mesh)
        if run.train.invariant:
            make_invariant(model)
        if run.train.fp8 != "none":
            fp8_gemm = tuned_scaled_mm if tunes_gemms(run, gpu=gpu) else scaled_mm
            use_fp8(model.layers, run.train.fp8, gemm, fp8_gemm)
        if compiles(run, gpu=gpu):
            inside = recomputes_in_graph(run, gpu=gpu) and not frozen
            again = recomputed_blocks(model, run, mesh.rank) if inside else []
            for part in (*model.layers.values(), *([model.norm] if model.norm is not None else ())):
                forward = recomputed_in_graph(part.forward) if part in again else part.forward
                part.forward = compiled(forward, accumulates=tunes_gemms(run, gpu=gpu), gathers=layout.tensor > 1)
        if not frozen:
            apply_recompute(model, run, mesh.rank, observers, swap, gpu=gpu)
        _cut(model, run, mesh, frozen)
        for block in model.layers.values():
            assert isinstance(block, Block)
            sharder.block(block)
        sharder.root(model)
        _materialize(model, run, mesh, device)
        _place_adapters(model, run, mesh)
        sharder.fp8(model)
        replicated = layout.uses_ddp and not frozen
        module: nn.Module = wrap_ddp(model, mesh, sharder.policy.reduce_dtype) if replicated else model
        compute_copy: dict[nn.Parameter, ComputeCopy] = {}
        if keeps_compute_copies(run, gpu=device.type == "cuda") and not frozen:
            compute_copy = keep_compute_copies(
                model.layers, getattr(torch, run.train.dtype), to_host=run.memory.hosts_optimizer
            )
        splits = not frozen and any(a.kind == "I" for a in schedule.ranks[0])
        split = split_backward(model) if splits else None
        copies = tuple(copy.tensor for copy in compute_copy.values())
        stages[number] = Stage(module, model, split, token_keys(model), copies)
        copied = run.model.tied_embeddings and not model.first and schedule.stages > 1
        second = number >= schedule.depth  # copies another rank's stage, which serves the first direction
        for name, parameter in model.named_parameters():
            entry, copy = find_parameter(run.model, name, run.adapter), second or (copied and name == "embed.weight")
            shard = _shard(entry, parameter)
            parameters.append(
                LocalParameter(name, parameter, entry, entry.cuts(layout), shard, copy, compute_copy.get(parameter))
            )
    planned = partial(handed_bytes, run, mesh.rank)
    make = AsynchronousPipeline if layout.asynchronous and not frozen else Pipeline
    pipeline = make(stages, schedule, mesh, layout.zero, sharder.scales, observers, planned)
    pipeline.replaces_saved = layout.recompute == "optimal" or run.memory.replaces_saved
    pipeline.swap, pipeline.routed = swap, run.model.experts > 0
    if not frozen:
        _add_pipeline_groups(run, mesh, schedule)
        open_pairs(mesh, schedule, device)
    return Parallel(mesh, [stage.model for stage in stages.values()], pipeline, parameters)


def compiled(forward: Callable[..., Any], *, accumulates: bool, gathers: bool) -> Callable[..., Any]:
    """A compiled layer or norm. With `accumulates`, this project's GEMMs accumulate onto the tensor that their result is added to.
    Where the layer gathers a sequence over tensor ranks, no other buffer may use that memory while the storage lives: a backward
    pass recognises saved tensors by their storage (`activations/saving.py`), and would take another tensor there for the gathered
    one."""
    cache_custom_autograd_functions()
    compile_layers_whole()
    recompute_without_random_numbers()
    from shardwise.model.without_gradient import WITHOUT_GRADIENT  # imports the compiler

    options: dict[str, Any] = {"post_grad_custom_post_pass": WITHOUT_GRADIENT}
    if accumulates:
        from shardwise.model.gemm.accumulate import ACCUMULATE

        options["joint_custom_post_pass"] = ACCUMULATE
    if gathers:
        options |= {"allow_buffer_reuse": False, "inplace_buffers": False}
    return torch.compile(forward, options=options)


def _cut(model: nn.Module, run: Run, mesh: Mesh, frozen: bool) -> None:
    """Reduce each parameter to this rank's slice along the tensor and expert axes, still on the meta device."""
    high = torch.float64 if run.train.dtype == "float64" else torch.float32
    for name, owner, leaf, parameter in leaves(model):
        if not isinstance(parameter, nn.Parameter):
            continue
        entry = find_parameter(run.model, name, run.adapter)
        size = box_of(entry.shape, entry.cuts(run.layout), mesh).size
        dtype = getattr(torch, entry.dtype or run.train.dtype) if frozen or entry.frozen else high
        values = torch.empty(size, dtype=dtype, device="meta")
        owner.register_parameter(leaf, nn.Parameter(values, requires_grad=not (frozen or entry.frozen)))


@torch.no_grad()
def _materialize(model: nn.Module, run: Run, mesh: Mesh, device: torch.device) -> None:
    """Allocate this rank's slices of the parameters and set their initial values; set buffers to zero."""
    sharded = {(each.module, each.name): each for m in sharded_modules(model) for each in sharded_parameters(m)}
    drawn = Quantizer(lambda name: _whole(run, name, device), run.adapter.double_quantization)
    for name, owner, leaf, parameter in leaves(model):
        if not isinstance(parameter, nn.Parameter):
            continue
        entry = find_parameter(run.model, name, run.adapter)
        shard = _shard(entry, parameter)
        cuts = entry.cuts(run.layout)
        if shard is not None:
            values, cuts = sharded[owner, leaf].allocate(device), (*cuts, shard)
        else:
            values = torch.empty_like(parameter, device=device)
            owner.register_parameter(leaf, nn.Parameter(values, requires_grad=parameter.requires_grad))
        if entry.dtype or entry.init == "magnitude":
            whole = drawn.part(name) if entry.dtype else row_lengths(_whole(run, matrix_of(name), device))
            values.copy_(local_slice(whole, cuts, mesh))
            continue
        # Random blocks are drawn on the device, even for values that are offloaded from it.
        factor = initial_factor(entry, run.model, run.train)
        draw(
            values, run.model, run.train.seed, name, box_of(entry.shape, cuts, mesh).offset, device, run.adapter, factor
        )
    allocate_buffers(model, device)


def _whole(run: Run, name: str, device: torch.device) -> Tensor:
    """The initial value of a full matrix, in the compute dtype."""
    values = torch.empty(find_parameter(run.model, name).shape, dtype=getattr(torch, run.train.dtype), device=device)
    if device.type != "meta":
        draw(values, run.model, run.train.seed, name)
    return values


def _place_adapters(model: nn.Module, run: Run, mesh: Mesh) -> None:
    """Tell adapters which columns of their matrices this rank holds."""
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            entry = find_parameter(run.model, f"{name}.A.weight", run.adapter)
            module.first = box_of(entry.shape, entry.cuts(run.layout), mesh).offset[1]
        elif isinstance(module, LowRankExperts):
            for part in module.parts:
                entry = find_parameter(run.model, f"{name}.{part}_A", run.adapter)
                module.first_expert, _, module.first[part] = box_of(entry.shape, entry.cuts(run.layout), mesh).offset


def _keep_in_4_bits(model: nn.Module, run: Run, mesh: Mesh) -> None:
    """Store the matrices that QLoRA quantizes in 4 bits, each as a slice of the full matrix's blocks."""
    double = run.adapter.double_quantization

    def place(name: str) -> tuple[int, int]:
        entry = find_parameter(run.model, name, run.adapter)
        *_, row, column = box_of(entry.shape, entry.cuts(run.layout), mesh).offset
        stride = 2 * entry.shape[-1] // NF4_BLOCK
        return row * stride + 2 * column // NF4_BLOCK, stride

    for name, module in list(model.named_modules()) if run.adapter.kind == "qlora" else ():
        if isinstance(module, Experts):
            quantize_experts_to_nf4(module, {part: place(f"{name}.{part}") for part in ("gate", "up", "down")}, double)
        elif isinstance(module, Linear) and name.startswith("layers.") and ".lora." not in name:
            quantize_to_nf4(module, place(f"{name}.weight"), double)


def _shard(entry: Parameter, parameter: Tensor) -> Cut | None:
    """How `fully_shard` has sharded a parameter; the last dimension of its mesh is the sharding one."""
    if not isinstance(parameter, DTensor):
        return None
    placement = parameter.placements[-1]
    assert isinstance(placement, Shard)
    return Cut("expert_shard" if entry.routed else "zero", placement.dim)


def _add_pipeline_groups(run: Run, mesh: Mesh, schedule: Schedule) -> None:
    """Add a group of the ranks of this pipeline's first and last stage, when each holds a copy of a tied embedding; and a group of
    the two ranks that hold the same stages, one for each direction."""
    placement, ranks, here = schedule.placement, mesh.pipeline_ranks(), mesh.index("pipeline")
    if run.model.tied_embeddings and placement[0] != placement[-1]:
        mesh.add_group("tied", [ranks[placement[0]], ranks[placement[-1]]])
    if schedule.directions > 1:
        mesh.add_group("mirror", sorted((ranks[here], ranks[-1 - here])))
