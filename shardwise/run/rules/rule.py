"""The record of a rule; `check.py` has most rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Broken(NamedTuple):
    """A broken rule: the key a user would most likely change, the other keys it involves, and the reason."""

    key: str
    others: tuple[str, ...]
    reason: str


class Rule(NamedTuple):
    """A rule, and whether it is broken: a truth value, or an array of them. The reason is only built on demand."""

    broken: Any
    key: str
    others: tuple[str, ...]
    reason: Callable[[], str]
