"""The drafter interface that the engine uses."""

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
    """Sets the drafts of sequences. The methods are called in this order for each step."""

    def warm(self, step_tokens: int) -> None:
        """Do now what the first step would otherwise wait for."""

    def propose(self, sequences: Iterable[Sequence]) -> None:
        """Before a step is scheduled: set drafts, or as many placeholders, for sequences whose last token is known."""

    def swap(self, step: Step, host_pages: int) -> None:
        """Swap pages between device and host as the step says."""

    def assign(self, slot: int, sampling: Sampling, seed: int) -> None:
        """Assign a slot to a sequence."""

    def fill(self, step: Step, changes: Items[tuple[int, int, int]]) -> None:
        """The step is scheduled, with these page table changes (slot, index, page): fill the placeholders that it verifies."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""


def drafter_of(settings: ServeConfig, draft: Runner | None) -> Drafter | None:
    """The drafter that `serve.speculate` names; `draft` is the runner of the draft model."""
    if settings.speculate == "ngram":
        return NgramDrafter(settings.ngram_min, settings.ngram_max, settings.draft_tokens)
    if settings.speculate == "draft":
        from shardwise.serve.speculate.draft import DraftModel

        assert draft is not None
        return DraftModel(draft, settings.draft_tokens)
    return None
