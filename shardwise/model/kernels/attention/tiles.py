"""The shapes of attention's kernels over pages: what a program takes at a time, its warps, and how many loads are under way. Which
is fastest depends on the chip, so `shardwise bench --serve` times some and keeps the best for this machine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from shardwise.files import cache_folder, write_atomically


@dataclass(frozen=True)
class DecodeTile:
    """Of the kernel of single tokens: keys at a time."""

    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class PromptTile:
    """Of the kernel of prompts: new tokens, and keys at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


DECODE = {"few": DecodeTile(64, 4, 3), "some": DecodeTile(64, 4, 3), "many": DecodeTile(128, 4, 2)}
"""By how many sequences there are, the fastest on an H200 (`benchmarks/gpu/attention_tiles.py`)."""
PROMPT = PromptTile(64, 64, 4, 3)
"""For heads of up to 128 numbers, likewise."""
MORE_DECODE = (
    DecodeTile(64, 4, 2),
    DecodeTile(64, 4, 3),
    DecodeTile(64, 2, 3),
    DecodeTile(128, 4, 2),
)
MORE_PROMPT = (PromptTile(128, 64, 8, 3), PromptTile(64, 32, 4, 4))
"""Others that are tried."""


def sequence_bucket(sequences: int) -> str:
    """The word for so many sequences."""
    return "few" if sequences <= 32 else "some" if sequences <= 128 else "many"


@cache
def _path(device: torch.device) -> Path:
    return cache_folder("products") / f"attention-{torch.cuda.get_device_name(device).replace(' ', '-')}.json"


@cache
def _kept(device: torch.device) -> dict[str, list[int]]:
    if device.type != "cuda":
        return {}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = json.loads(_path(device).read_bytes())
        return {name: sizes for name, sizes in found.items() if isinstance(sizes, list)}
    return {}


def save_tiles(found: dict[str, DecodeTile | PromptTile], device: torch.device) -> None:
    """Take these from here on, in the next process too."""
    content = _kept(device) | {name: list(astuple(tile)) for name, tile in found.items()}
    with contextlib.suppress(OSError):
        _path(device).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(device), (json.dumps(content, indent=1) + "\n").encode())
    _kept.cache_clear()


def has_tile(name: str, device: torch.device) -> bool:
    """Whether there is a shape for this machine."""
    return name in _kept(device)


def decode_name(sequences: int, width: int) -> str:
    """By which the tile of single tokens is kept."""
    return f"decode {sequence_bucket(sequences)} {width}"


def prompt_name(width: int) -> str:
    """By which that of prompts is."""
    return f"prompt {width}"


def decode_tile(sequences: int, width: int, device: torch.device) -> DecodeTile:
    """For one new token of each of so many sequences, with heads of this width."""
    kept = _sizes(_kept(device).get(decode_name(sequences, width)), 3)
    return DecodeTile(*kept) if kept else DECODE[sequence_bucket(sequences)]


def prompt_tile(longest: int, width: int, device: torch.device) -> PromptTile:
    """For new tokens of which no sequence has more than `longest`."""
    short = longest <= 16
    if width > 128:
        return PromptTile(16 if short or width > 256 else 64, 32, 8, 2)
    if short:
        return replace(PROMPT, rows=16)
    kept = _sizes(_kept(device).get(prompt_name(width)), 4)
    return PromptTile(*kept) if kept else PROMPT


def _sizes(kept: object, count: int) -> Sequence[int]:
    """What a file says, where it is what it should be."""
    return (
        kept
        if isinstance(kept, list) and len(kept) == count and all(isinstance(n, int) and n > 0 for n in kept)
        else ()
    )
