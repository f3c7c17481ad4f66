"""Single tokens over cached latents on a GPU, as in DeepSeek-V2 Lite and V3 (latents of 512 and 64 rotary numbers; 16, 128 heads):
microseconds of the kernel in several shapes, and of the one that reads latents anew for every head; terabytes a second of latents.

    python benchmarks/gpu/latent_decode.py [--seconds 40]      # about a minute on one GPU
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from decode_gemms import microseconds

from shardwise.model.kernels.attention.latent import Tile, latent_attention, latent_scratch, tile_of
from shardwise.model.kernels.attention.paged import paged_attention, tiles_of
from shardwise.model.kernels.attention.tiles import prompt_tile
from shardwise.model.paged import PagedBatch, paged_attention_reference

RANK, ROPE, PAGE = 512, 64, 64
CASES = [(16, 1, 2048), (16, 32, 2048), (16, 256, 1024), (128, 1, 2048), (128, 8, 2048), (128, 64, 2048)]
"""Heads, sequences, latents of each."""
SHAPES = [
    Tile(16, 32, 4, 2), Tile(16, 64, 4, 2), Tile(16, 64, 4, 3), Tile(16, 64, 8, 2), Tile(32, 32, 4, 2), Tile(32, 64, 8, 2),
    Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 1),
]  # fmt: skip


def batch_of(sequences: int, kept: int) -> PagedBatch:
    """Sequences of so many latents in pages all over memory, the last of them new."""
    each = -(-kept // PAGE)
    order = torch.randperm(sequences * each, device="cuda", dtype=torch.int32) + 1
    table = torch.cat((torch.zeros(1, each, dtype=torch.int32, device="cuda"), order.view(sequences, each)))
    slots = torch.arange(1, sequences + 1, dtype=torch.int32, device="cuda")
    starts = torch.full((sequences,), kept - 1, dtype=torch.int32, device="cuda")
    begins = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
    return PagedBatch(table, slots, starts, begins, sequences, (), kept, starts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=40.0)
    ends = time.monotonic() + parser.parse_args().seconds
    torch.manual_seed(0)
    for heads, sequences, kept in CASES:
        batch = batch_of(sequences, kept)
        size = sequences * kept * (RANK + ROPE) * 2
        layers = max(2, min(16, int(2e8 // size)))
        pages = len(batch.slots) * -(-kept // PAGE) + 1
        keys = [torch.randn(pages, 1, PAGE, RANK + ROPE, device="cuda").bfloat16() for _ in range(layers)]
        q = torch.randn(sequences, heads, RANK + ROPE, device="cuda").bfloat16()
        scale = (RANK + ROPE) ** -0.5
        wanted = paged_attention_reference(q, keys[0], keys[0][..., :RANK], batch, scale)
        where = (batch.table, batch.slots, batch.starts)
        shape, out = prompt_tile(1, RANK + ROPE, q.device), q.new_empty(sequences, heads, RANK)
        tiles = torch.tensor(tiles_of((1,) * sequences, shape.rows), dtype=torch.int32, device="cuda")

        by_head = [
            partial(paged_attention, q, k, k[..., :RANK], *where, batch.cu_seqlens, tiles, shape, out, scale)
            for k in keys
        ]
        print(f"{heads} heads, {sequences} x {kept}: by head {microseconds(by_head):.1f} us")
        for tile in SHAPES:
            if tile.heads > max(16, heads) or time.monotonic() > ends:
                continue
            try:
                scratch = latent_scratch(sequences, heads, RANK, q.device, tile)
                work = partial(latent_attention, rank=RANK, scratch=scratch, scale=scale, tile=tile)
                calls = [partial(work, q, k, table=where[0], slots=where[1], starts=where[2]) for k in keys]
                off = (calls[0]() - wanted).abs().max().item() / wanted.abs().max().item()
                taken = microseconds(calls)
            except Exception as error:  # a tile may ask for more than the chip has
                print(f"    {tile}: {str(error)[:80]}", flush=True)
                continue
            used = "  (in use)" if tile == tile_of(heads) else ""
            print(f"    {tile}: {taken:8.1f} us {size / taken / 1e6:6.2f} TB/s, off by {off:.4f}{used}", flush=True)


if __name__ == "__main__":
    main()
