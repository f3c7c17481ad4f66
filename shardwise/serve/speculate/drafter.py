"""What an engine asks of a drafter, and how many of its drafts were accepted."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from shardwise.schedules.serving import Sequence, Step
from shardwise.serve.request import Sampling


class DraftCounts:
    """How many draft tokens were verified, and how many were accepted, by their position after the last token."""

    def __init__(self, places: int) -> None:
        self.drafted = [0] * places
        self.accepted = [0] * places

    def add(self, drafted: int, accepted: int) -> None:
        """Count `drafted` verified tokens of a sequence, of which the first `accepted` were right."""
        for place in range(drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted


class Drafter:
    """Sets the drafts of sequences. The methods are called in this order for each step; most may be left to do nothing."""

    def warm(self, step_tokens: int, host_pages: int) -> None:
        """Do now what the first step would otherwise wait for."""

    def propose(self, sequences: Iterable[Sequence]) -> None:
        """Before a step is scheduled: set drafts, or as many placeholders, for sequences whose last token is known."""
        raise NotImplementedError

    def swap(self, step: Step, host_pages: int) -> None:
        """Swap pages between device and host as the step says."""

    def assign(self, slot: int, sampling: Sampling, seed: int) -> None:
        """Assign a slot to a sequence."""

    def fill(self, step: Step, changes: Items[tuple[int, int, int]]) -> None:
        """The step is scheduled, with these page table changes (slot, index, page): fill the placeholders that it verifies."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        raise NotImplementedError
