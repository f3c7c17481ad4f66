"""The steps that a recipe can name. A rule or a map is a function of one document, which returns the reason for removing it or "";
a shuffle compares documents by keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.data.prepare.contamination import decontaminate
from shardwise.data.prepare.extract import html, language
from shardwise.data.prepare.filters import c4_paragraphs, c4_quality, fineweb_quality, gopher_quality, gopher_repetition
from shardwise.data.prepare.keyed import Exact, Fuzzy, Shuffle, Substring
from shardwise.data.prepare.privacy import privacy
from shardwise.data.prepare.words import Document

Rule = Callable[[Document], str]

RULES: dict[str, Callable[..., str]] = {
    "gopher_repetition": gopher_repetition,
    "gopher_quality": gopher_quality,
    "c4_quality": c4_quality,
    "c4_paragraphs": c4_paragraphs,
    "fineweb_quality": fineweb_quality,
}
MAPS: dict[str, Callable[..., Rule]] = {
    "html": html,
    "language": language,
    "privacy": privacy,
    "decontaminate": decontaminate,
}
"""Functions that return a rule, because it has to load something first."""
SHUFFLES: dict[str, Callable[..., Shuffle]] = {"exact": Exact, "minhash": Fuzzy, "substring": Substring}


@dataclass(frozen=True)
class Step:
    """One step of a recipe, with every setting filled in."""

    kind: str
    settings: dict[str, Any]

    @property
    def shuffles(self) -> bool:
        """Whether it compares documents with each other."""
        return self.kind in SHUFFLES


def settings_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword arguments of a step."""
    found = inspect.signature(function).parameters
    return {name: each for name, each in found.items() if each.kind is each.KEYWORD_ONLY}


def rule_of(step: Step) -> Rule:
    """The function of a step."""
    if step.kind in RULES:
        return partial(RULES[step.kind], **step.settings)
    return MAPS[step.kind](**step.settings)


def shuffle_of(step: Step) -> Shuffle:
    """The comparison of a step."""
    return SHUFFLES[step.kind](**step.settings)
