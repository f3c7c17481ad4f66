"""The running sequences, which hold a slot: those in decode and those in prefill, each sorted by order.

The order is that of importance: priority, then arrival. A step is made in this order and the last sequence is preempted first, so
that no sequence is preempted after one of its chunks was scheduled.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from shardwise.schedules.serving.sequence import Sequence, order_of


class Running:
    """Two sorted lists of sequences, and the free slots."""

    def __init__(self, slots: int) -> None:
        self.prefill: list[Sequence] = []
        self.decode: list[Sequence] = []
        self.slots = list(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.prefill) + len(self.decode)

    def start(self, sequence: Sequence) -> None:
        """Give it a slot; its prompt is to be computed."""
        sequence.slot = self.slots.pop()
        sequence.state = "prefill"
        insort(self.prefill, sequence, key=order_of)

    def decodes(self, sequence: Sequence) -> None:
        """Its prompt is computed: move it to decode."""
        self._take_out(sequence)
        sequence.state = "decode"
        insort(self.decode, sequence, key=order_of)

    def stop(self, sequence: Sequence) -> None:
        """Take its slot back."""
        self._take_out(sequence)
        self.slots.append(sequence.slot)
        sequence.slot = -1

    def last(self, decoding: bool) -> Sequence:
        """The last sequence in order: of all while decoding sequences are scheduled, then of those in prefill."""
        if decoding and not (self.prefill and self.prefill[-1].order > self.decode[-1].order):
            return self.decode[-1]
        return self.prefill[-1]

    def _take_out(self, sequence: Sequence) -> None:
        some = self.decode if sequence.state == "decode" else self.prefill
        del some[bisect_left(some, sequence.order, key=order_of)]
