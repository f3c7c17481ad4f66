"""Blocks for inference on a GPU: the same matrices, multiplied by fewer and larger kernels.

The matrices of queries, keys and values become one, and so do gate and up. The parameters stay as views of the joined matrix, so
nothing is stored twice. Norms, RoPE, the KV cache write, the gate and the residual sum are fused into the neighbouring kernels
(`kernels/gemm/skinny.py`, `kernels/attention`). A block of another form (experts, latent attention, biases, LayerNorm) runs
unfused, over the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.attention import GroupedAttention, LayerCache
from shardwise.model.gemm.decoding import DecodingGemms, Kind
from shardwise.model.layers import FeedForward, Linear, Norm
from shardwise.model.paged import PagedLayerCache
from shardwise.model.quantized.linear import QuantizedGemm
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.rope import rope_cos_sin
from shardwise.model.transformer import Block, Transformer
from shardwise.run import ModelConfig

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
AddUp = Callable[[Tensor], Tensor]


def joined(*layers: Linear) -> Tensor:
    """Concatenate the matrices in new memory; the layers' parameters become views of it."""
    matrices = [layer.weight.detach() for layer in layers]
    packed = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    whole = QuantizedMatrix.joined(packed) if packed else torch.cat(matrices)
    first = 0
    for layer in layers:
        span = slice(first, first + layer.weight.shape[0])
        view = whole.map_rows(lambda part, s=span: part[s]) if isinstance(whole, QuantizedMatrix) else whole[span]
        layer.weight = nn.Parameter(view, requires_grad=False)
        first = span.stop
    return whole


def joins(*layers: Linear | None) -> bool:
    """Whether the matrices are stored in the same way, so that they can be joined."""
    matrices = [layer.weight for layer in layers if layer is not None]
    if any(isinstance(matrix, QuantizedMatrix) for matrix in matrices):
        return all(isinstance(matrix, QuantizedMatrix) and matrix.joins(matrices[0]) for matrix in matrices)
    return len({matrix.dtype for matrix in matrices}) == 1


def fits(block: Block, config: ModelConfig) -> bool:
    """Whether a block has the form that the kernels are written for."""
    attention, width = block.attention, config.head_dim
    return (
        isinstance(attention, GroupedAttention)
        and isinstance(block.ffn, FeedForward)
        and block.ffn_norm is not None
        and not block.parallel
        and config.norm == "rmsnorm"
        and config.bias == "none"
        and config.position != "alibi"
        and config.activation in ACTIVATIONS
        and width & (width - 1) == 0
        and 32 <= width <= 256
        and joins(attention.q, attention.k, attention.v)
        and joins(block.ffn.gate, block.ffn.up)
    )


