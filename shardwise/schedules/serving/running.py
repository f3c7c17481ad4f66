"""Who runs: sequences that hold a slot, those that decode apart from those whose prompt is not computed yet, each by order.

The order is that of importance: priority, then arrival. A step is made in this order and whoever comes last is preempted first, so
that nobody is preempted after a chunk of it was scheduled.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from shardwise.schedules.serving.sequence import Sequence, order_of


class Running:
    """Two sorted lists of sequences, and the slots that are free."""

    def __init__(self, slots: int) -> None:
        self.prefill: list[Sequence] = []
        self.decode: list[Sequence] = []
        self.slots = list(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.prefill) + len(self.decode)

    def start(self, sequence: Sequence) -> None:
        """It gets a slot, and its prompt is to be computed."""
        sequence.slot = self.slots.pop()
        sequence.state = "prefill"
        insort(self.prefill, sequence, key=order_of)

    def decodes(self, sequence: Sequence) -> None:
        """Its prompt is computed."""
        self._take_out(sequence)
        sequence.state = "decode"
        insort(self.decode, sequence, key=order_of)

    def stop(self, sequence: Sequence) -> None:
        """It gives up its slot."""
        self._take_out(sequence)
        self.slots.append(sequence.slot)
        sequence.slot = -1

    def last(self, decoding: bool) -> Sequence:
        """Who comes last: of all while decoding sequences are scheduled, then of those that have their prompt before them."""
        if decoding and not (self.prefill and self.prefill[-1].order > self.decode[-1].order):
            return self.decode[-1]
        return self.prefill[-1]

    def _take_out(self, sequence: Sequence) -> None:
        some = self.decode if sequence.state == "decode" else self.prefill
        del some[bisect_left(some, sequence.order, key=order_of)]
