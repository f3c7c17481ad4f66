"""Counts the FLOPs of a rank as it executes them, by part of the network and pass, in the planner's convention.

A dispatch mode counts GEMMs. A GEMM of the forward pass identifies its weight. In the backward pass a GEMM with that weight
computes an input gradient, and the other GEMM of the same autograd node the weight gradient. A forward pass inside of a backward
pass is recomputation. Attention is counted where the network calls it, by the query-key pairs that its mask allows, whatever
kernel computes it; the backward pass counts twice the forward pass.

All other operators are counted by the bytes they read and write: lookups, norms, activations, casts and sums, and the
optimizer's. In the backward pass autograd's nodes have the sequence numbers of the forward pass, so their part is known;
operators between the parts (the residual stream) belong to the network.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.ledger import Work
from shardwise.measure.counts.traffic import DEVICE, namespace_of
from shardwise.model.attention import DotProductAttention, GroupedAttention, LatentAttention
from shardwise.model.layers import FeedForward, Linear, Norm
from shardwise.model.logprobs import Logits
from shardwise.model.moe.layer import Experts, Router
from shardwise.model.quantized.scaled import scaled_mm_reference
from shardwise.model.transformer import Transformer
from shardwise.model.varlen import Mask, VarlenMask
from shardwise.parallel.blockwise import BlockMask, Causal
from shardwise.parallel.context import BlockwiseAttention
from shardwise.parallel.observer import Observer
from shardwise.plan.trainer.work import CONVENTION
from shardwise.run.derive import compiles
from shardwise.run.parameters import find_parameter
from shardwise.torch_private import (
    BareDispatchMode,
    autograd_node,
    autograd_sequence,
    in_backward,
    storage_key,
    tree_leaves,
)
from shardwise.train.step import TrainState

PARTS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((GroupedAttention, LatentAttention), "attention"),
    (FeedForward, "ffn"),
    (Router, "router"),
    (Experts, "experts"),
)

aten = torch.ops.aten
ALLOCATIONS = (aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default)
"""Operators that move no bytes."""
COUNTED = ("aten", "shardwise")
"""Namespaces of the operators whose bytes are counted."""
GEMMS: dict[Any, tuple[int, int]] = {  # operator to the argument positions of its two operands
    aten.mm.default: (0, 1),
    aten.mm.out: (0, 1),
    aten.addmm.default: (1, 2),
    aten.addmm_.default: (1, 2),
    aten.addmm.dtype_out: (1, 2),
    aten._grouped_mm.default: (0, 1),
    aten._scaled_mm.default: (0, 1),
    torch.ops.shardwise.router_gemm.default: (0, 1),
    torch.ops.shardwise.router_grad_input.default: (0, 1),
    torch.ops.shardwise.router_grad_weight.default: (0, 1),
    scaled_mm_reference: (0, 1),
    torch.ops.shardwise.gemm.default: (0, 1),
    torch.ops.shardwise.gemm_into.default: (0, 1),
    torch.ops.shardwise.gemm_onto.default: (0, 1),
    torch.ops.shardwise.fp8_gemm.default: (0, 1),
    torch.ops.shardwise.fp8_gemm_onto.default: (0, 1),
}
BATCHED_GEMMS: dict[Any, tuple[int, int]] = {aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2)}
"""Batched GEMMs. Muon uses them for experts, and DoRA for the norms of their rows; elsewhere in the network they belong to
attention, which is counted by pairs."""
UNKNOWN = "unknown"


def uncompiled(train_state: TrainState) -> contextlib.AbstractContextManager[Any]:
    """While it is open, layers run uncompiled: operators inside a compiled layer cannot be counted."""
    if not compiles(train_state.run, gpu=train_state.device.type == "cuda"):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


class WorkCounter(BareDispatchMode, Observer):
    """While it is open, adds up the FLOPs of a train state's steps."""

    def __init__(self, train_state: TrainState) -> None:
        super().__init__()
        self.flops: dict[str, dict[str, float]] = {}
        self.bytes: dict[str, dict[str, float]] = {}
        self.updating = False
        self.update = "parameters"  # the part that the optimizer's work is attributed to
        self.made: list[tuple[int, str]] = []  # nodes from this autograd sequence number on belong to this part
        self.train_state = train_state
        self.inside: list[str] = []
        self.weights: dict[int, tuple[StorageWeakRef, str]] = {}
        self.parameters: dict[int, tuple[StorageWeakRef, str]] = {}
        self.node: tuple[Any, str] | None = None  # the node that computed the last input gradient, and its part
        self.unseen: dict[Any, tuple[str, int]] = {}  # part and number of GEMMs of the nodes in `waiting`
        self.waiting: dict[Any, float] = {}  # FLOPs by node whose input gradient is not known yet
        self.deferred = ""  # the part whose deferred weight gradient is computed
        self.open = contextlib.ExitStack()

    def __enter__(self) -> WorkCounter:
        for model in self.train_state.all_models:
            self._watch(model)
            for module in model.modules():
                if isinstance(module, DotProductAttention):
                    self._count_attention(module)
                elif isinstance(module, BlockwiseAttention):
                    self._count_blocks(module)
        self.open.enter_context(self.train_state.observers.watched_by(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.open.close()

    @property
    def work(self) -> Work:
        """The FLOPs and bytes counted so far."""
        for here, flops in self.waiting.items():
            part, gemms = self.unseen[here]
            if (
                gemms == 2 and part != "network"
            ):  # a cast weight that was handed to a partner came back in another storage
                self._add(part, "backward_input", flops / 2)
                self._add(part, "backward_weight", flops / 2)
            else:
                self._add(UNKNOWN, "backward_weight", flops)
        self.waiting = {}
        return Work(self.flops, self.bytes, CONVENTION)

    def _watch(self, model: Transformer) -> None:
        """Track which part of the network runs."""
        self._know_parameters(model)
        for module in model.modules():
            part = next((name for kind, name in PARTS if isinstance(module, kind)), None)
            if part is not None:
                self._around(module, part)
                for inner in module.modules():
                    if isinstance(inner, Linear | Experts | Router):
                        self._mark(inner, part)
            if isinstance(module, Logits):  # recomputed in the backward pass
                self._mark(module, "head")
            if isinstance(module, Norm | nn.Embedding):
                self._mark(module, "norm" if isinstance(module, Norm) else "embedding")
        self._mark(model.loss, "head")

    def _know_parameters(self, model: Transformer) -> None:
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                self._remember(self.parameters, parameter, name)
        for each in self.train_state.parallel.parameters:
            if each.compute_copy is not None:
                self._remember(self.parameters, each.compute_copy.tensor, each.name)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Track when the optimizer runs."""
        before, self.updating = self.updating, self.updating or name == "optimizer"
        try:
            yield
        finally:
            self.updating = before

    @contextlib.contextmanager
    def weight_gradient(self, module: str) -> Iterator[None]:
        """Track the module whose deferred gradient is computed."""
        self.deferred = self._deferred_part(module)
        try:
            yield
        finally:
            self.deferred = ""

    def _deferred_part(self, module: str) -> str:
        run = self.train_state.run
        owner = find_parameter(run.model, f"{module}.weight", run.adapter).owner
        return "ffn" if owner == "shared_experts" else owner

    def _around(self, module: nn.Module, part: str) -> None:
        """Track a module with its hooks, which may run GEMMs too."""
        before = module.register_forward_pre_hook(lambda *_: self.inside.append(part), prepend=True)
        after = module.register_forward_hook(lambda *_: self.inside.pop() and None, always_call=True)
        self.open.callback(before.remove)
        self.open.callback(after.remove)

    def _mark(self, module: nn.Module, part: str) -> None:
        """Track the forward of a leaf, which also runs when a module around it is recomputed."""
        inner = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(part)
            self.made.append((autograd_sequence(), part))
            try:
                return inner(*args, **kwargs)
            finally:
                self.made.append((autograd_sequence(), "network"))
                self.inside.pop()

        module.forward = watched
        self.open.callback(lambda: setattr(module, "forward", inner))

    def _add(self, part: str, which: str, flops: float) -> None:
        passes = self.flops.setdefault(part, {})
        passes[which] = passes.get(which, 0.0) + flops

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is DEVICE:
            return args[0].device
        out = operator(*args, **(kwargs or {}))
        batched = self.updating or self.inside[-1:] == ["experts"]
        places = GEMMS.get(operator) or (BATCHED_GEMMS.get(operator) if batched else None)
        if places is not None:
            first, second = (args[place] for place in places)
            share = _rows_taken(*args) if operator is aten._grouped_mm.default else 1.0
            self._gemm(first, second, 2.0 * first.numel() * second.shape[-1] * share)
        elif (space := namespace_of(operator)) in COUNTED and not operator.is_view and operator not in ALLOCATIONS:
            if space == "shardwise" and operator.name() == "shardwise::dequantize_nf4":
                self._made_for_gemm(args[0], out)
            elif space == "shardwise":
                self._quantized(args[0], [x for x in tree_leaves(out) if x.element_size() == 1])
            if (
                operator is aten._to_copy.default
                and self.inside
                and self._part_of(self.parameters, args[0]) is not None
            ):
                # The weight is cast for its GEMM; a recomputed pass may stop before that GEMM.
                self._remember(self.weights, out, self.inside[-1])
            self._moved(sum(x.numel() * x.element_size() for x in tree_leaves((args, out)) if isinstance(x, Tensor)))
        return out

    def _moved(self, size: float) -> None:
        """Add the bytes that an operator other than a GEMM reads and writes."""
        backward = in_backward()
        if self.inside:
            part, which = self.inside[-1], "recompute" if backward else "forward"
        elif self.updating:
            part, which = self.update, "optimizer"
        else:
            part, which = (self._part_of_node(), "backward_input") if backward else ("network", "forward")
        passes = self.bytes.setdefault(part, {})
        passes[which] = passes.get(which, 0.0) + size

    def _part_of_node(self) -> str:
        """The part whose forward pass created the running autograd node."""
        node = autograd_node()
        if node is None:
            return "network"
        at = bisect_right(self.made, node[1], key=lambda mark: mark[0])
        return self.made[at - 1][1] if at else "network"

    def _gemm(self, first: Tensor, second: Tensor, flops: float) -> None:
        if self.updating:
            self._add(self.update, "optimizer", flops)
            return
        if self.deferred:
            self._add(self.deferred, "backward_weight", flops)
            return
        if self.inside:
            self._remember(self.weights, second, self.inside[-1])
            self._add(self.inside[-1], self._forward_pass(), flops)
            return
        here = autograd_node()
        part = self._part_of(self.weights, first) or self._part_of(self.weights, second)
        if part is not None:
            self._add(part, "backward_input", flops)
            if here is not None:  # one node computes both gradients, in either order
                self.node, waiting = (here, part), self.waiting.pop(here, 0.0)
                self._add(part, "backward_weight", waiting)
        elif here is not None and self.node is not None and self.node[0] == here:
            self._add(self.node[1], "backward_weight", flops)
        elif here is not None:
            self.waiting[here] = self.waiting.get(here, 0.0) + flops
            self.unseen[here] = self._part_of_node(), self.unseen.get(here, ("", 0))[1] + 1
        else:
            self._add(UNKNOWN, "backward_weight", flops)

    def _quantized(self, x: Tensor, forms: list[Tensor]) -> None:
        """Count the quantised and transposed forms of a weight as that weight."""
        part = self._part_of(self.weights, x)
        if part is None and self.inside and self._part_of(self.parameters, x) is not None:
            part = self.inside[-1]
        if part is not None:
            for each in forms:
                self._remember(self.weights, each, part)

    def _made_for_gemm(self, codes: Tensor, matrix: Tensor) -> None:
        """Count a matrix dequantized from 4 bits as the weight stored in `codes`."""
        if self.inside:
            self._remember(self.weights, codes, self.inside[-1])
        part = self._part_of(self.weights, codes)
        if part is not None:
            self._remember(self.weights, matrix, part)

    def _remember(self, known: dict[int, tuple[StorageWeakRef, str]], x: Tensor, part: str) -> None:
        storage = StorageWeakRef(x.untyped_storage())
        known[storage.cdata] = storage, part

    def _part_of(self, known: dict[int, tuple[StorageWeakRef, str]], x: Tensor) -> str | None:
        found = known.get(storage_key(x.untyped_storage()))
        return found[1] if found is not None and not found[0].expired() else None

    def _forward_pass(self) -> str:
        """A forward pass inside of a backward pass is recomputation."""
        return "recompute" if in_backward() else "forward"

    def _attending(self, backward: bool = False) -> str:
        """The part whose attention runs now."""
        return "attention"

    def _count_attention(self, attention: DotProductAttention) -> None:
        inner = attention.attend

        def counted(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
            if isinstance(mask, VarlenMask):
                pairs = varlen_pairs(mask, *q.shape[:2])
            elif mask is not None and _is_fake(mask) and q.shape[1] == k.shape[1]:
                pairs = varlen_pairs(VarlenMask(None, self.train_state.run.model.sliding_window), *q.shape[:2])
            else:
                pairs = q.shape[0] * attended_pairs(q.shape[1], k.shape[1], mask)
            flops = 2.0 * q.shape[2] * pairs * (q.shape[3] + v.shape[3])
            part = self._attending()
            # Before the call: a recomputed pass may stop inside it, once it has the tensors it needs.
            self._add(part, self._forward_pass(), flops)
            out = inner(q, k, v, mask, scale)
            if out.requires_grad:
                out.register_hook(lambda _: self._add(part, "backward_input", 2.0 * flops))
            return out

        attention.attend = counted
        self.open.callback(lambda: setattr(attention, "attend", inner))

    def _count_blocks(self, attention: BlockwiseAttention) -> None:
        """Count the blocks of context-parallel attention, [batch, heads, sequence, width]."""
        forward, backward = kernels = attention.kernels

        def counted(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: BlockMask) -> Any:
            self._add(self._attending(), self._forward_pass(), block_flops(q, k, v, mask))
            return forward(q, k, v, scale, mask)

        def counted_backward(
            grad: Tensor, out: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
        ) -> Any:
            self._add(self._attending(backward=True), "backward_input", 2.0 * block_flops(q, k, v, rest[-1]))
            return backward(grad, out, delta, q, k, v, *rest)

        attention.kernels = counted, counted_backward
        self.open.callback(lambda: setattr(attention, "kernels", kernels))


def _rows_taken(first: Tensor, second: Tensor, ends: Tensor, *_: Any) -> float:
    """The fraction of rows that belong to an expert; 1 without data."""
    rows = first.shape[0] if second.dim() == 3 else second.shape[0]
    return 1.0 if _is_fake(ends) or not rows else ends[-1].item() / rows


def block_flops(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> float:
    """Forward FLOPs of attention from a block of queries to a block of keys."""
    length, keys = q.shape[2], k.shape[2]
    pairs: float = length * keys
    if isinstance(mask, Causal):
        pairs = attended_pairs(length, keys, None)
    elif mask is not None:
        pairs = mask.pairs if _is_fake(mask.low) else attended_pairs(length, keys, mask.dense())
    return 2.0 * q.shape[0] * q.shape[1] * pairs * (q.shape[3] + v.shape[3])


def varlen_pairs(varlen: VarlenMask, rows: int, length: int) -> float:
    """Query-key pairs that the mask allows, over all rows; without data each row counts as one document."""
    sizes = np.full(rows, length)
    if varlen.cu_seqlens is not None and not _is_fake(varlen.cu_seqlens):
        sizes = np.diff(varlen.cu_seqlens.cpu().numpy())
    window = np.minimum(sizes, varlen.window or length).astype(float)
    return float((window * (window + 1) / 2 + window * (sizes - window)).sum())


def attended_pairs(queries: int, keys: int, mask: Tensor | None) -> float:
    """Query-key pairs that the mask allows, averaged over the sequences; None is the causal mask."""
    return queries * (queries + 1) / 2 if mask is None else float(mask.sum()) / mask.shape[0]


def _is_fake(x: Tensor) -> bool:
    return type(x).__name__ == "FakeTensor"
