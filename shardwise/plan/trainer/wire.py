"""Adds up the bytes and messages that a rank sends, collective by collective."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from shardwise.plan.trainer.rank import PlannedRank

Amount = int | Fraction


@dataclass(frozen=True)
class CollectiveBytes:
    """Bytes that a rank sends in a step by one collective of one group, and the number of messages."""

    bytes: Fraction = Fraction(0)
    messages: Fraction = Fraction(0)
    """The mean of a step: a fraction where replicas synchronize less than once a step."""


Groups = dict[tuple[str, str], CollectiveBytes]


@dataclass
class Wire:
    """The bytes and messages that a rank sends, added up."""

    planned: PlannedRank
    sent: Groups
    forward_only: bool = False
    """Whether the passes have no backward pass: those of a frozen network, or of the trained one before its step."""
    frozen: bool = False
    adapted: bool = True
    """Whether adapters, where there are any, are switched on."""
    every: int = 1
    """The collectives that are added happen once in this many steps."""

    def _add(self, group: str, operation: str, size: Amount, messages: Amount) -> None:
        if messages and self.planned.size(group) > 1:
            before = self.sent.get((group, operation), CollectiveBytes())
            share = Fraction(1, self.every)
            self.sent[group, operation] = CollectiveBytes(
                before.bytes + size * share, before.messages + messages * share
            )

    def all_gather(self, group: str, shard: Amount, times: int = 1, messages: int = 1) -> None:
        """Each rank contributes a shard of this many bytes, in this many messages."""
        self._add(group, "all_gather", times * (self.planned.size(group) - 1) * Fraction(shard), times * messages)

    def reduce_scatter(self, group: str, shard: Amount, times: int = 1, messages: int = 1) -> None:
        """Each rank receives a shard of this many bytes of the sum."""
        self._add(group, "reduce_scatter", times * (self.planned.size(group) - 1) * Fraction(shard), times * messages)

    def all_reduce(self, group: str, size: Amount, times: int = 1, messages: int = 1, ranks: int = 0) -> None:
        """This many bytes on every rank are summed over all ranks of the group, or over `ranks` of them."""
        ranks = ranks or self.planned.size(group)
        self._add(group, "all_reduce", times * Fraction(2 * (ranks - 1), ranks) * size, times * messages)

    def all_to_all(self, group: str, size: Amount, times: int = 1, messages: int = 1) -> None:
        """This many bytes on every rank are sent in equal parts to all ranks."""
        ranks = self.planned.size(group)
        self._add(group, "all_to_all", times * Fraction(ranks - 1, ranks) * size, times * messages)

    def send(self, group: str, size: Amount, times: int = 1) -> None:
        """This many bytes are sent to one other rank."""
        self._add(group, "send", Fraction(times) * size, times)

    def moved(self, group: str, size: Amount, messages: int) -> None:
        """An uneven all-to-all, in which this many bytes leave the rank."""
        self._add(group, "all_to_all", Fraction(size), messages)


@dataclass(frozen=True)
class Times:
    """How often the forward and the backward pass of a part run in a step; recomputation is one more forward."""

    forward: int
    backward: int
