"""The messages of one rank, as a table: whose traffic each was, which collective, how many bytes, when it was under way.

Distinct descriptions are few, so each is kept once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import read_label
from shardwise.trace.reading.events import Integers, Profile
from shardwise.trace.sending.axes import UNKNOWN
from shardwise.trace.spans.activity import Spans, spans_of


class Described(NamedTuple):
    """What is known of a message."""

    axis: str
    collective: str
    group: str
    """Name of the process group; "" when the profile names none."""
    size: int
    """Ranks in it, 0 when not known."""
    bytes: float
    payload: float
    sized: bool


@dataclass(frozen=True)
class Sent:
    """Messages by start. Times are those of the profile."""

    start: Integers
    end: Integers
    described: tuple[Described, ...]
    """The distinct descriptions."""
    what: Integers
    """Each message's description."""
    first: NDArray[np.bool_]
    """False for a further kernel of a message that has several, so that bytes are counted once."""
    sequence: Integers
    """Number within the group, -1 when not said."""
    source: Integers
    destination: Integers
    row: Integers
    """Row of the activity that carried it."""
    call: Integers
    """Event on the host that asked for it, -1 when not known."""
    carrier: Integers
    """Event that carried it: a kernel, or a span of a backend's thread; -1 when not known."""
    blocking: NDArray[np.bool_]
    """On a host-only profile, whether the thread that asked for it waited until it was done."""

    def __len__(self) -> int:
        return len(self.start)

    def sorted_by(self, order: Integers) -> Sent:
        """The messages in another order."""
        return Sent(
            self.start[order], self.end[order], self.described, self.what[order], self.first[order], self.sequence[order],
            self.source[order], self.destination[order], self.row[order], self.call[order], self.carrier[order],
            self.blocking[order],
        )  # fmt: skip

    def column(self, of: Callable[[Described], float]) -> NDArray[np.float64]:
        """A number of each message's description."""
        return np.array([of(d) for d in self.described], np.float64)[self.what] if len(self) else np.zeros(0)

    def those(self, of: Callable[[Described], bool]) -> NDArray[np.bool_]:
        """Which messages have such a description."""
        return np.array([of(d) for d in self.described], np.bool_)[self.what] if len(self) else np.zeros(0, np.bool_)


def label_spans(profile: Profile, kind: str) -> Spans:
    """Labels of one kind on the host's threads."""
    events = profile.events
    wanted = np.array([(found := read_label(n)) is not None and found.kind == kind for n in events.names] or [False])
    return spans_of(events, events.named(wanted) & events.of_kind("cpu_op", "annotation"))


def axes_of(sent: Sent) -> list[tuple[str, str]]:
    """Axes and collectives there are, in the order of the ledger's words, what is not known last."""
    pairs = {(d.axis, d.collective) for d in sent.described}
    return sorted(pairs, key=lambda pair: (pair[0] == UNKNOWN, pair))
