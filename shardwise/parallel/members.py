"""This rank's side of an exchange between replicas that come and go (`layout.sync_elastic`).

Each replica is a world of its own, so that it survives the death of other replicas' ranks. The command's coordinator
(`train/faults/coordinator.py`) decides which replicas take part; every rank asks it over its own connection, one line of JSON each
way. The sums themselves travel over gloo, in a group of the members that is recreated when they change. When a member dies, the
group fails; the others then report it, and repeat the exchange without that member. Nothing is applied before the coordinator knows
that every member has the sums. Traffic: that of the exchange, through host memory, plus a few hundred bytes to the coordinator.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from shardwise.parallel.compress.quantized import Quantized
from shardwise.parallel.gradients import all_reduce_together
from shardwise.parallel.local_parameter import LocalParameter
from shardwise.parallel.outer import Outer, Sent
from shardwise.run import LayoutConfig
from shardwise.torch_private import gloo_group

CONNECT = timedelta(seconds=60)
"""Time within which the members of a group, if all are alive, must have connected."""
MEETING = 0.2
"""Seconds between two checks that the members are alive, during a joint operation."""
PAUSE = 1.0
"""Seconds between two signs that a rank is waiting and not hanging."""
REPLICA = "SHARDWISE_REPLICA"
"""The environment variable that holds a rank's `Place`: its replica, and the coordinator's address."""

Answer = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A rank's identity among replicas that come and go, and the addresses it needs."""

    replica: int
    start: int
    """How often the replica was started before."""
    rank: int
    """Within the replica."""
    address: str
    port: int
    """Of the coordinator, as is `address`."""
    store: int
    """The port of the TCPStore where groups meet."""

    def to_variable(self) -> str:
        """The value of the rank's environment variable."""
        return json.dumps(vars(self))

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place | None:
        """Read it from a rank's environment; None where replicas do not come and go."""
        return Place(**json.loads(environment[REPLICA])) if REPLICA in environment else None


class Members:
    """What this rank knows of the members, and its connection to the coordinator. Only one thread asks at a time."""

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, self.timeout = place, timedelta(seconds=timeout)
        self.note: Callable[[], object] = lambda: None
        """Called while this rank waits for others, to show that it does not hang."""
        self.era = self.round = 0
        self.count = 0
        """Number of replicas that are members."""
        self.writes = False
        """Whether this replica writes for all members."""
        self.store = TCPStore(place.address, place.store, is_master=False, timeout=self.timeout)
        self._socket = socket.create_connection((place.address, place.port))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.settimeout(PAUSE)
        self._read = b""
        self._group: tuple[int, dist.ProcessGroup | None] = (-1, None)

    def ask(self, what: str, **values: Any) -> Answer:
        """Ask the coordinator, and wait for its decision."""
        who = dict(replica=self.place.replica, start=self.place.start, rank=self.place.rank)
        self._socket.sendall(json.dumps(dict(what=what, **who, **values)).encode() + b"\n")
        while b"\n" not in self._read:
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError:
                self.note()
                continue
            if not more:
                raise ConnectionError("the coordinator of the replicas has closed the connection")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        answer: Answer = json.loads(line)
        if "refused" in answer:
            raise ConnectionError(f"the coordinator of the replicas says: {answer['refused']}")
        return answer

    def begin(self) -> Answer:
        """Take part from now on: as one of the replicas that start the run together, or with the state of another replica."""
        answer = self.ask("begin")
        self.era, self.round = answer["era"], answer["round"]
        self.adopt(answer)
        return answer

    def adopt(self, answer: Answer) -> None:
        """Follow this decision from this step on, as all ranks of the replica do."""
        self.count, self.writes = len(answer["members"]), answer["writer"] == self.place.replica

    def add_up(self, gradients: Sequence[Tensor], method: str, step: int, last: bool, stop: bool) -> Answer:
        """Sum these over all members, in place; returns the decision, with the number of members summed as `added`."""
        answer = self.ask("arrive", round=self.round, step=step, last=last, stop=stop)
        while True:
            members: list[int] = answer["members"]
            problem, sums = "", [g.detach().to("cpu", copy=True) for g in gradients]
            work = partial(self._exchange, sums, method, members, answer["generation"])
            try:
                self._group = self._while_there(members, work)
            except (RuntimeError, dist.DistError) as e:  # a member has left; closing our group lets the others see it
                self._group = (-1, None)
                problem = str(e)
            answer = self.ask("vote", round=self.round, ok=not problem, problem=problem[:200])
            if answer["commit"]:
                for gradient, total in zip(gradients, sums, strict=True):
                    gradient.copy_(total)
                self.round = answer["round"]
                return answer | dict(added=len(members))

    def _exchange(
        self, tensors: list[Tensor], method: str, members: list[int], generation: int
    ) -> tuple[int, dist.ProcessGroup | None]:
        """Sum over the members, in place, in a group that is created if this generation has none; returns (generation, group)."""
        before, group = self._group
        if before != generation:
            group = None
            if len(members) > 1:
                store = PrefixStore(f"{self.era}/{generation}/{self.place.rank}", self.store)
                index = members.index(self.place.replica)
                group = gloo_group(store, index, len(members), CONNECT, self.timeout)
        _add_up(tensors, method, group)
        return generation, group

    def _while_there(self, others: Sequence[int], make: Callable[[], T]) -> T:
        """Run an operation with other replicas. Gloo waits until its timeout for a replica that has died, or for one that waits for
        it; here a thread does the waiting, and is abandoned as soon as the coordinator knows of the death."""
        made: Future[T] = Future()

        def work() -> None:
            try:
                made.set_result(make())
            except BaseException as e:
                made.set_exception(e)

        threading.Thread(target=work, name="meeting", daemon=True).start()
        while True:
            try:
                return made.result(MEETING)
            except TimeoutError:
                if made.done():
                    raise RuntimeError("the members of a group did not meet") from None
                self.note()
                if not set(others) <= set(self.ask("there")["members"]):
                    raise RuntimeError("a member has left in the middle") from None

    def give(self, name: str) -> dist.ProcessGroup:
        """A group of two, with the rank that receives this one's state."""
        store = PrefixStore(f"{name}/{self.place.rank}", self.store)
        return gloo_group(store, 0, 2, CONNECT, self.timeout)

    def take(self, name: str, source: int) -> dist.ProcessGroup:
        """The same group on the receiving side."""
        store = PrefixStore(f"{name}/{self.place.rank}", self.store)
        return self._while_there([source], lambda: gloo_group(store, 1, 2, CONNECT, self.timeout))

    def finish(self) -> bool:
        """After the last step: whether this replica must write the remaining output. The others wait until that is done, and one of
        them writes it if the writer dies."""
        self.writes = bool(self.ask("finish")["write"])
        return self.writes

    def finished(self) -> None:
        """Report that the output is written."""
        self.ask("finished")


