"""What bounds a step of the scheduler, and what to do when pages run out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """Given once, for as long as the scheduler lives."""

    max_sequences: int
    """Sequences that run at once."""
    max_step_tokens: int
    """Tokens computed in one step; no fewer than `max_sequences`, so that all that decode can."""
    longest: int
    """Tokens of a sequence, prompt and answer."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """Swapping recomputes where the host has too few pages left."""
    window: int = 0
    """The latest positions that a token of the model sees; 0: all. Pages behind it are given back."""
    watermark: float = 0.01
    """Share of the pages that is left free when a sequence is admitted beside others, for those to grow into."""

    stages: int = 1
    """Stages of a pipeline. So many steps are under way at a time, each with a share of the sequences that decode: a stage has
    work while the others have theirs. Sequences must not look ahead then."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_sequences <= self.max_step_tokens:
            raise ValueError(
                f"{self.max_sequences} sequences at once and {self.max_step_tokens} tokens a step: "
                "there has to be at least 1 sequence, and a token for each"
            )
        if self.preemption not in ("recompute", "swap"):
            raise ValueError(f'preemption is "{self.preemption}", but has to be "recompute" or "swap"')


SHORT_TOKENS, SHORT_KEYS = 256, 2**16
"""Prompts of so many new tokens that see so many keys, each token counted, are replayed too: the kernel of single tokens reads keys
once for each token, which by the measured steps of an H200 (`hardware/serving/`) takes up to here no longer than the host needs to
launch kernels one by one."""

MANY = 512
"""Tokens of the largest step with guesses that is recorded."""


def is_short(tokens: int, keys: int) -> bool:
    """Whether a step with prompts, of so many tokens that see so many keys together, is replayed if one of its size is recorded."""
    return tokens <= SHORT_TOKENS and keys <= SHORT_KEYS


def shared_sizes(sequences: int, drafts: int) -> list[int]:
    """Tokens for which steps are recorded that compute several of a sequence: guesses, and short prompts. Each takes time to
    record, so where there are no guesses they are few; and a step of very many tokens keeps the device busy for longer than the
    host needs to launch it."""
    rows = min(sequences * (1 + drafts), MANY)
    short = {size for size in (32, 64, 128, SHORT_TOKENS) if size <= rows}
    return sorted(short | ({*graph_sizes(rows)} - {1} if drafts else set()))


def graph_sizes(most: int) -> list[int]:
    """Batch sizes for which the steps of a GPU are recorded; others are padded to the next."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 256, 16), *range(256, 1025, 64)]
    return [size for size in sizes if size < most] + [most]
