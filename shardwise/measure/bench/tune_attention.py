"""Times paged attention with several tile shapes of its kernels on this GPU, and saves the fastest
(`model/kernels/attention/tiles.py`): decoding of sequences with random lengths, the longest first, as the engine orders them; and
prefill of prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from shardwise.model.gemm.decoding import replayed_seconds
from shardwise.model.kernels.attention.tiles import (
    DECODE,
    MORE_DECODE,
    MORE_PROMPT,
    PROMPT,
    DecodeTile,
    PromptTile,
    decode_name,
    has_tile,
    prompt_name,
    save_tiles,
    sequence_bucket,
)

PAGE = 64
SEQUENCES, LENGTHS = (24, 96, 256), (128, 1920)
"""Sequences of a decode step, one number for each bucket, and the range of their lengths in tokens."""
PROMPTS, TOKENS = (512,) * 4 + (2048,) * 2, 6144
BETTER = 0.99
"""A tile replaces the default one only if its time is below this fraction of the default's."""

Say = Callable[[str], None]
Tile = DecodeTile | PromptTile


class Pages:
    """Keys and values of some sequences, in pages scattered over memory."""

    def __init__(self, kv_heads: int, width: int, lengths: list[int], device: torch.device) -> None:
        each = [-(-length // PAGE) for length in lengths]
        shape = (sum(each) + 1, kv_heads, PAGE, width)
        self.keys, self.values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        order = torch.randperm(sum(each), generator=torch.Generator().manual_seed(0)) + 1
        table = torch.zeros(len(lengths) + 1, max(each), dtype=torch.int32)
        first = 0
        for slot, count in enumerate(each, 1):
            table[slot, :count] = order[first : first + count]
            first += count
        self.table = table.to(device)
        self.slots = torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=device)


def decode_times(
    heads: int, kv_heads: int, width: int, sequences: int, tiles: Iterable[DecodeTile], device: torch.device, pool: Any
) -> dict[Tile, float]:
    """Seconds of a decode step's attention, by each tile that the device supports."""
    from shardwise.model.kernels.attention.decode import Scratch, decode_attention

    draw = random.Random(0)
    lengths = sorted((draw.randint(*LENGTHS) for _ in range(sequences)), reverse=True)
    pages = Pages(kv_heads, width, lengths, device)
    starts = torch.tensor([length - 1 for length in lengths], dtype=torch.int32, device=device)
    qkv = torch.randn(sequences, (heads + 2 * kv_heads) * width, device=device, dtype=torch.bfloat16)
    scratch = Scratch(sequences, heads, kv_heads, width, device)
    where = (None, None, pages.keys, pages.values, pages.table, pages.slots, starts, scratch, heads, width**-0.5)
    return _times({tile: partial(decode_attention, qkv, *where, tile=tile) for tile in tiles}, pool)


def prompt_times(
    heads: int, kv_heads: int, width: int, tiles: Iterable[PromptTile], device: torch.device, pool: Any
) -> dict[Tile, float]:
    """The same for the prefill of prompts."""
    from shardwise.model.kernels.attention.paged import paged_attention, tiles_of

    pages = Pages(kv_heads, width, list(PROMPTS), device)
    counts = torch.tensor([0, *PROMPTS], dtype=torch.int32, device=device)
    begins, starts = counts.cumsum(0, dtype=torch.int32), torch.zeros(len(PROMPTS), dtype=torch.int32, device=device)
    q = torch.randn(TOKENS, heads, width, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    works = {}
    for tile in tiles:
        runs = torch.tensor(tiles_of(PROMPTS, tile.rows), dtype=torch.int32, device=device)
        where = (pages.table, pages.slots, starts, begins, runs)
        works[tile] = partial(paged_attention, q, pages.keys, pages.values, *where, tile, out, width**-0.5)
    return _times(works, pool)


def _times(works: Mapping[Any, Callable[[], Any]], pool: Any) -> dict[Tile, float]:
    found: dict[Tile, float] = {}
    for tile, work in works.items():
        try:
            found[tile] = replayed_seconds([work] * 4, pool) / 4
        except Exception:  # whatever the compiler raises: a tile may need more than the chip has
            torch.cuda.synchronize()
    return found


def tune_attention(
    shapes: Iterable[tuple[int, int, int]], device: torch.device, say: Say = lambda text: None
) -> dict[str, Tile]:
    """Find and save the fastest tiles for layers with these numbers of heads, KV heads, and head width, unless they are saved
    already."""
    chosen: dict[str, Tile] = {}
    pool = torch.cuda.graph_pool_handle()
    for heads, kv_heads, width in shapes:
        cases: list[tuple[str, Tile, dict[Tile, float]]] = []
        for sequences in SEQUENCES:
            if has_tile(decode_name(sequences, width), device):
                continue
            plain = DECODE[sequence_bucket(sequences)]
            times = decode_times(heads, kv_heads, width, sequences, dict.fromkeys((plain, *MORE_DECODE)), device, pool)
            cases.append((decode_name(sequences, width), plain, times))
        if width <= 128 and not has_tile(prompt_name(width), device):
            cases.append(
                (prompt_name(width), PROMPT, prompt_times(heads, kv_heads, width, (PROMPT, *MORE_PROMPT), device, pool))
            )
        for name, usual, times in cases:
            say(f"{name}: " + ", ".join(f"{tile} {seconds * 1e6:.1f} us" for tile, seconds in times.items()))
            best = min(times, key=lambda tile: times[tile])
            chosen[name] = best if times[best] < BETTER * times.get(usual, float("inf")) else usual
    if chosen:
        save_tiles(chosen, device)
    torch.cuda.empty_cache()
    return chosen