class FusedBlock:
    """Replaces a block's `forward`. After the attention of the last block it computes only the tokens whose result is needed: one
    of each prompt."""

    def __init__(
        self, block: Block, config: ModelConfig, rope: tuple[Tensor, Tensor] | None, last: bool, add_up: AddUp | None, first: bool,
        gemms: DecodingGemms,
    ) -> None:  # fmt: skip
        self.add_up, self.first, self.beta, self.gemms = add_up, first, float(first), gemms
        attention, ffn = block.attention, block.ffn
        assert isinstance(attention, GroupedAttention)
        assert isinstance(ffn, FeedForward)
        assert ffn.gate is not None
        assert block.ffn_norm is not None
        self.qkv = joined(attention.q, attention.k, attention.v)
        self.gate_up = joined(ffn.gate, ffn.up)
        self.out, self.down = attention.out.weight.detach(), ffn.down.weight.detach()
        self.gemm = attention.out.gemm if isinstance(attention.out.gemm, QuantizedGemm) else QuantizedGemm()
        self.attention_norm = (block.attention_norm.weight.data, config.norm_eps)
        self.ffn_norm = (block.ffn_norm.weight.data, config.norm_eps)
        self.heads, self.scale = attention.q.weight.shape[0] // config.head_dim, attention.scale
        self.rope, self.last = rope, last
        self.norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            self.norms = (attention.q_norm.weight.data, attention.k_norm.weight.data, config.norm_eps)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor, rope: Any, mask: Any, cache: LayerCache | None = None) -> tuple[Tensor, None]:
        assert isinstance(cache, PagedLayerCache)
        x = x[0]
        qkv = self.multiply(x, self.qkv, self.attention_norm)
        attended = cache.attend_fused(qkv, self.heads, self.rope, self.norms, self.scale)
        x, attended = self._wanted(x, attended, cache)
        if not len(x):  # the beginning of a prompt: no token is sampled yet
            return x[None], None
        x = self._sum(self.multiply(attended, self.out, residual=x))
        return self._sum(self.feed_forward(x))[None], None

    def _wanted(self, x: Tensor, attended: Tensor, cache: PagedLayerCache) -> tuple[Tensor, Tensor]:
        """The rows whose result is needed."""
        rows = cache.cache.batch.wanted if self.last else None
        return (x, attended) if rows is None else (x[rows], attended[rows])

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward layer with its norm, added to the residual stream."""
        if isinstance(self.gate_up, QuantizedMatrix) and isinstance(self.down, QuantizedMatrix):
            residual = x if self.first else None
            return self.gemm.feed_forward(x, self.gate_up, self.down, self.ffn_norm, residual, self.activation)
        inner = self.multiply(x, self.gate_up, self.ffn_norm, gated=self.activation)
        return self.multiply(inner, self.down, residual=x)

    def multiply(
        self,
        x: Tensor,
        matrix: Tensor,
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        gated: str = "",
    ) -> Tensor:
        """Rows times a matrix, with the norm before it and the gate or residual sum after it; the residual stream may be
        overwritten."""
        from shardwise.model.kernels.gated import gated_product
        from shardwise.model.kernels.gemm.skinny import MOST_ROWS, skinny_gemm
        from shardwise.model.kernels.rms_norm import rms_norm

        if isinstance(matrix, QuantizedMatrix):
            return self.gemm.fused(x, matrix, norm, residual if self.first else None, gated)
        if len(x) <= MOST_ROWS:
            return skinny_gemm(x, matrix, norm, residual if self.first else None, gated)
        if norm is not None:
            x = rms_norm(x, *norm)
        made = self.gemms(x, matrix, residual, self.first)
        if residual is not None:
            return residual.addmm_(x, matrix.t(), beta=self.beta) if made is None else made
        made = F.linear(x, matrix) if made is None else made
        if not gated:
            return made
        gate, up = made.chunk(2, dim=-1)
        return gated_product(gate, up, gated)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.add_up is None else self.add_up(x)


class InvariantBlock(FusedBlock):
    """The same with operations whose bits for a token do not depend on the batch, those of `invariant/`. Joining matrices changes
    no bits, and neither does adding a rounded result to the residual stream."""

    def __call__(self, x: Tensor, rope: Any, mask: Any, cache: LayerCache | None = None) -> tuple[Tensor, None]:
        from shardwise.model.kernels.gated import gated_product
        from shardwise.model.kernels.gemm.invariant import invariant_gemm
        from shardwise.model.kernels.gemm.invariant_rows import invariant_norm

        assert isinstance(cache, PagedLayerCache)
        x = x[0]
        weight, eps = self.attention_norm
        qkv = invariant_gemm(invariant_norm(x, weight, None, eps), self.qkv)
        attended = cache.attend_fused_invariant(qkv, self.heads, self.rope, self.norms, self.scale)
        x, attended = self._wanted(x, attended, cache)
        if not len(x):
            return x[None], None
        x = self._onto(x, attended, self.out)
        weight, eps = self.ffn_norm
        gate, up = invariant_gemm(invariant_norm(x, weight, None, eps), self.gate_up).chunk(2, dim=-1)
        return self._onto(x, gated_product(gate, up, self.activation), self.down)[None], None

    def _onto(self, x: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
        """The residual stream plus rows times a matrix. Where ranks hold some of the columns each, every rank adds the stream to
        the sum, as the unfused layers do."""
        from shardwise.model.kernels.gemm.invariant import invariant_gemm

        if self.add_up is None:
            return invariant_gemm(rows, matrix, residual=x)
        return x + self.add_up(invariant_gemm(rows, matrix))


PACKED = QuantizedGemm()
"""Multiplies a quantized head."""


def unembed(x: Tensor, weight: Tensor, gemms: DecodingGemms) -> Tensor:
    """Normed hidden states [rows, hidden] to logits."""
    if isinstance(weight, QuantizedMatrix):
        return PACKED.fused(x, weight)
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        from shardwise.model.kernels.gemm.skinny import MOST_ROWS, skinny_gemm

        if 0 < len(x) <= MOST_ROWS:
            return skinny_gemm(x, weight.to(x.dtype))
        if weight.dtype == x.dtype and (made := gemms(x, weight)) is not None:
            return made
    return F.linear(x, weight.to(x.dtype))


def tune(model: Transformer, gemms: DecodingGemms, sizes: Sequence[int]) -> None:
    """Find the fastest algorithms for the matrices of fused blocks, and of the head, in steps of `sizes` tokens."""
    blocks = [block.forward for block in model.layers.values() if type(block.forward) is FusedBlock]
    by_use: dict[tuple[str, bool, torch.Size], list[Tensor]] = {}
    for block in blocks:
        uses = (("qkv", False), ("gate_up", False), ("out", block.first), ("down", block.first))
        for name, adds in uses:
            matrix = getattr(block, name)
            if not isinstance(matrix, QuantizedMatrix):
                by_use.setdefault((name, adds, matrix.shape), []).append(matrix)
    head = model.head if model.head is not None else model.embed
    packed = head is not None and isinstance(head.weight, QuantizedMatrix)
    if blocks and model.last and head is not None and not packed and head.weight.dtype == model.dtype:
        by_use["head", False, head.weight.shape] = [head.weight.detach()]
    kinds = [Kind(matrices, adds) for (_, adds, _), matrices in by_use.items()]
    if kinds:
        gemms.tune(kinds, [size for size in sizes if size > 1])


def load_kernels(model: Transformer, counts: Iterable[int], unembed: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Run the GEMMs of the last block in a step with prompts, and of the head, for these numbers of sampled tokens. Libraries load
    a kernel at its first use and synchronize with the device for it, and the choice of kernel depends on the number of rows."""
    *_, last = model.layers.values()
    if not isinstance(last, Block) or type(last.forward) is not FusedBlock:
        return
    block, head = last.forward, model.head if model.head is not None else model.embed
    for count in counts:
        x = torch.zeros(count, block.out.shape[0], dtype=block.out.dtype, device=block.attention_norm[0].device)
        x = block.feed_forward(block.multiply(x.new_zeros(count, block.out.shape[1]), block.out, residual=x))
        if model.last and head is not None:
            unembed(x, head.weight)


