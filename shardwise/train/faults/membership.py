"""Who takes part in the exchanges of replicas that come and go, as the command decides it (`layout.sync_elastic`).

All ranks of a replica ask the same, and what they asked counts when the last of them has. `begin`: a replica is there. The first
ones begin the run together; later ones wait for an exchange, after which a member gives them its state. `arrive`: a member is at
its next exchange. When all have arrived, or died, those that are left are told of each other. `vote`: a member has the sums, or
could not get them. When all have them the exchange is committed, and nobody can be without it; else it is repeated by those that
are left, as a new generation; `there` asks who the members are just now. `give`: a member is ready to give its state to those
that join by it, and `received`: one of these has it, or could not get it and waits for the next exchange. `finish`: a member has
made the last step. One of them writes the end of the run, and where it dies the next. Where all members have died, all replicas
begin anew, from the last checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

REPEATS = 5
"""How often members that are all there may fail to exchange."""

Message = dict[str, Any]


class Gone(Exception):
    """The replica that asks was given up meanwhile."""


@dataclass
class _Desk:
    """What the ranks of one replica ask, and the answers."""

    start: int = 0
    """How often the replica was started before; -1: never again."""
    asked: dict[int, Message] = field(default_factory=dict)
    turn: int = 0
    answers: dict[int, Message] = field(default_factory=dict)

    def reset(self, start: int) -> None:
        self.start, self.asked, self.turn, self.answers = start, {}, 0, {}

    def answer(self, message: Message) -> None:
        self.answers = {self.turn: message}
        self.turn, self.asked = self.turn + 1, {}


class Membership:
    """Decides for `replicas` of so many `ranks` each. `say` gets what happens, as a word and values."""

    def __init__(self, replicas: int, ranks: int, say: Callable[..., None]) -> None:
        self.ranks, self.say = ranks, say
        self.changed = threading.Condition()
        self.desks = [_Desk() for _ in range(replicas)]
        self.members: list[int] = []
        self.writer = -1
        self.era = self.round = self.generation = self.step = 0
        self.reached = [-1] * replicas
        """The step of the last exchange that each took part in."""
        self.over = False
        self._promised: dict[int, int] = {}  # replicas that join, and who gives them its state
        self._group: tuple[int, ...] = ()
        self._voting: list[int] = []
        self._repeats = 0
        self._writing = False

    def ask(self, message: Message, patience: Callable[[], None] = lambda: None) -> Message:
        """A rank asks; returns the answer when it is decided. `patience` is called while it waits, and may raise."""
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
        """How it stands, for the commands that start replicas."""
        with self.changed:
            starts = [desk.start for desk in self.desks]
            return dict(over=self.over, members=list(self.members), reached=list(self.reached), starts=starts)

    def give_up(self, replica: int) -> None:
        """A replica that has left does not come back."""
        with self.changed:
            self.desks[replica].reset(-1)
            self._decide()

    def leave(self, replica: int, start: int) -> None:
        """A replica has died, as it was at this start."""
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
                    # One that has just joined lacks the records of the last steps.
                    oldest = max((self.reached[r] for r in self.members), default=-1)
                    self.writer = min((r for r in self.members if self.reached[r] == oldest), default=-1)
                    self._writing = False
                self.say("left", replica=replica, step=self.step, members=list(self.members))
            self._decide()
            self.changed.notify_all()

    def _return(self, joiner: int) -> None:
        """A replica that was to join waits for another exchange."""
        self._promised.pop(joiner, None)
        self.members.remove(joiner)
        self.say("left", replica=joiner, step=self.step, members=list(self.members))

    def _hand_over(self) -> None:
        """Let those meet that give and take a state."""
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
        """Whether all ranks of a replica ask this."""
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
        """All begin together, from the start or the last checkpoint."""
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
        # Who died behind the sums is in them: all others have them whole.
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
