"""Questions of the page: a run, given as the keys of its file and the keys that were changed on the page.

The answer is that of `shardwise plan RUN --section.key=value …`, because the same reader reads the keys.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.hardware.chips import unknown_chip
from shardwise.run import PRESETS, PlannedRun, Problem, UserError, read_planned
from shardwise.run.config import SECTIONS, all_keys
from shardwise.run.problems import nearest

MOST_TEXT = 2000
"""The longest value, in characters."""
START = {
    "name": "workbench",
    "model.preset": "llama3-70b",
    "cluster.chip": "h100",
    "cluster.nodes": "64",
    "layout.shard": "16",
    "layout.tensor": "8",
    "layout.pipeline": "4",
    "layout.schedule": "interleaved",
    "layout.chunks": "5",
    "layout.zero": "1",
    "train.seq_len": "8192",
    "train.global_batch": "512",
    "train.microbatch": "1",
    "train.dtype": "bfloat16",
}
"""The run of a workbench that was started without one: that of examples/llama3-70b-h100.toml."""

FILES = ("cluster.profile", "data.sets", "data.validation")
"""Keys that name files which a plan reads. Users of the page may plan, but not look at other files."""

HALF, NO_TEXT = re.compile("[\ud800-\udfff]"), "has half of a character (a lone surrogate), which no file can hold"
"""What JSON and a command line can hold and UTF-8 cannot."""

Keys = dict[str, str]
"""Full keys and their values, as on a command line."""


@dataclass(frozen=True)
class Base:
    """The run that the page began with."""

    given: Keys

    def overrides(self, changes: Mapping[str, str]) -> list[str]:
        """All keys as overrides. A changed preset removes the given keys of the network."""
        kept = {
            name: value
            for name, value in self.given.items()
            if not ("model.preset" in changes and name.startswith("model."))
        }
        return [f"{name}={value}" for name, value in {**kept, **changes}.items()]

    def planned(self, changes: Mapping[str, str]) -> PlannedRun:
        """The run with these changes; raises every mistake in it."""
        return read_planned(None, self.overrides(changes), (unknown_chip,))

    def free(self, changes: Mapping[str, str]) -> PlannedRun:
        """The same run without a layout, which is to be searched for."""
        keys = [each for each in self.overrides(changes) if not each.startswith("layout.")]
        return read_planned(None, [*keys, "layout=auto"], (unknown_chip,))


def base_of(path: str | None, overrides: list[str]) -> Base:
    """The run of a file or of keys; without either, an example run."""
    given: Keys = {} if path or overrides else dict(START)
    if path:
        read_planned(path, overrides, (unknown_chip,))  # reports mistakes with the file's name
        given = _keys_of_file(Path(path))
    for item in overrides:
        name, _, value = item.partition("=")
        if name == "layout":
            given = {key: old for key, old in given.items() if not key.startswith("layout.")}
        given["layout.auto" if name == "layout" else name] = "true" if name == "layout" else value
    if broken := [name for name, value in given.items() if HALF.search(value)]:
        raise UserError(*(Problem(NO_TEXT, name) for name in broken))
    return Base(given)


def _keys_of_file(path: Path) -> Keys:
    given = {"name": path.stem}
    for name, content in tomllib.loads(path.read_bytes().decode("utf-8-sig")).items():
        if isinstance(content, dict):
            given |= {f"{name}.{key}": text_of(value) for key, value in content.items()}
        elif name in SECTIONS:  # only `layout = "auto"` is legal here
            given["layout.auto"] = "true"
        else:
            given[name] = text_of(content)
    chip = given.get("cluster.chip", "")
    if chip.endswith(".toml") and (path.parent / chip).is_file():
        given["cluster.chip"] = str((path.parent / chip).resolve())
    return given


def text_of(value: Any) -> str:
    """A value as on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def changes_of(content: Any) -> Keys:
    """The changed keys of a request's body; raises every mistake in it."""
    changes = content.get("changes", {}) if isinstance(content, dict) else None
    if not isinstance(changes, dict):
        raise UserError('a question is {"changes": {"section.key": "value", …}}')
    known, problems, found = all_keys(), [], {}
    for name, value in changes.items():
        if name not in known:
            problems.append(Problem("there is no such key", name[:100]))
        elif isinstance(value, list | dict) or value is None or len(text_of(value)) > MOST_TEXT:
            problems.append(Problem(f"is not a text of up to {MOST_TEXT} characters, a number, true or false", name))
        elif HALF.search(text_of(value)):
            problems.append(Problem(NO_TEXT, name))
        elif name in FILES or name.startswith("serve.") or _is_file(name, text_of(value)):
            known_one = nearest(text_of(value), PRESETS) if name == "objective.teacher" else ""
            problems.append(Problem(f"cannot be chosen on the page; give it in the run{known_one}", name))
        else:
            found[name] = text_of(value)
    if problems:
        raise UserError(*problems)
    return found


def problems_of(error: UserError) -> dict[str, Any]:
    """The mistakes in a question, by key."""
    return {"problems": [{"key": each.key, "message": each.message} for each in error.problems]}


def _is_file(name: str, value: str) -> bool:
    """Whether the value of a key that also takes names from a list is a file: a chip of one's own, or a teacher's checkpoint."""
    if name == "objective.teacher":
        return value not in ("", *PRESETS)
    return name == "cluster.chip" and value.strip().lower().endswith(".toml")
