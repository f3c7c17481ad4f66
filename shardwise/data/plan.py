"""The plan of a build, written before any work: the inputs with size and date, and the settings. An interrupted build resumes only
under the same plan. Under another plan the parts would not fit together, so the build is refused and the differences named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.data.chat.files import FILE as TEMPLATE
from shardwise.data.documents import TEXT_PART
from shardwise.data.inputs import Input, unit_bytes
from shardwise.data.shards import DOCUMENTS, LABELS, MARGINS, PROMPTS, ROW_ENDS, ROWS, SKIPPED, TokenSet
from shardwise.data.tokenizer import FILE, MARKER, Tokenizer, facts_of
from shardwise.files import write_atomically
from shardwise.run.problems import Problem, UserError
from shardwise.run.vocabulary import INDEX

PLAN = "plan.json"
WORK = "work"
_VERSION = 1
_MOST_NAMED = 5


def make_plan(
    inputs: Sequence[Input], tokenizer: Tokenizer, field: str, shard_tokens: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Everything that determines the result of a build."""
    return {
        "version": _VERSION,
        "tokenizer": facts_of(tokenizer),
        "field": field,
        "shard_tokens": shard_tokens,
        "cut": {"unit_bytes": unit_bytes(inputs), "text_part": TEXT_PART},
        "inputs": {i.path: {"kind": i.kind, "bytes": i.bytes, "modified": i.modified} for i in inputs},
        **({"chat": more} if more else {}),
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences between two plans, as sentences."""
    changes = []
    for name, flag in (("field", "--field"), ("shard_tokens", "--shard-tokens")):
        if old.get(name) != new[name]:
            changes.append(f"{flag} was {old.get(name)} and is {new[name]}")
    chat, was = new.get("chat", {}), old.get("chat", {})
    for name in (name for name in {**was, **chat} if was.get(name) != chat.get(name)):
        if name == "template" and was and chat:
            changes.append("the chat template is another")
        else:
            flag = {"form": "--kind"}.get(name, f"--{name.replace('_', '-')}")
            changes.append(f"{flag} was {was.get(name, 'not given')} and is {chat.get(name, 'not given')}")
    if old.get("tokenizer") != new["tokenizer"]:
        changes.append(f"the tokenizer was {_describe(old.get('tokenizer'))} and is {_describe(new['tokenizer'])}")
    before, now = old.get("inputs"), new["inputs"]
    if not isinstance(before, dict):
        before = {}
    files = (
        [f"{path} was not there" for path in now if path not in before]
        + [f"{path} is gone" for path in before if path not in now]
        + [f"{path} has changed" for path in now if path in before and before[path] != now[path]]
    )
    if not files and list(before) != list(now):
        files = ["the inputs come in another order"]
    changes += files[:_MOST_NAMED]
    if len(files) > _MOST_NAMED:
        changes.append(f"and {len(files) - _MOST_NAMED} more files differ")
    if not changes and old != new:
        changes.append("it was planned by another version of shardwise")
    return changes


def _describe(tokenizer: Any) -> str:
    if not isinstance(tokenizer, dict):
        return "unknown"
    return f"{tokenizer.get('kind')} ({tokenizer.get('vocab')} tokens, {str(tokenizer.get('digest'))[:8]})"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against a second build."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(Problem(f"cannot be created: {e.strerror}", "--out", str(folder))) from None
    try:
        import fcntl
    except ModuleNotFoundError:  # no such locks on this system
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(Problem("another build is working in this folder", "--out", str(folder))) from None
        except OSError:
            pass  # some network file systems cannot lock; the build itself works there
        yield
    finally:
        os.close(handle)


def prepare(folder: Path, plan: dict[str, Any], restart: bool) -> bool:
    """Prepare a folder for a plan. True: it already holds the finished set of the same plan."""
    ours = (folder / PLAN).exists() or (folder / INDEX).exists()
    if not ours and any(folder.iterdir()):
        message = "holds other files; give a new or empty folder"
        raise UserError(Problem(message, "--out", str(folder)))
    if restart:
        _clear(folder)
    elif ours:
        changes = differences(_read_plan(folder / PLAN), plan)
        if changes:
            state = "a finished set" if (folder / INDEX).exists() else "a build"
            message = (
                f"holds {state} of another plan ({'; '.join(changes)}); use --restart to replace it, or another --out"
            )
            raise UserError(Problem(message, "--out", str(folder)))
        if (folder / INDEX).exists():
            TokenSet.open(folder)
            return True
    (folder / WORK).mkdir(exist_ok=True)
    write_atomically(folder / PLAN, json.dumps(plan, indent=1, ensure_ascii=False).encode("utf-8"))
    return False


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise UserError(Problem(f"cannot be read ({e}); use --restart to build again", where=str(path))) from None
    return plan if isinstance(plan, dict) else {}


def _clear(folder: Path) -> None:
    """Remove only the files that a build makes; the index first, so that no half-removed set looks complete."""
    names = [INDEX, DOCUMENTS, FILE, MARKER, TEMPLATE, PROMPTS, LABELS, MARGINS, ROWS, ROW_ENDS, SKIPPED]
    names += [p.name for p in sorted([*folder.glob("tokens-*.bin"), *folder.glob("mask-tokens-*.bin")])]
    names += [p.name for p in sorted(folder.glob("*.tmp"))]
    for name in names:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / WORK, ignore_errors=True)
    (folder / PLAN).unlink(missing_ok=True)
