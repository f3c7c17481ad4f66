"""The matrix multiplications of a block: which matrices read the same input, and what produces that input.

A scale for each input channel can be multiplied into the matrices and divided out of the producer, a norm's weights or the rows of
another matrix, without changing the block's output. AWQ and SmoothQuant choose such scales; this file knows where they go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.model.attention import GroupedAttention, LatentAttention
from shardwise.model.layers import FeedForward
from shardwise.model.moe.layer import MoE
from shardwise.model.transformer import Block


@dataclass(frozen=True)
class Site:
    """Parameter names in the block: of matrices that may be quantized, of others that read the same input, and of its producer."""

    matrices: tuple[str, ...]
    before: str = ""
    """A norm, or a matrix whose rows produce the inputs (through attention or a gate); "": nothing that can absorb a scale."""
    others: tuple[str, ...] = ()

    @property
    def follows_norm(self) -> bool:
        """Whether the input is a norm's output."""
        return self.before.endswith("norm")

    @property
    def source(self) -> str:
        """The name of its input statistics: the norm that produces the inputs, or the first matrix that reads them."""
        return self.before if self.follows_norm else self.matrices[0]


def sites_of(block: Block) -> list[Site]:
    """The sites of a block, in the order in which it computes them."""
    attention, ffn = block.attention, block.ffn
    found: list[Site] = []
    if isinstance(ffn, MoE):
        reads: tuple[str, ...] = ("ffn.experts.gate", "ffn.experts.up")
        shared = ("ffn.shared.gate", "ffn.shared.up") if ffn.shared is not None else ()
        others: tuple[str, ...] = ("ffn.router.weight",)
        downs = [Site(("ffn.experts.down",), "ffn.experts.up")]
        if ffn.shared is not None:
            downs.append(Site(("ffn.shared.down",), "ffn.shared.up"))
        reads += shared
    else:
        assert isinstance(ffn, FeedForward)
        gated = ffn.gate is not None
        reads, others = ("ffn.gate", "ffn.up") if gated else ("ffn.up",), ()
        downs = [Site(("ffn.down",), "ffn.up" if gated else "")]
    if isinstance(attention, LatentAttention):
        down = "attention.q_down" if attention.compressed_queries else "attention.q"
        first: tuple[str, ...] = (down, "attention.kv_down")
        inner = [Site(("attention.q",), "attention.q_norm")] if attention.compressed_queries else []
        inner += [Site(("attention.kv",), "attention.kv_norm"), Site(("attention.out",), "attention.kv")]
    else:
        first = ("attention.q", "attention.k", "attention.v")
        inner = [Site(("attention.out",), "attention.v")]
    if block.ffn_norm is None:
        found = [Site(first + reads, "attention_norm", others), *inner, *downs]
    else:
        found = [Site(first, "attention_norm"), *inner, Site(reads, "ffn_norm", others), *downs]
    return [_full(site) for site in found]


def _full(site: Site) -> Site:
    """The site with full parameter names: the matrix of a `Linear` is its `weight`."""

    def parameter(name: str) -> str:
        return name if ".experts." in name or name.endswith(("norm", ".weight")) or not name else f"{name}.weight"

    return Site(tuple(map(parameter, site.matrices)), parameter(site.before), site.others)


def free_scales(block: Block, site: Site, wanted: Tensor) -> Tensor:
    """The scales nearest to those wanted for each input channel that the producer can absorb: query heads that share a value head
    share its scales."""
    if site.before != "attention.v.weight":
        return wanted
    attention = block.attention
    assert isinstance(attention, GroupedAttention)
    width = attention.head_dim
    groups = attention.q.weight.shape[0] // attention.v.weight.shape[0]
    by_head = wanted.unflatten(-1, (-1, groups, width))
    return by_head.mean(-2, keepdim=True).expand_as(by_head).flatten(-3)


@torch.no_grad()
def fold(block: Block, site: Site, scale: Tensor) -> None:
    """Multiply each input channel's scale [in], or [experts, in], into the matrices, and divide it out of their input's
    producer."""
    for name in (*site.matrices, *site.others):
        matrix = block.get_parameter(name)
        matrix.copy_(matrix * scale.to(matrix.dtype).unsqueeze(-2))
    if ".experts." in site.before:
        parts = [block.get_parameter(site.before)]
    else:  # the weight and, where there is one, the bias
        parts = list(block.get_submodule(site.before.removesuffix(".weight")).parameters(recurse=False))
    rows = _rows_of(block, site, scale)
    for part in parts:
        by_row = rows.to(part.dtype)
        part.copy_(part / (by_row if part.ndim == rows.ndim else by_row.unsqueeze(-1)))


def _rows_of(block: Block, site: Site, scale: Tensor) -> Tensor:
    """The divisors of the producer's rows."""
    attention = block.attention
    if site.before == "attention.v.weight":
        assert isinstance(attention, GroupedAttention)
        groups = attention.q.weight.shape[0] // attention.v.weight.shape[0]
        return scale.unflatten(-1, (-1, groups, attention.head_dim))[..., 0, :].flatten(-2)
    if site.before == "attention.kv.weight":  # the last rows of each head project its values
        assert isinstance(attention, LatentAttention)
        by_head = scale.unflatten(-1, (-1, attention.v_dim))
        return torch.cat((by_head.new_ones(len(by_head), attention.nope_dim), by_head), dim=1).flatten()
    return scale
