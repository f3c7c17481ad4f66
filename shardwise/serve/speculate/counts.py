"""How many draft tokens were verified, and how many were accepted, by their position after the last token."""

from __future__ import annotations


class DraftCounts:
    """Counters that only grow."""

    def __init__(self, places: int) -> None:
        self.drafted = [0] * places
        self.accepted = [0] * places

    def add(self, drafted: int, accepted: int) -> None:
        """Count `drafted` verified tokens of a sequence, of which the first `accepted` were right."""
        for place in range(drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted
