"""The order of waiting sequences: by priority, then by how little their user has been served, then by arrival; and of running ones.

Service is counted in tokens, a generated one twice a prompt's, and the user with the least service goes first: the virtual token
counter of Sheng et al. 2024 (Fairness in Serving Large Language Models). A user who comes back after a pause begins at the least
service of the waiting users; otherwise idleness would be credit to shut the others out with. Preempted sequences go before all
others of their priority: they have waited already.

Counters only grow, so entries in a heap of users may be outdated: its top is checked and put back until it is current.

The order of running sequences is that of importance: priority, then arrival. A step is made in this order and the last sequence is
preempted first, so that no sequence is preempted after one of its chunks was scheduled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from shardwise.schedules.serving.sequence import Sequence, order_of

PROMPT_WEIGHT, GENERATED_WEIGHT = 1, 2
"""The weight of a token, as in the paper."""
REMEMBERED_USERS = 4096
"""Number of users without a sequence whose counter is kept."""


@dataclass(slots=True)
class _User:
    service: int
    sequences: int = 0
    """Waiting or running."""
    waiting: int = 0
    """Waiting for the first time."""


@dataclass(slots=True)
class _Class:
    """Sequences of one priority."""

    returning: list[Sequence] = field(default_factory=list)
    """Preempted ones, and forks, by arrival."""
    queues: dict[str, OrderedDict[Sequence, None]] = field(default_factory=dict)
    """The others, by user."""
    heap: list[tuple[int, int, str]] = field(default_factory=list)
    """Service, arrival of the first in the queue, user: one entry for each of the queues, never above its current value."""


class WaitingQueue:
    """Sequences that are not running."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._users: dict[str, _User] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()  # service of users without sequences
        self._last = 0  # service of the user last served
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that was not here before."""
        user = self._enter(sequence.user)
        if not user.waiting:
            user.service = max(user.service, self._least())
        user.waiting += 1
        self._count += 1
        group = self._classes.setdefault(sequence.priority, _Class())
        queue = group.queues.get(sequence.user)
        if queue is None:
            queue = group.queues[sequence.user] = OrderedDict()
            heappush(group.heap, (user.service, sequence.arrival, sequence.user))
        queue[sequence] = None

    def add_fork(self, sequence: Sequence) -> None:
        """Add a sequence that continues one that has been served."""
        self._enter(sequence.user)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a sequence that was running at the front of its priority."""
        insort(self._classes.setdefault(sequence.priority, _Class()).returning, sequence, key=order_of)
        self._count += 1

    def head(self) -> Sequence | None:
        """The next sequence to admit."""
        while self._classes:
            priority = min(self._classes)
            group = self._classes[priority]
            if group.returning:
                return group.returning[0]
            if self._refresh(group):
                return next(iter(group.queues[group.heap[0][2]]))
            del self._classes[priority]
        return None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted, or has ended."""
        self._count -= 1
        group = self._classes[sequence.priority]
        returning = group.returning
        at = bisect_left(returning, sequence.order, key=order_of)
        if at < len(returning) and returning[at] is sequence:
            del returning[at]
            return
        user = self._users[sequence.user]
        user.waiting -= 1
        self._last = user.service
        del group.queues[sequence.user][sequence]

    def charge(self, sequence: Sequence) -> None:
        """Charge its user for the tokens computed since the last time. Recomputing tokens after preemption is not charged."""
        before, now = sequence.charged, sequence.computed
        if now > before:
            generated = max(0, now - max(before, sequence.prompt))
            service = PROMPT_WEIGHT * (now - before - generated) + GENERATED_WEIGHT * generated
            self._users[sequence.user].service += service
            sequence.charged = now

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended. Counters of users without sequences are kept for a while, not forever: users are many."""
        user = self._users[sequence.user]
        user.sequences -= 1
        if not user.sequences:
            del self._users[sequence.user]
            self._gone[sequence.user] = user.service
            if len(self._gone) > REMEMBERED_USERS:
                self._gone.popitem(last=False)

    def _enter(self, name: str) -> _User:
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = _User(self._gone.pop(name, 0))
        user.sequences += 1
        return user

    def _least(self) -> int:
        """The least service of waiting users, or that of the last user who waited."""
        least = [group.heap[0][0] for group in self._classes.values() if self._refresh(group)]
        return min(least) if least else self._last

    def _refresh(self, group: _Class) -> bool:
        """Make the top of the heap current; False when no user is left."""
        heap = group.heap
        while heap:
            service, arrival, name = heap[0]
            queue = group.queues[name]
            if not queue:
                heappop(heap)
                del group.queues[name]
                continue
            now = (self._users[name].service, next(iter(queue)).arrival, name)
            if now == (service, arrival, name):
                return True
            heapreplace(heap, now)
        return False


class Running:
    """The running sequences, which hold a slot: those in decode and those in prefill, each sorted by order, and the free slots."""

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
