"""What this trainer's step costs beside a hand-written loop over the same `torch.nn` operations, on the CPU.

Both train the same small Llama on the same batches: embedding, RMSNorm, rotary grouped-query attention, SwiGLU, cross-
entropy, clipping, fused AdamW. The loop below is what one would write by hand, with its rotary tables made once. Steps of
the two alternate in one process; the figure is the median of the ratios of neighbouring steps.

    python benchmarks/step_overhead.py [--steps 40] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.data.batches import Batch
from shardwise.run import run_from_dict
from shardwise.train.step import TrainState

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, BATCH, LENGTH = 4, 256, 8, 4, 704, 2048, 8, 256
ALLOWED = 1.03


class PlainBlock(nn.Module):
    """One Llama layer as a textbook would have it."""

    def __init__(self) -> None:
        super().__init__()
        width = HIDDEN // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.q = nn.Linear(HIDDEN, HEADS * width, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * width, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * width, bias=False)
        self.o = nn.Linear(HEADS * width, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, s, HEADS, -1).transpose(1, 2)
        k = self.k(h).view(b, s, KV_HEADS, -1).transpose(1, 2)
        v = self.v(h).view(b, s, KV_HEADS, -1).transpose(1, 2)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [batch, heads, sequence, width]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class PlainLlama(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        width = HIDDEN // HEADS
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def plain_step() -> Callable[[Batch], float]:
    """The hand-written loop's body."""
    model = PlainLlama()
    nn.init.normal_(model.embed.weight, std=0.02)
    return hand_written(model)


def hand_written(model: nn.Module) -> Callable[[Batch], float]:
    """What a person would write around a model: AdamW, the loss, its gradient, clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(torch.from_numpy(batch.tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def shardwise_step() -> Callable[[Batch], float]:
    """This trainer's step, the one `shardwise train` runs."""
    run = run_from_dict(
        dict(
            model=dict(layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, ffn=FFN, vocab=VOCAB),
            train=dict(seq_len=LENGTH, global_batch=BATCH, device="cpu"),
        )
    )
    train_state = TrainState(run)
    return lambda batch: train_state.train_step(batch).loss.item()


def main() -> int:
    """Alternate the two and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    steps = {"plain PyTorch": plain_step(), "shardwise": shardwise_step()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for n in range(args.steps + 5):
        tokens = rng.integers(0, VOCAB, (BATCH, LENGTH + 1))
        batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), None, None)
        # Which of the two goes first alternates, so that neither always finds the caches warm.
        for name in list(steps)[:: 1 if n % 2 else -1]:
            start = time.perf_counter()
            steps[name](batch)
            if n >= 5:
                seconds[name].append(time.perf_counter() - start)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    if args.json:
        print(json.dumps(dict(milliseconds=medians, ratio=ratio, allowed=ALLOWED)))
    else:
        for name, value in medians.items():
            print(f"{name:<14} {value:8.1f} ms a step (median of {args.steps})")
        print(f"ratio {ratio:.3f} (at most {ALLOWED})")
    return 0 if ratio <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
