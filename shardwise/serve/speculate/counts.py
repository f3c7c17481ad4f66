"""How many guesses were verified, and how many were right, by their place behind the last token."""

from __future__ import annotations


class DraftCounts:
    """Counters that only grow."""

    def __init__(self, places: int) -> None:
        self.drafted = [0] * places
        self.accepted = [0] * places

    def add(self, drafted: int, accepted: int) -> None:
        """So many guesses of a sequence were verified, and the first of them were right."""
        for place in range(drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted
