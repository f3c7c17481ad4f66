"""The decoder-only transformer on one device: GPT, Llama, Qwen, Mixtral and DeepSeek are configurations of it.

It knows nothing of parallelism. A stage of a pipeline is this class with some of its parts set to None; what lies between
the parts is one tensor, the residual stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.attention import GroupedAttention, LatentAttention, visible
from shardwise.model.cache import Cache, LayerCache
from shardwise.model.experts import Mixture
from shardwise.model.layers import FeedForward, Linear, at_least_float32, make_norm
from shardwise.model.rotary import Rotation, rotation
from shardwise.run import ModelConfig


class Output(NamedTuple):
    """What a forward pass gives: logits, or the summed loss when there were targets; and for mixtures the summed
    (balance, z) auxiliary losses, unweighted."""

    result: Tensor
    auxiliary: Tensor | None


class Block(nn.Module):
    """Attention, then a feed-forward layer or a mixture, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = LatentAttention(config) if config.attention == "latent" else GroupedAttention(config)
        self.ffn_norm = make_norm(config)
        routed = config.experts and layer >= config.dense_layers
        self.ffn = Mixture(config) if routed else FeedForward(config, config.ffn)

    def forward(
        self, x: Tensor, turn: Rotation | None, mask: Tensor | None, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = x + self.attention(self.attention_norm(x), turn, mask, cache)
        out = self.ffn(self.ffn_norm(x))
        out, auxiliary = out if isinstance(out, tuple) else (out, None)
        return x + out, auxiliary


class Transformer(nn.Module):
    """Embedding, blocks, norm, head. `dtype` is that of the arithmetic; parameters may be wider."""

    embed: nn.Embedding | None
    positions: nn.Embedding | None
    head: Linear | None

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden) if config.position == "learned" else None
        self.layers = nn.ModuleDict({str(n): Block(config, n) for n in range(config.layers)})
        self.norm = make_norm(config)
        self.head = None if config.tied_embeddings else Linear(config.hidden, config.vocab, bias=False)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """Tokens [batch, sequence] to logits, or, with targets, to the sum of their cross-entropies.

        `positions` count from 0 unless given; `documents` numbers the documents packed in a row, which then do not see
        each other; with a `cache` the tokens continue what it holds.
        """
        length = tokens.shape[1]
        before = cache.used if cache is not None else 0
        if positions is None:
            positions = torch.arange(before, before + length, device=tokens.device)[None]
        if cache is not None:
            documents = cache.begin(documents, length)
        mask = visible(length, documents, before + length, self.config.sliding_window, tokens.device)

        assert self.embed is not None
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.dtype is not None:
            x = x.to(self.dtype)
        turn = rotation(self.config, positions, x.dtype) if self.config.position == "rotary" else None
        auxiliary = None
        for n, block in enumerate(self.layers.values()):
            x, extra = block(x, turn, mask, cache.layers[n] if cache is not None else None)
            if extra is not None:
                auxiliary = extra if auxiliary is None else auxiliary + extra
        logits = self.logits(self.norm(x))
        return Output(logits if targets is None else summed_cross_entropy(logits, targets), auxiliary)

    def logits(self, x: Tensor) -> Tensor:
        """Scores of the vocabulary, from the head or, tied, from the embedding."""
        if self.head is not None:
            return self.head(x)
        assert self.embed is not None
        return F.linear(x, self.embed.weight.to(x.dtype))


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy added over targets; dividing by a count is left to who knows the whole batch. Targets that are not to
    be learned hold the number that PyTorch ignores."""
    return F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets.flatten(), reduction="sum")
