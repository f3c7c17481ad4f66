"""Writes a resolved run as TOML (as run folders and checkpoints hold it; reading it returns the same run) and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shardwise.run.config import SECTIONS, Run, all_keys
from shardwise.run.read import type_name


def to_dict(run: Run) -> dict[str, Any]:
    """The run as plain nested sections, ready for JSON."""
    return json.loads(json.dumps(asdict(run)))


def to_toml(run: Run) -> str:
    """The resolved run as a TOML file."""
    return sections_to_toml(to_dict(run))


def sections_to_toml(values: Mapping[str, Any]) -> str:
    """A partial run as TOML: what is left out is for the reader to choose, or for a default."""
    lines = [f"name = {_toml(values['name'])}"]
    for section in (each for each in SECTIONS if each in values):
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in values[section].items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except for the one control character that JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def schema() -> list[dict[str, Any]]:
    """Every key with its type, default and meaning, in order."""
    return [
        {"key": name, "type": type_name(k.type), "default": list(k.default) if isinstance(k.default, tuple) else k.default,
         "meaning": k.meaning}
        for name, k in all_keys().items()
    ]  # fmt: skip