def fuse(
    model: Transformer, positions: int, gemms: DecodingGemms, add_up: AddUp | None = None, first: bool = True
) -> int:
    """Fuse the blocks of a model on a GPU that have the required form, for sequences of `positions` positions. Returns how many
    were fused. Where ranks hold some of the columns each, `add_up` sums their partial results, and only the `first` rank adds the
    residual stream."""
    config, device = model.config, next(model.parameters()).device
    rope = None
    if config.position == "rotary":
        tables = rope_cos_sin(config, torch.arange(positions, device=device)[None], torch.float32)
        half = config.head_dim // 2
        rope = tables[0][0, :, 0, :half].contiguous(), tables[1][0, :, 0, :half].contiguous()
    fused = 0
    for number, block in enumerate(model.layers.values(), 1):
        assert isinstance(block, Block)
        if fits(block, config):
            made = InvariantBlock if model.invariant else FusedBlock
            last = number == len(model.layers)
            block.forward = made(block, config, rope, last, add_up, first, gemms)  # type: ignore[method-assign]
            fused += 1
    if fused == len(model.layers):
        model.rope_builder = lambda *_: None  # the kernels apply RoPE themselves
    norm = model.norm
    # The fast norm of wide rows adds in another order than the invariant one.
    if isinstance(norm, Norm) and norm.bias is None and fused and not model.invariant:
        from shardwise.model.kernels.rms_norm import rms_norm

        weight, eps = norm.weight.data, norm.eps
        norm.forward = lambda x: rms_norm(x[0], weight, eps)[None]  # type: ignore[method-assign]
    return fused
