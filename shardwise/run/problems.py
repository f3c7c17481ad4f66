"""A user's mistake is a `Problem`: where it is, which key, and a sentence that says what would be right.

Everything that checks input collects problems and raises them together as one `UserError`, so that a user fixes a run
once and not five times. The command line prints them and exits with code 2; it never shows a traceback for them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike, fsencode, fspath
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """One mistake: `where` is a file or "command line", `key` a config key or argument ("" when there is none)."""

    message: str
    key: str = ""
    where: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class UserError(Exception):
    """Raised with every problem found. `str()` is the text shown to the user."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = [p if isinstance(p, Problem) else Problem(p) for p in problems]
        super().__init__("\n".join(str(p) for p in self.problems))


def unreadable(error: OSError | ValueError, key: str = "", where: object = "") -> UserError:
    """The error of a file that cannot be read, or is not what it should be."""
    if isinstance(error, UnicodeDecodeError):
        reason = "it is not UTF-8"
    else:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return UserError(Problem(f"cannot be read: {reason}", key, str(where)))


def as_path(given: object, key: str = "") -> Path:
    """The path of a file or folder that a program gives. No file has some names, which the system refuses before it looks."""
    if not isinstance(given, str | PathLike) or not isinstance(name := fspath(given), str):
        raise UserError(Problem(f"{given!r} is not the path of a file or folder", key))
    reason = "it has a NUL byte" if "\0" in name else ""
    try:
        fsencode(name)
    except UnicodeEncodeError:
        reason = "it is not Unicode text"
    if reason:
        raise UserError(Problem(f"{name!a} cannot be the name of a file: {reason}", key))
    return Path(name)


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence ending for a misspelt name: '; did you mean "tensor"?' or ''."""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def counted(number: int, noun: str) -> str:
    """A number with its noun in singular or plural: "1 rank", "16,384 ranks"."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    return f"{number:,} {noun}"


def install(extra: str) -> str:
    """How to install an extra. There is no release on a package index yet."""
    return f"pip install '.[{extra}]' in a checkout of shardwise"


EXTRA_OF = {
    "torch": "train", "safetensors": "train", "tokenizers": "train", "pyarrow": "parquet", "msgspec": "trace", "isal": "trace",
    "starlette": "workbench", "uvicorn": "workbench", "httptools": "workbench",
    "uvloop": "serve", "llguidance": "serve", "jinja2": "chat",
    "tensorboard": "tensorboard", "wandb": "wandb",
}  # fmt: skip
"""The extra that installs a package."""
