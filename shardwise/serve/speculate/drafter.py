"""Who guesses, as the engine asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from shardwise.run.sections.serve import ServeConfig
from shardwise.schedules.serving import Sequence, Step
from shardwise.serve.request import Sampling
from shardwise.serve.speculate.ngram import NgramDrafter

if TYPE_CHECKING:
    from shardwise.serve.runner import Runner


class Drafter(Protocol):
    """Sets the drafts of sequences. Called in this order for each step."""

    def warm(self, step_tokens: int) -> None:
        """Do now what the first step would wait for."""

    def propose(self, sequences: Iterable[Sequence]) -> None:
        """Before a step is scheduled: set the drafts of those whose last token is known, or as many places to fill."""

    def swap(self, step: Step, host_pages: int) -> None:
        """Move pages between device and host as the step says."""

    def assign(self, slot: int, sampling: Sampling, seed: int) -> None:
        """A slot is given to a sequence."""

    def fill(self, step: Step, changes: Items[tuple[int, int, int]]) -> None:
        """The step is scheduled, with these changes of pages (slot, index, page): fill the places that it verifies."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""


def drafter_of(settings: ServeConfig, draft: Runner | None) -> Drafter | None:
    """As `serve.speculate` says; `draft` is the runner of the small model."""
    if settings.speculate == "ngram":
        return NgramDrafter(settings.ngram_min, settings.ngram_max, settings.draft_tokens)
    if settings.speculate == "draft":
        from shardwise.serve.speculate.draft import DraftModel

        assert draft is not None
        return DraftModel(draft, settings.draft_tokens)
    return None
