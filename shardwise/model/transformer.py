"""The decoder-only transformer on one device: GPT, OPT, BLOOM, Llama, Gemma, Qwen, Mixtral and DeepSeek are configurations of it.

It knows nothing of parallelism, but the parts where devices would have to communicate are modules that can be replaced: the
embedding, attention's `DotProductAttention`, the experts' dispatch, and the loss head. Nor does it know the objective: to get a
loss, a caller passes the function that computes it from the last hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.model.alibi import alibi_elements
from shardwise.model.attention import Cache, GroupedAttention, LatentAttention, LayerCache, MaskBuilder
from shardwise.model.layers import FeedForward, Gemm, Linear, make_norm
from shardwise.model.loss import LinearCrossEntropy
from shardwise.model.moe.layer import MoE
from shardwise.model.rope import Rope, rope_cos_sin
from shardwise.model.varlen import Mask
from shardwise.run import ModelConfig

Finish = Callable[[Tensor, Tensor], Tensor]
"""Computes the result from normed hidden states [batch, sequence, hidden] and the unembedding matrix [vocabulary, hidden]. It is
called inside the forward pass, where data parallelism has gathered the matrix."""


class Output(NamedTuple):
    """The output of a forward pass: logits, or the result of `finish`; and, with MoE layers, the summed (balance, z) auxiliary
    losses, unweighted."""

    result: Tensor
    auxiliary: Tensor | None


class Block(nn.Module):
    """Attention, then a feed-forward or MoE layer, each behind a norm and added to the residual stream. In a parallel block (Wang
    & Komatsuzaki 2021, Chowdhery et al. 2022) both read the block's input, through the same norm or each through its own."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = LatentAttention(config) if config.attention == "latent" else GroupedAttention(config)
        self.ffn_norm = make_norm(config) if config.has_ffn_norm else None
        self.parallel = config.parallel_block
        self.ffn = MoE(config) if config.is_moe(layer) else FeedForward(config, config.ffn)

    def forward(
        self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        normed = self.attention_norm(x)
        middle = x + self.attention(normed, rope, mask, cache)
        if self.ffn_norm is not None:
            normed = self.ffn_norm(x if self.parallel else middle)
        out = self.ffn(normed)
        out, auxiliary = out if isinstance(out, tuple) else (out, None)
        return middle + out, auxiliary


class Head(Linear):
    """The unembedding matrix. Its forward pass ends the network, so that data parallelism can gather the matrix for it alone."""

    def forward(self, x: Tensor, gemm: Gemm, finish: Finish | None) -> Tensor:  # type: ignore[override]
        return _finished(x, self.weight, gemm, finish)


def _finished(x: Tensor, matrix: Tensor, gemm: Gemm, finish: Finish | None) -> Tensor:
    return gemm(x, matrix, None) if finish is None else finish(x, matrix)


class Transformer(nn.Module):
    """Embedding, blocks, norm, head. `dtype` is the compute dtype; parameters may have a higher precision.

    `first` and `last` say whether this is the first and the last stage of a pipeline. Where it is not, the residual stream comes
    in or goes out, and unneeded modules are None; `layers` are those of the stage. `loss` is the loss head, with which an
    objective computes its loss.
    """

    embed: nn.Embedding | None
    positions: nn.Embedding | None
    embed_norm: nn.Module | None
    norm: nn.Module | None
    head: Head | None
    gemm: Gemm = Gemm()
    """Multiplies the last hidden states with the unembedding matrix."""
    frozen_embedding = False
    """Whether the embedding takes no gradient. The residual stream then requires one itself, so that all layers work the same
    way."""
    invariant = False
    """Whether a token's results have the same bits whatever else is in the batch (`invariant/`)."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype | None = None, layers: Iterable[int] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.first = self.last = True
        self.embed = nn.Embedding(config.vocab, config.hidden)
        rows = config.max_positions + config.position_offset
        self.positions = nn.Embedding(rows, config.hidden) if config.position == "learned" else None
        self.embed_norm = make_norm(config) if config.embedding_norm else None
        own = range(config.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(n): Block(config, n) for n in own})
        self.norm = make_norm(config)
        self.head = None if config.tied_embeddings else Head(config.hidden, config.head_rows, bias=False)
        self.mask_builder: nn.Module = MaskBuilder(config.sliding_window)
        self.rope_builder: Callable[[ModelConfig, Tensor, torch.dtype], Rope | None]
        self.rope_builder = alibi_elements if config.position == "alibi" else rope_cos_sin
        self.loss: nn.Module = LinearCrossEntropy()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        finish: Finish | None = None,
    ) -> Output:
        """Tokens [batch, sequence] to logits, or to the result of `finish` on the last hidden states.

        `positions` count from 0 unless given. `documents` numbers the documents packed in a row, which then do not attend to each
        other, or says where they begin (`VarlenMask`). With a `cache` the tokens continue the sequences it holds.
        """
        x, rope, mask = self.begin(tokens, positions, documents, cached=cache is not None)
        auxiliary = None
        for n, block in enumerate(self.layers.values()):
            x, extra = block(x, rope, mask, cache.layers[n] if cache is not None else None)
            if extra is not None:
                auxiliary = extra if auxiliary is None else auxiliary + extra
        return Output(self.unembed(x, finish) if self.last else x, auxiliary)

    def begin(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, cached: bool = False
    ) -> tuple[Tensor, Rope | None, Mask]:
        """What the first block takes: the residual stream, and the rotations and the mask that all blocks share."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mask = None if cached else self.mask_builder(positions.shape[1], documents, tokens.device)
        x = self.embed_tokens(tokens, positions) if self.first else tokens
        rope = self.rope_builder(self.config, positions, x.dtype) if self.config.position != "learned" else None
        return x, rope, mask

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens to the residual stream."""
        assert self.embed is not None
        x = self.embed(tokens)
        if self.config.embedding_scale:
            x = x * self.config.hidden**0.5
        if self.positions is not None:
            x = x + self.positions(positions + self.config.position_offset)
        x = x if self.dtype is None else x.to(self.dtype)
        x = x if self.embed_norm is None else self.embed_norm(x)
        if self.frozen_embedding and torch.is_grad_enabled():
            return _First.apply(x, x.new_empty(0, requires_grad=True))
        return x

    def unembed(self, x: Tensor, finish: Finish | None) -> Tensor:
        """The normed residual stream to logits, or to the result of `finish` on it and on the head's (if tied, the embedding's)
        matrix."""
        assert self.norm is not None
        x = self.norm(x)
        if self.head is not None:
            return self.head(x, self.gemm, finish)
        assert self.embed is not None
        return _finished(x, self.embed.weight, self.gemm, finish)


def make_stage(
    config: ModelConfig, dtype: torch.dtype | None, layers: Iterable[int], first: bool, last: bool
) -> Transformer:
    """The part of the network that a pipeline stage runs, without memory yet."""
    with torch.device("meta"):
        model = Transformer(config, dtype, layers)
    model.first, model.last = first, last
    if not first:
        model.positions = model.embed_norm = None
    if not last:
        model.norm = model.head = None
    if not first and not (last and config.tied_embeddings):
        model.embed = None
    return model


class _First(torch.autograd.Function):
    """A tensor as the first of a graph, with another that requires gradients. If it required gradients itself, the graph would keep
    it, and a gradient of it, to the end of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None