@torch.no_grad()
def _add_up(gradients: Sequence[Tensor], method: str, group: dist.ProcessGroup | None) -> None:
    """Replace each tensor, all on the host, by its sum over a group."""
    if group is None or not gradients:
        return
    if method != "none":
        Quantized(method, group, gradients).add_up(gradients)
    else:
        all_reduce_together(gradients, group)


@dataclass
class Agreed(Sent):
    """Outer gradients that a thread sums over the replicas that take part."""

    decided: Future[Answer] = field(default_factory=Future)


class ElasticOuter(Outer):
    """The outer optimizer where replicas come and go."""

    def __init__(self, parameters: Sequence[LocalParameter], layout: LayoutConfig, members: Members) -> None:
        super().__init__(parameters, layout, None)
        self.members = members
        self.decided: Answer | None = None
        """The decision made with the exchange that the last step applied."""
        self.wish = False
        self._thread = ThreadPoolExecutor(1, "exchange")

    def sync(self, step: int, last: bool, stop: Tensor) -> Tensor:
        """As for replicas that are always there; a request to stop goes to the coordinator with the next exchange."""
        self.asked = stop if self.asked is None else self.asked + stop
        if last or self.speaks(step):
            self.wish, self.asked = bool(self.asked.item()), None
        self.decided = None
        self.step(step, last)
        return torch.full_like(stop, float(self.decided is not None and self.decided["stop"]))

    def _send(self, fragment: int, step: int, last: bool) -> None:
        gradients = self._gradients(fragment)
        asked = (gradients, self.layout.compress, step, last, self.wish)
        decided = self._thread.submit(self.members.add_up, *asked)
        self.underway[fragment] = Agreed(step + self.layout.sync_overlap, gradients, 0, decided=decided)

    def _arrived(self, sent: Sent) -> list[Tensor]:
        if isinstance(sent, Agreed):
            sent.replicas = sent.decided.result()["added"]
        return sent.gradients

    def _apply(self, fragment: int, last: bool) -> None:
        sent = self.underway[fragment]
        super()._apply(fragment, last)
        if isinstance(sent, Agreed):
            self.decided = sent.decided.result()
            self.members.adopt(self.decided)
