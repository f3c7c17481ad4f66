"""Writes the list of one rank: each call adds an action for the next microbatch of its kind and stage.

The split-backward schedules are stated as "so many of this, then so many of that"; this keeps count, so that a schedule
reads as in its paper, and microbatches come in the same order in every kind.
"""

from __future__ import annotations

from collections import defaultdict, deque

from shardwise.schedules.actions import Action


class RankList:
    """The actions of one rank, and what has been done on it so far."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.forwards: defaultdict[int, int] = defaultdict(int)
        self.backwards: defaultdict[int, int] = defaultdict(int)
        self._weights_due: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        """The next microbatch of a stage goes forward."""
        self.actions.append(Action("F", stage, self.forwards[stage]))
        self.forwards[stage] += 1

    def backward(self, stage: int) -> None:
        """… goes back in one piece."""
        self.actions.append(Action("B", stage, self.backwards[stage]))
        self.backwards[stage] += 1

    def backward_input(self, stage: int) -> None:
        """… goes back for its input; the backward for the weights is now due."""
        microbatch = self.backwards[stage]
        self.actions.append(Action("I", stage, microbatch))
        self._weights_due.append(Action("W", stage, microbatch))
        self.backwards[stage] += 1

    def backward_weight(self) -> None:
        """The backward for the weights that has been due the longest, of whichever stage."""
        self.actions.append(self._weights_due.popleft())

    def backward_weights(self) -> None:
        """All that are due."""
        self.actions.extend(self._weights_due)
        self._weights_due.clear()
