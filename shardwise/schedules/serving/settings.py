"""The limits of a scheduler's step, and what to do when pages run out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """Fixed for as long as the scheduler lives."""

    max_sequences: int
    """Sequences that run at once."""
    max_step_tokens: int
    """Tokens computed in one step; no fewer than `max_sequences`, so that all decoding sequences can run."""
    longest: int
    """Most tokens of a sequence, prompt and answer."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """With "swap", sequences are recomputed where the host has too few pages left."""
    window: int = 0
    """Sliding window: the latest positions that a token of the model sees; 0: all. Pages behind it are released."""
    watermark: float = 0.01
    """Share of the pages that stays free when a sequence is admitted beside others, so that those can grow."""

    stages: int = 1
    """Stages of a pipeline. This many steps are in flight at a time, each with a share of the decoding sequences, so that all
    stages have work at once. Sequences must not use lookahead then."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_sequences <= self.max_step_tokens:
            raise ValueError(
                f"{self.max_sequences} sequences at once and {self.max_step_tokens} tokens a step: "
                "there has to be at least 1 sequence, and a token for each"
            )
        if self.preemption not in ("recompute", "swap"):
            raise ValueError(f'preemption is "{self.preemption}", but has to be "recompute" or "swap"')


SHORT_TOKENS, SHORT_KEYS = 256, 2**16
"""Prompts of at most this many new tokens that see at most this many keys, summed over tokens, are replayed as CUDA graphs too: the
single-token kernel reads keys once for each token, which by the measured steps of an H200 (`hardware/serving/`) takes up to here no
longer than the host needs to launch kernels one by one."""

MANY = 512
"""Tokens of the largest step with draft tokens that is captured as a CUDA graph."""


def is_short(tokens: int, keys: int) -> bool:
    """Whether a step with prompts, of this many tokens that see this many keys together, is replayed if a CUDA graph of its size
    exists."""
    return tokens <= SHORT_TOKENS and keys <= SHORT_KEYS


def shared_sizes(sequences: int, drafts: int) -> list[int]:
    """Token counts of the CUDA graphs captured for steps that compute several tokens of a sequence: draft tokens, and short
    prompts. Each takes time to capture, so without draft tokens there are few; and a step of very many tokens keeps the device busy
    for longer than the host needs to launch it."""
    rows = min(sequences * (1 + drafts), MANY)
    short = {size for size in (32, 64, 128, SHORT_TOKENS) if size <= rows}
    return sorted(short | ({*graph_sizes(rows)} - {1} if drafts else set()))


def graph_sizes(most: int) -> list[int]:
    """Batch sizes for which the steps of a GPU are captured as CUDA graphs; others are padded to the next."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 256, 16), *range(256, 1025, 64)]
    return [size for size in sizes if size < most] + [most]
