"""Finds the chat templates among a tokenizer's files. They are read as text: rendering them needs Jinja, copying them does not."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.run.problems import Problem, UserError, nearest, unreadable

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
"""A folder beside that file with templates for other purposes, each named by its file."""
DEFAULT = "default"


def templates_in(folder: Path) -> dict[str, tuple[str, str]]:
    """The templates of a folder by name, each with its file: separate files, or the `chat_template` of a JSON file, which is one
    text or a list of named ones."""
    found: dict[str, tuple[str, str]] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        for key, source in _from_json(folder / name).items():
            found.setdefault(key, (source, str(folder / name)))
    for path in sorted((folder / FOLDER).glob("*.jinja")):
        found[path.stem] = read_text(path), str(path)
    if (folder / FILE).is_file():
        found[DEFAULT] = read_text(folder / FILE), str(folder / FILE)
    return found


def choose_template(folder: Path, name: str = "") -> tuple[str, str] | None:
    """One template of a folder, with its file: the one called `name`; without a name the default, else the first."""
    found = templates_in(folder)
    if name and name not in found:
        there = f"; there are {', '.join(sorted(found))}" if found else ", nor any other"
        raise UserError(Problem(f'holds no chat template "{name}"{nearest(name, found) or there}', where=str(folder)))
    return found.get(name or DEFAULT, next(iter(found.values()), None))


def read_text(path: Path) -> str:
    """The text of a template's file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise unreadable(e, where=path) from None
    except UnicodeDecodeError:
        raise UserError(Problem("is not UTF-8", where=str(path))) from None


def _from_json(path: Path) -> dict[str, str]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    found = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(found, str):
        return {DEFAULT: found}
    named = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    texts = {each.get("name"): each.get("template") for each in named}
    return {name: text for name, text in texts.items() if isinstance(name, str) and isinstance(text, str)}
