"""Argument types shared by several verbs, where a bad value is rejected before anything starts; files that the user named."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.run.problems import Problem, UserError


def at_least(least: float, kind: type[int] | type[float] = int, most: float = math.inf) -> Callable[[str], int | float]:
    """A finite number that is not below `least`, and not above `most`."""

    def number(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value <= most or value == math.inf:  # also NaN
            shown = text if len(text) <= 40 else f"{text[:40]}…"
            word = "whole" if kind is int else "finite"
            span = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f'"{shown}" is not a {word} number of {span}')
        return value

    return number


def new_file(text: str) -> str:
    """The name of a file whose folder exists."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f'"{text}" is not the name of a file')
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f'there is no folder "{path.parent}" to write "{path.name}" to')
    return text


def read_json(path: str, what: str, option: str = "") -> Any:
    """The content of a JSON file; `what` it should be, such as "a load"."""
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        reason = f"cannot be read: {e.strerror}"
    except ValueError as e:
        reason = f"is not JSON: {e}"
    except RecursionError:
        reason = f"is nested too deeply to be {what}"
    raise UserError(Problem(reason, option, path))


def write_file(path: str | Path, content: bytes) -> None:
    """Write a file that the user named. If the disk is full, Python's own error does not name the file."""
    try:
        Path(path).write_bytes(content)
    except OSError as e:
        raise UserError(Problem(f"cannot be written: {e.strerror or e}", where=str(path))) from None
