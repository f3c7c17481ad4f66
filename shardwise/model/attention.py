"""Attention: multi-head and grouped-query (Ainslie et al. 2023), and DeepSeek's latent attention (DeepSeek-V2, 2024).

Both end in `DotProductAttention`, a module without parameters that takes queries, keys and values of whole heads. It is the one
place where tokens interact, and so the one that context parallelism replaces. A KV cache, where there is one, attends instead. The
number of heads is read off the projections' width, so a device that holds some of the heads runs the same code.

A KV cache holds the keys and values, or latents, of earlier tokens, so that generating the next token costs one token's work. A
layer passes it the queries, keys and values of new tokens and gets the output of attention over all tokens. So the storage format
and the kernel that reads it are the cache's business alone (`paged.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwise.model.alibi import with_elements
from shardwise.model.layers import Linear, Norm
from shardwise.model.rope import Rope, apply_rope, softmax_scale_factor
from shardwise.model.varlen import Mask, VarlenMask, attention_mask, dense_attention, varlen_attention
from shardwise.run import ModelConfig


class MaskBuilder(nn.Module):
    """Makes the mask that all layers of a forward pass use. Documents given as `cu_seqlens` make a `VarlenMask`; with `varlen`, a
    sliding window alone does so too."""

    def __init__(self, window: int, varlen: bool = False) -> None:
        super().__init__()
        self.window = window
        self.varlen = varlen

    def forward(self, length: int, documents: Tensor | None, device: torch.device) -> Mask:
        """`documents` numbers the document of each position, [batch, length], or says where they begin."""
        window = self.window if self.window < length else 0
        if documents is None and not window:
            return None
        if self.varlen if documents is None else documents.dim() == 1:
            return VarlenMask(documents, window)
        return attention_mask(length, documents, window, device)


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Softmax attention of heads laid out [batch, sequence, heads, width]; None as mask means causal."""
    if isinstance(mask, VarlenMask):
        return varlen_attention(q, k, v, mask, scale)
    return dense_attention(q, k, v, mask, scale)


class DotProductAttention(nn.Module):
    """Attention as a module. `attend` computes it and may be replaced by another function."""

    attend: Callable[[Tensor, Tensor, Tensor, Mask, float], Tensor] = staticmethod(dot_product_attention)

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return self.attend(q, k, v, mask, self.scale)


class LayerCache(ABC):
    """The cache of one attention layer."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor | None, scale: float) -> Tensor:
        """Store the keys and values [1, tokens, heads, width] of new tokens, and attend to all stored tokens. Without values, the
        first part of a key is its value, and the result is as wide as that part (latent attention)."""


class Cache(ABC):
    """One `LayerCache` for each layer of a model; it knows which sequences the tokens of a forward pass belong to."""

    layers: Sequence[LayerCache]


class GroupedAttention(nn.Module):
    """Query heads in groups that share a key/value head; groups of one head are multi-head attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.bias != "none"
        self.q = Linear(config.hidden, config.heads * config.head_dim, bias=bias)
        self.k = Linear(config.hidden, config.kv_heads * config.head_dim, bias=bias)
        self.v = Linear(config.hidden, config.kv_heads * config.head_dim, bias=bias)
        self.out = Linear(config.heads * config.head_dim, config.hidden, bias=config.bias == "all")
        self.q_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.alibi = config.position == "alibi"
        self.scale = config.head_dim**-0.5 * softmax_scale_factor(config)
        self.core: nn.Module = DotProductAttention(self.scale)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.add_positions("q", q, rope), self.add_positions("k", k, rope)
        out = self.core(q, k, v, mask) if cache is None else cache.attend(q, k, v, self.scale)
        return self.out(out.flatten(2))

    def add_positions(self, name: str, x: Tensor, rope: Rope | None) -> Tensor:
        """Queries ("q") or keys ("k") with their positions encoded."""
        if rope is None:
            return x
        return with_elements(x, rope[name == "k"]) if self.alibi else apply_rope(x, rope)


def multiply_by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """Heads [batch, sequence, heads, in], each times its own matrix [heads, in, out]."""
    return torch.einsum("bthi,hio->btho", x, matrices)


class LatentAttention(nn.Module):
    """Keys and values are projected up from a small latent vector; positions enter through separate rotary elements.

    A KV cache keeps only the latent and the one rotary key that all heads share, and never projects them up: the up-projection of
    keys is multiplied into the queries instead, and that of values into the output (DeepSeek-V2, section 2.1.2). With
    `over_latents` attention works this way without a cache too.
    """

    over_latents = False
    by_head: Callable[[Tensor, Tensor], Tensor] = staticmethod(multiply_by_head)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.nope_dim, self.rope_dim, self.v_dim, self.kv_rank = c.nope_dim, c.rope_dim, c.v_dim, c.kv_rank
        q_width = c.heads * c.head_dim
        if c.q_rank:
            self.q_down = Linear(c.hidden, c.q_rank, bias=False)
            self.q_norm = Norm(c.q_rank, 1e-6)  # these two norms have an epsilon of their own in the published model
        self.q = Linear(c.q_rank or c.hidden, q_width, bias=False)
        self.kv_down = Linear(c.hidden, c.kv_rank + c.rope_dim, bias=False)
        self.kv_norm = Norm(c.kv_rank, 1e-6)
        self.kv = Linear(c.kv_rank, c.heads * (c.nope_dim + c.v_dim), bias=False)
        self.out = Linear(c.heads * c.v_dim, c.hidden, bias=False)
        self.compressed_queries = bool(c.q_rank)
        self.scale = c.head_dim**-0.5 * softmax_scale_factor(c)
        self.core: nn.Module = DotProductAttention(self.scale)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, cache: LayerCache | None) -> Tensor:
        assert rope is not None, "latent attention has no positions but rotary ones"
        batch, length = x.shape[:2]
        q = self.q(self.q_norm(self.q_down(x)) if self.compressed_queries else x)
        q = q.view(batch, length, -1, self.nope_dim + self.rope_dim)
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)
        latent, k_rope = self.kv_down(x).split((self.kv_rank, self.rope_dim), dim=-1)
        latent, k_rope = self.kv_norm(latent), apply_rope(k_rope[:, :, None], rope)
        if cache is None and not self.over_latents:
            k, v = self.unfold(latent, k_rope)
            q = torch.cat((q_nope, apply_rope(q_rope, rope)), dim=-1)
            out = self.core(q, k, v, mask)
        else:
            matrices = self.kv.weight.to(x.dtype).unflatten(0, (-1, self.nope_dim + self.v_dim))
            for_keys, for_values = matrices.split((self.nope_dim, self.v_dim), dim=1)
            q = torch.cat((self.by_head(q_nope, for_keys), apply_rope(q_rope, rope)), dim=-1)
            k = torch.cat((latent[:, :, None], k_rope), dim=-1)
            if cache is None:
                attended = self.core(q, k, k[..., : self.kv_rank], mask)
            else:
                attended = cache.attend(q, k, None, self.scale)
            out = self.by_head(attended, for_values.mT)
        return self.out(out.flatten(2))

    def unfold(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads."""
        kv = self.kv(latent).view(*latent.shape[:2], -1, self.nope_dim + self.v_dim)
        k_nope, v = kv.split((self.nope_dim, self.v_dim), dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1), v
