"""Decides which elastic replicas take part in each exchange (`layout.sync_elastic`); it runs in the coordinator's command.

All ranks of a replica send the same request, which counts once the last of them has sent it. `begin`: a replica is up. The first
replicas begin the run together; later ones wait for an exchange, after which a member sends them its state. `arrive`: a member is
at its next exchange. When all members have arrived or died, the remaining ones get the list of members. `vote`: a member has the
sums, or could not get them. When all remaining members have them the exchange is committed, so that no member can miss it;
otherwise the remaining members repeat it as a new generation. `there` asks for the current members. `give`: a member is ready to
send its state to the replicas that join from it. `received`: a joining replica has the state, or could not get it and waits for the
next exchange. `finish`: a member has made the last step. One of them writes the end of the run; if it dies, the next one does. If
all members have died, all replicas begin again from the last checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

REPEATS = 5
"""How often an exchange may fail although all its members are alive."""

Message = dict[str, Any]


class Gone(Exception):
    """The requesting replica has died or was given up meanwhile."""


@dataclass
class _Desk:
    """The requests of one replica's ranks, and the answers."""

    start: int = 0
    """How often the replica was started before; -1: it will not be started again."""
    asked: dict[int, Message] = field(default_factory=dict)
    turn: int = 0
    answers: dict[int, Message] = field(default_factory=dict)

    def reset(self, start: int) -> None:
        self.start, self.asked, self.turn, self.answers = start, {}, 0, {}

    def answer(self, message: Message) -> None:
        self.answers = {self.turn: message}
        self.turn, self.asked = self.turn + 1, {}


