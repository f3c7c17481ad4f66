"""The tile shapes of the paged attention kernels: how much a program takes at a time, its warps, and its pipeline stages. Which is
fastest depends on the chip, so `shardwise bench --serve` times some and stores the best for this machine.
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
    """The decode kernel's tile: keys at a time."""

    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class PromptTile:
    """The prefill kernel's tile: new tokens, and keys at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


DECODE = {"few": DecodeTile(64, 4, 3), "some": DecodeTile(64, 4, 3), "many": DecodeTile(128, 4, 2)}
"""By the number of sequences, the fastest on an H200 (`benchmarks/gpu/attention_tiles.py`)."""
PROMPT = PromptTile(64, 64, 4, 3)
"""The same for prefill, for heads of up to 128 elements."""
MORE_DECODE = (DecodeTile(64, 4, 2), DecodeTile(64, 4, 3), DecodeTile(64, 2, 3), DecodeTile(128, 4, 2))
MORE_PROMPT = (PromptTile(128, 64, 8, 3), PromptTile(64, 32, 4, 4))
"""Other tiles to try."""


def sequence_bucket(sequences: int) -> str:
    """The name of the bucket for this many sequences."""
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
    """Use these tiles from now on, in the next process too."""
    content = _kept(device) | {name: list(astuple(tile)) for name, tile in found.items()}
    with contextlib.suppress(OSError):
        _path(device).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(device), (json.dumps(content, indent=1) + "\n").encode())
    _kept.cache_clear()


def has_tile(name: str, device: torch.device) -> bool:
    """Whether a tile is stored for this machine."""
    return name in _kept(device)


def decode_name(sequences: int, width: int) -> str:
    """The name under which the decode tile is stored."""
    return f"decode {sequence_bucket(sequences)} {width}"


def prompt_name(width: int) -> str:
    """The name under which the prefill tile is stored."""
    return f"prompt {width}"


def decode_tile(sequences: int, width: int, device: torch.device) -> DecodeTile:
    """The tile for one new token of each of `sequences` sequences, with heads of this width."""
    kept = _sizes(_kept(device).get(decode_name(sequences, width)), 3)
    return DecodeTile(*kept) if kept else DECODE[sequence_bucket(sequences)]


def prompt_tile(longest: int, width: int, device: torch.device) -> PromptTile:
    """The tile for prefill, where no sequence has more than `longest` new tokens."""
    short = longest <= 16
    if width > 128:
        return PromptTile(16 if short or width > 256 else 64, 32, 8, 2)
    if short:
        return replace(PROMPT, rows=16)
    kept = _sizes(_kept(device).get(prompt_name(width)), 4)
    return PromptTile(*kept) if kept else PROMPT


def _sizes(kept: object, count: int) -> Sequence[int]:
    """The sizes that a file holds, if they are valid."""
    return (
        kept
        if isinstance(kept, list) and len(kept) == count and all(isinstance(n, int) and n > 0 for n in kept)
        else ()
    )
