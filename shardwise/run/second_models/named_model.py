"""The sizes of a second model that a key names: a checkpoint, a run folder, or a preset. No torch."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

from shardwise.run.config import ModelConfig
from shardwise.run.derive import derive_model
from shardwise.run.presets import PRESETS
from shardwise.run.problems import Problem, UserError, nearest

RUN_FILE = "run.toml"


def named_model(name: str, key: str, seq_len: int) -> ModelConfig:
    """The model that `key` names. Raises `UserError` if its sizes cannot be known."""
    if name in PRESETS:
        return derive_model(ModelConfig(**PRESETS[name]), seq_len)
    file = _run_file(Path(name))
    if file is None:
        known = nearest(name, PRESETS) if "/" not in name else ""
        converts = (
            "; `shardwise convert from-hf` makes a checkpoint of it" if (Path(name) / "config.json").is_file() else ""
        )
        raise UserError(Problem(f'"{name}" is no checkpoint, run folder or preset{converts or known}', key))
    try:
        section = tomllib.loads(file.read_text(encoding="utf-8")).get("model", {})
        given = {each.name for each in fields(ModelConfig)} & set(section)
        return derive_model(ModelConfig(**{word: section[word] for word in given}), seq_len)
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        raise UserError(Problem(f"{file} cannot be read: {e}", key)) from None


def _run_file(path: Path) -> Path | None:
    """The `run.toml` of a checkpoint, or of the newest checkpoint of a run folder."""
    found = sorted((path / "checkpoints").glob(f"step-*/{RUN_FILE}"))
    return next((file for file in (path / RUN_FILE, *reversed(found)) if file.is_file()), None)
