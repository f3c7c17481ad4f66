"""The workbench as a file that opens from disk, without a server. It contains the plans of the run and of its neighbourhood: the
changes that would make it faster, the best layouts, and every control changed by itself."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

from shardwise.run import UserError
from shardwise.workbench.answer import answer
from shardwise.workbench.changes import faster_changes, memory_error, ranking
from shardwise.workbench.controls import FIRST, SLIDERS, choices, offered, value_at
from shardwise.workbench.page import workbench_page
from shardwise.workbench.question import Base, Keys

MOST_BYTES = 720 * 2**10
"""The size limit of all plans together, compressed; with the rest the page stays below a megabyte."""
FAR = 8
"""A slider is moved by at most this factor, to either side."""
LEFT_OUT = ("model.preset", "cluster.chip", "objective.kind", "adapter.kind")
"""Controls that would make it another run."""


def export_page(base: Base, told: Callable[[str], None]) -> str:
    """The exported page."""
    first = answer(base, {}).whole()
    changes = faster_changes(base, {})
    told("searching for the best layouts")
    ranked = _without_mistakes(lambda: ranking(base, {})) or {"problems": []}
    pool = _Pool()
    pool.add({}, first)
    wanted = [each["keys"] for each in (*changes, *ranked.get("rows", []))]
    for keys in [*wanted, *_turned(first["plan"]["run"])]:
        asked = {key: value for key, value in keys.items() if base.given.get(key) != value}
        if pool.has(asked):
            continue
        told(f"planning {', '.join(f'{key} = {value}' for key, value in asked.items())}")
        content = _without_mistakes(lambda asked=asked: answer(base, asked).whole())  # type: ignore[misc]
        if content is not None and not pool.add(asked, content):
            break
    more = {"answers": pool.packed(), "changes": changes, "ranking": ranked, "memory_error": memory_error()}
    return workbench_page(base, json.dumps(first).encode(), "", more=more)


def _without_mistakes(made: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return made()
    except UserError:
        return None


def _turned(run: dict[str, Any]) -> Iterator[Keys]:
    """Every control at the left changed by itself, nearest values first."""
    keys = {key.name: key for key in offered()}
    found: list[tuple[float, str, str]] = []
    for name in (name for names in FIRST.values() for name in names if name not in LEFT_OUT):
        now = value_at(run, name)
        if name in SLIDERS:
            steps = [(max(v, float(now)) / max(1.0, min(v, float(now))), v) for v in SLIDERS[name] if str(v) != now]
            found += [(far, name, str(value)) for far, value in steps if far <= FAR]
        elif keys[name].type is bool:
            found.append((1.0, name, "false" if now == "true" else "true"))
        else:
            found += [(1.0, name, value) for value in choices(keys[name]) if value != now]
    for _, name, value in sorted(found, key=lambda one: one[0]):
        yield {name: value}


class _Pool:
    """Answers whose equal parts are stored once, since most changes leave most parts unchanged."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._answers: dict[str, Any] = {}
        self._bytes = 0

    def has(self, changes: Keys) -> bool:
        """Whether a question already has an answer."""
        return question_name(changes) in self._answers

    def add(self, changes: Keys, content: dict[str, Any]) -> bool:
        """Add an answer; returns whether there was room for it."""
        before = len(self._texts)
        packed = {name: self._place(part) for name, part in content.items()}
        new = list(self._texts)[before:]
        self._bytes += len(gzip.compress("".join(new).encode())) * 4 // 3
        if self._bytes > MOST_BYTES:
            return False
        self._answers[question_name(changes)] = packed
        return True

    def _place(self, part: Any) -> Any:
        if isinstance(part, dict) and set(part) & {"remark", "memory", "model", "run"}:
            return {name: self._place(inner) for name, inner in part.items()}
        text = json.dumps(part, separators=(",", ":"))
        return self._texts.setdefault(text, len(self._texts))

    def packed(self) -> str:
        """All answers, compressed, for the page to unpack."""
        content = {"texts": list(self._texts), "answers": self._answers}
        return b64encode(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)).decode()


def question_name(changes: Keys) -> str:
    """The name of a question in an exported page."""
    return json.dumps(sorted(map(list, changes.items())), separators=(",", ":"))
