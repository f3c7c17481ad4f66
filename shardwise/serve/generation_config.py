"""What a model's publisher says about generating with it: generation_config.json in the folder of a checkpoint. The server, the
evaluations and `shardwise generate` end an answer at the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.data.tokenizer import Tokenizer

GENERATION = "generation_config.json"


def read_generation(folder: Path) -> dict[str, Any]:
    """The values of the file; empty if there is none, or none that can be read."""
    try:
        values = json.loads((folder / GENERATION).read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def ends_of(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's end token and those of the file, of which chat models have several."""
    ends = read_generation(folder).get("eos_token_id")
    ids = [token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)]
    return frozenset([tokenizer.end, *ids])
