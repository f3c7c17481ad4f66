"""A KV cache in pages (Kwon et al. 2023): memory for keys and values is cut into pages of a fixed number of tokens, and each
sequence has a page table of the pages it uses, in any order. So sequences of any length share one pool without gaps, and a common
prefix is stored once.

A forward pass takes the new tokens of many sequences, concatenated, with the sequences of a single new token first. `PagedBatch`
says which sequence and position each token belongs to. Pages are [pages, heads, tokens, width], so that a kernel reads the rows of
one head from contiguous memory. Page 0 belongs to no sequence: padding is written there. The functions here are plain PyTorch, for
CPUs and as a reference; `kernels/` has those for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.attention import Cache, LayerCache
from shardwise.model.invariant.attention import attend_blocks
from shardwise.run import ModelConfig


@dataclass
class PagedBatch:
    """The new tokens of a forward pass and the sequences they continue. Tensors are int32, on the device."""

    table: Tensor
    """[slots, pages]: the page table of every running sequence, by its slot."""
    slots: Tensor
    """[sequences]: the slot of each sequence."""
    starts: Tensor
    """[sequences]: how many tokens of each sequence are already in the cache."""
    cu_seqlens: Tensor
    """[sequences + 1]: where the new tokens of each sequence begin in the batch."""
    decodes: int
    """How many of the sequences, the first ones, decode: they have one new token."""
    counts: tuple[int, ...]
    """The number of new tokens of each of the other sequences."""
    longest: int
    """An upper bound on the tokens of any sequence, old and new."""
    positions: Tensor
    """[tokens]: the position of each new token in its sequence."""
    wanted: Tensor | None = None
    """Indices (int64) of the new tokens whose result is needed; fused blocks compute only these at the end. None: all."""
    shared: bool = False
    """Whether several of the entries are one sequence at consecutive positions: draft tokens being verified. The decode kernel
    then finds all new keys already in their pages."""
    tiles: dict[int, Tensor] = field(default_factory=dict)
    """On GPUs, the tiles that the prefill kernel runs over, by the first sequence that it attends for."""

    @property
    def all_counts(self) -> tuple[int, ...]:
        """The number of new tokens of every sequence."""
        return (1,) * self.decodes + self.counts

    def tiles_from(self, first: int, rows: int) -> Tensor:
        """The tiles of `rows` tokens of the sequences from `first` on, on the device."""
        if first not in self.tiles:
            from shardwise.model.kernels.attention.paged import tiles_of

            made = torch.tensor(tiles_of(self.all_counts[first:], rows, first), dtype=torch.int32)
            self.tiles[first] = made.pin_memory().to(self.table.device, non_blocking=True)
        return self.tiles[first]

    def places(self, page_tokens: int) -> Tensor:
        """Where the new tokens' keys are written, as indices into the tokens of all pages."""
        rows = torch.arange(len(self.slots), device=self.slots.device)
        if self.counts:
            rows = torch.repeat_interleave(rows, self.cu_seqlens.diff(), output_size=len(self.positions))
        page = self.table[self.slots[rows].long(), (self.positions // page_tokens).long()]
        return page.long() * page_tokens + self.positions % page_tokens


def paged_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scale: float, window: int = 0
) -> Tensor:
    """Attention of new tokens [tokens, heads, width] to their sequences. Their keys and values are already in their pages."""
    out = q.new_empty(*q.shape[:2], values.shape[-1])
    page_tokens = keys.shape[2]
    used = -(-batch.longest // page_tokens)
    table = batch.table[batch.slots.long(), :used].long()
    starts = batch.starts.long()

    def attend(rows: slice, queries: Tensor) -> Tensor:
        """Queries [sequences, tokens, heads, width]: the last tokens of each sequence."""
        k, v = (x[table[rows].clamp(min=0)].transpose(1, 2).flatten(2, 3).to(q.dtype) for x in (keys, values))
        position = starts[rows, None] + torch.arange(queries.shape[1], device=q.device)
        key = torch.arange(k.shape[2], device=q.device)
        # Keys and values that no query sees may hold anything, even NaN, and zero times NaN is not zero.
        there = key <= position[:, -1:]
        if window:
            there &= position[:, :1] - key < window
        k, v = (torch.where(there[:, None, :, None], x, 0) for x in (k, v))
        seen = key <= position[..., None]
        if window:
            seen &= position[..., None] - key < window
        made = F.scaled_dot_product_attention(
            queries.transpose(1, 2), k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        return made.transpose(1, 2)

    if batch.decodes:
        out[: batch.decodes] = attend(slice(0, batch.decodes), q[: batch.decodes, None])[:, 0]
    first = batch.decodes
    for row, count in enumerate(batch.counts, batch.decodes):
        out[first : first + count] = attend(slice(row, row + 1), q[None, first : first + count])[0]
        first += count
    return out


class PagedLayerCache(LayerCache):
    """The pages of one layer."""

    def __init__(self, cache: PagedCache, keys: Tensor, values: Tensor, window: int) -> None:
        self.cache, self.keys, self.values, self.window = cache, keys, values, window

    def write(self, k: Tensor, v: Tensor | None) -> None:
        """Write new keys and values [tokens, heads, width] to their pages."""
        places, page_tokens = self.cache.places, self.keys.shape[2]
        page, offset = places // page_tokens, places % page_tokens
        self.keys[page, :, offset] = k.to(self.keys.dtype)
        if v is not None:
            self.values[page, :, offset] = v.to(self.values.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor | None, scale: float) -> Tensor:
        batch = self.cache.batch
        if self.cache.invariant:
            self.write(k[0], None if v is None else v[0])
            return self.attend_invariant(q[0], scale)[None]
        width = q.shape[-1]
        if _has_kernels(q) and v is not None and v.shape[-1] == width and width & (width - 1) == 0:
            qkv = torch.cat((q[0].flatten(1), k[0].flatten(1), v[0].flatten(1)), dim=1)
            return self.attend_fused(qkv, q.shape[2], None, None, scale).view_as(q)
        self.write(k[0], None if v is None else v[0])
        if not _has_kernels(q):
            return paged_attention_reference(q[0], self.keys, self.values, batch, scale, self.window)[None]
        first = 0
        out = q.new_empty(*q.shape[1:3], self.values.shape[-1])
        if v is None and batch.decodes:  # one new token for each of the first sequences; its latent is in its page
            from shardwise.model.kernels.attention.latent import latent_attention

            first = batch.decodes
            where = (batch.table, batch.slots[:first], batch.starts[:first], self.cache.scratch(q.shape[2]))
            rank = self.values.shape[-1]
            out[:first] = latent_attention(q[0, :first], self.keys, rank, *where, scale, self.window)
        if batch.counts or not first:
            self._attend_tiles(q[0], out, batch, first, scale)
        return out[None]

    def attend_fused(
        self,
        qkv: Tensor,
        heads: int,
        rope: tuple[Tensor, Tensor] | None,
        norms: tuple[Tensor, Tensor, float] | None,
        scale: float,
    ) -> Tensor:
        """The same for queries, keys and values [tokens, all heads x width] as the joined matrix returns them, by GPU kernels that
        also apply the norms and RoPE. Returns [tokens, heads x width]."""
        from shardwise.model.kernels.attention.decode import decode_attention
        from shardwise.model.kernels.attention.paged import rope_write

        batch, cache = self.cache.batch, self.cache
        split, width = batch.decodes, self.keys.shape[-1]
        arguments: tuple[Any, Any, Tensor, Tensor] = (rope, norms, self.keys, self.values)
        if batch.shared:  # the decode kernel then rewrites keys and values that are already there
            rope_write(qkv, *arguments, cache.places, batch.positions, heads)
            arguments = (None, None, self.keys, self.values)

        def decode(qkv: Tensor) -> Tensor:
            where = (batch.table, batch.slots, batch.starts, cache.scratch(heads))
            return decode_attention(qkv, *arguments, *where, heads, scale, self.window)

        if not batch.counts:
            return decode(qkv)
        if not batch.shared:
            rope_write(qkv[split:], *arguments, cache.places[split:], batch.positions[split:], heads)
        out = qkv.new_empty(len(qkv), heads, width)
        if split:
            out[:split] = decode(qkv[:split]).view(split, heads, width)
        q = qkv[:, : heads * width].unflatten(1, (-1, width))
        self._attend_tiles(q, out, batch, split, scale)
        return out.flatten(1)

    def attend_fused_invariant(
        self,
        qkv: Tensor,
        heads: int,
        rope: tuple[Tensor, Tensor] | None,
        norms: tuple[Tensor, Tensor, float] | None,
        scale: float,
    ) -> Tensor:
        """`attend_fused` with bits that do not depend on the batch."""
        from shardwise.model.kernels.attention.paged import rope_write
        from shardwise.model.kernels.gemm.invariant_rows import invariant_norm

        batch, width, kv_heads = self.cache.batch, self.keys.shape[-1], self.keys.shape[1]
        if norms is not None:
            parts = qkv.unflatten(1, (-1, width)).split((heads, kv_heads, kv_heads), dim=1)
            q, k = (invariant_norm(x, norm, None, norms[2]) for x, norm in zip(parts[:2], norms[:2], strict=True))
            qkv = torch.cat((q, k, parts[2]), dim=1).flatten(1)
        rope_write(qkv, rope, None, self.keys, self.values, self.cache.places, batch.positions, heads)
        return self.attend_invariant(qkv[:, : heads * width].unflatten(1, (-1, width)), scale).flatten(1)

    def attend_invariant(self, q: Tensor, scale: float) -> Tensor:
        """Attention of new tokens [tokens, heads, width] whose keys are in their pages, with bits that do not depend on the
        batch."""
        batch = self.cache.batch
        if not q.is_cuda:
            slots, starts, counts = batch.slots.tolist(), batch.starts.tolist(), batch.all_counts
            return attend_blocks(q, self.keys, self.values, batch.table, slots, starts, counts, scale, self.window)
        from shardwise.model.kernels.attention.invariant import invariant_attention, tokens_of_tile

        tiles = batch.tiles_from(0, tokens_of_tile(q.shape[1], self.keys.shape[1], q.shape[2]))
        where = (batch.table, batch.slots, batch.starts, batch.cu_seqlens, tiles, batch.positions)
        return invariant_attention(q, self.keys, self.values, *where, batch.longest, scale, self.window)

    def _attend_tiles(self, q: Tensor, out: Tensor, batch: PagedBatch, first: int, scale: float) -> None:
        """Attention of new tokens whose keys are in their pages, for the sequences from `first` on."""
        from shardwise.model.kernels.attention.paged import paged_attention
        from shardwise.model.kernels.attention.tiles import prompt_tile

        tile = prompt_tile(max(batch.all_counts[first:]), q.shape[-1], q.device)
        where = (batch.table, batch.slots, batch.starts, batch.cu_seqlens, batch.tiles_from(first, tile.rows))
        paged_attention(q, self.keys, self.values, *where, tile, out, scale, self.window)


def _has_kernels(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


class PagedCache(Cache):
    """Pages for all layers of a model, or of a pipeline stage. `batch` is set before each forward pass."""

    batch: PagedBatch

    def __init__(
        self,
        config: ModelConfig,
        layers: int,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        sequences: int = 1,
        kv_heads: int = 0,
        invariant: bool = False,
    ) -> None:
        """`sequences`: the most that run at a time. `kv_heads`: the number on this rank, if it does not hold all. `invariant`: the
        bits of a token's attention do not depend on the batch."""
        heads, width, value_width = page_shape(config)
        self.page_tokens, self.invariant = page_tokens, invariant
        self._places: Tensor | None = None
        self.layers: list[PagedLayerCache] = []
        self.sequences = sequences
        self._scratch: Any = None
        for _ in range(layers):
            shape = (pages, (kv_heads or heads) if config.attention == "grouped" else 1, page_tokens)
            keys = torch.zeros(*shape, width, dtype=dtype, device=device)
            # A latent is both the key and, without the rotary part at its end, the value.
            if config.attention == "latent":
                values = keys[..., :value_width]
            else:
                values = torch.zeros(*shape, value_width, dtype=dtype, device=device)
            self.layers.append(PagedLayerCache(self, keys, values, config.sliding_window))

    def begin(self, batch: PagedBatch) -> None:
        """Set the batch that the next forward pass computes."""
        self.batch, self._places = batch, None

    @property
    def places(self) -> Tensor:
        """Where the new tokens' keys are written; the decode kernel computes that itself."""
        if self._places is None:
            self._places = self.batch.places(self.page_tokens)
        return self._places

    def scratch(self, heads: int) -> Any:
        """The scratch memory of the decode kernel, or of that of latents."""
        if self._scratch is None:
            from shardwise.model.kernels.attention.decode import Scratch
            from shardwise.model.kernels.attention.latent import latent_scratch

            keys, values = self.layers[0].keys, self.layers[0].values
            if _is_view(values, keys):
                self._scratch = latent_scratch(self.sequences, heads, values.shape[-1], values.device)
            else:
                self._scratch = Scratch(self.sequences, heads, keys.shape[1], keys.shape[3], keys.device)
        return self._scratch

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages in all layers."""
        for tensor in self.tensors():
            tensor[targets] = tensor[sources]

    def tensors(self) -> list[Tensor]:
        """The tensors that hold all pages; their first dimension is the page."""
        return [
            tensor
            for layer in self.layers
            for tensor in ((layer.keys,) if _is_view(layer.values, layer.keys) else (layer.keys, layer.values))
        ]


def _is_view(values: Tensor, keys: Tensor) -> bool:
    return values.data_ptr() == keys.data_ptr()


def page_shape(config: ModelConfig) -> tuple[int, int, int]:
    """Key/value heads of a token in one layer, the width of a key, and the width of a value."""
    if config.attention == "latent":
        return 1, config.kv_rank + config.rope_dim, config.kv_rank
    return config.kv_heads, config.key_dim, config.head_dim