class Membership:
    """Decides for `replicas` replicas of `ranks` ranks each. `say` is called with every event, as a word and values."""

    def __init__(self, replicas: int, ranks: int, say: Callable[..., None]) -> None:
        self.ranks, self.say = ranks, say
        self.changed = threading.Condition()
        self.desks = [_Desk() for _ in range(replicas)]
        self.members: list[int] = []
        self.writer = -1
        self.era = self.round = self.generation = self.step = 0
        self.reached = [-1] * replicas
        """The step of the last exchange that each replica took part in."""
        self.over = False
        self._promised: dict[int, int] = {}  # joining replicas, and the member that sends each its state
        self._group: tuple[int, ...] = ()
        self._voting: list[int] = []
        self._repeats = 0
        self._writing = False

    def ask(self, message: Message, patience: Callable[[], None] = lambda: None) -> Message:
        """Handle a rank's request; returns the answer once it is decided. `patience` is called while waiting, and may raise."""
        with self.changed:
            desk = self.desks[message["replica"]]
            if desk.start != message["start"]:
                raise Gone
            if message["what"] == "there":
                return dict(members=list(self.members))
            turn = desk.turn
            desk.asked[message["rank"]] = message
            self._decide()
            while turn not in desk.answers:
                patience()
                self.changed.wait(0.5)
                if desk.start != message["start"]:
                    raise Gone
            return desk.answers[turn]

    def view(self) -> Message:
        """The current state, for the commands that start replicas."""
        with self.changed:
            starts = [desk.start for desk in self.desks]
            return dict(over=self.over, members=list(self.members), reached=list(self.reached), starts=starts)

    def give_up(self, replica: int) -> None:
        """A replica that has left will not come back."""
        with self.changed:
            self.desks[replica].reset(-1)
            self._decide()

    def leave(self, replica: int, start: int) -> None:
        """A replica has died; ignored unless `start` is its current start."""
        with self.changed:
            desk = self.desks[replica]
            if desk.start != start or self.over:
                return
            desk.reset(start + 1)
            self._promised.pop(replica, None)
            for joiner in [j for j, giver in self._promised.items() if giver == replica]:
                self._return(joiner)
            if replica in self.members:
                self.members.remove(replica)
                if self.writer == replica:
                    # A replica that has just joined lacks the records of the last steps, so it is not chosen.
                    oldest = max((self.reached[r] for r in self.members), default=-1)
                    self.writer = min((r for r in self.members if self.reached[r] == oldest), default=-1)
                    self._writing = False
                self.say("left", replica=replica, step=self.step, members=list(self.members))
            self._decide()
            self.changed.notify_all()

    def _return(self, joiner: int) -> None:
        """A joining replica could not get its state: it is no member, and waits for another exchange."""
        self._promised.pop(joiner, None)
        self.members.remove(joiner)
        self.say("left", replica=joiner, step=self.step, members=list(self.members))

    def _hand_over(self) -> None:
        """Answer the replicas that send or receive a state, so that they meet."""
        for giver in [r for r in self.members if self._asked(r, "give")]:
            for joiner in [j for j, g in self._promised.items() if g == giver]:
                del self._promised[joiner]
                self._tell([joiner], source=giver, **self._facts())
            self._tell([giver])
        for joiner in [r for r in self.members if self._asked(r, "received")]:
            has = all(m["ok"] for m in self.desks[joiner].asked.values())
            if not has:
                self._return(joiner)
            self._tell([joiner], has=has)

    def _asked(self, replica: int, *what: str) -> bool:
        """Whether all ranks of a replica have sent one of these requests."""
        desk = self.desks[replica]
        return len(desk.asked) == self.ranks and all(m["what"] in what for m in desk.asked.values())

    def _any(self, replicas: list[int], key: str) -> bool:
        return any(m[key] for r in replicas for m in self.desks[r].asked.values())

    def _decide(self) -> None:
        self._hand_over()
        if self.over:
            self._tell([r for r in range(len(self.desks)) if self._asked(r, "finish", "finished")], write=False)
        elif not self.members:
            self._found()
        elif all(self._asked(r, "arrive") for r in self.members):
            self._begin_exchange()
        elif self._voting and all(self._asked(r, "vote") for r in self.members):
            self._end_exchange()
        elif self._writing and self._asked(self.writer, "finished"):
            self.over = True
            self._decide()
        elif not self._writing and self._asked(self.writer, "finish"):
            self._writing = True
            self._tell([self.writer], write=True)

    def _tell(self, replicas: list[int], **answer: Any) -> None:
        for replica in replicas:
            self.desks[replica].answer(answer)
        self.changed.notify_all()

    def _facts(self) -> Message:
        return dict(era=self.era, round=self.round, members=list(self.members), writer=self.writer)

    def _found(self) -> None:
        """All replicas begin together, from the start or the last checkpoint."""
        there = [r for r, desk in enumerate(self.desks) if desk.start >= 0]
        if there and all(self._asked(r, "begin") for r in there):
            self.members, self.writer, self.era, self.round = there, there[0], self.era + 1, 0
            self._group, self._voting, self._repeats, self._promised = (), [], 0, {}
            self._tell(there, source=-1, **self._facts())

    def _begin_exchange(self) -> None:
        self._voting, self._repeats = list(self.members), 0
        self._last, self._stop = self._any(self.members, "last"), self._any(self.members, "stop")
        self.step = next(iter(self.desks[self.members[0]].asked.values()))["step"]
        self._exchange()

    def _exchange(self) -> None:
        if self._group != tuple(self.members):
            self.generation += 1
            self._group = tuple(self.members)
        self._tell(self.members, commit=False, generation=self.generation, **self._facts())

    def _end_exchange(self) -> None:
        lost = len(self.members) < len(self._voting)
        if not all(m["ok"] for r in self.members for m in self.desks[r].asked.values()):
            problems = [m["problem"] for r in self.members for m in self.desks[r].asked.values() if m["problem"]]
            self._repeats = 0 if lost else self._repeats + 1
            self._voting, self._group = list(self.members), ()
            if self._repeats > REPEATS:
                return self._tell(self.members, refused=f"{REPEATS} exchanges failed: {problems[0]}")
            return self._exchange()
        # A replica that died after the sums were made is still in them: all other members have the complete sums.
        joining = [r for r in range(len(self.desks)) if r not in self.members and self._asked(r, "begin")]
        joining = [] if self._last or self._stop else joining
        givers = {joiner: self.members[n % len(self.members)] for n, joiner in enumerate(joining)}
        stayed, added = list(self.members), list(self._voting)
        for replica in stayed:
            self.reached[replica] = self.step
        self.round += 1
        self._voting, self.members = [], sorted([*stayed, *joining])
        self.say("exchange", round=self.round, step=self.step, era=self.era, added=added, joined=givers)
        for joiner, giver in givers.items():
            self.say("joined", replica=joiner, source=giver, step=self.step, members=list(self.members))
        self._promised.update(givers)
        self._tell(stayed, commit=True, stop=self._stop, joined=givers, **self._facts())
        return None
