"""The four accounts of a step, as plain records: work, memory, traffic and time. The planner fills them by formula, the
trainer by counting, the trace reader from a profile; `compare` lists any two of them side by side.

All three use the same names for parts of the model, passes, owners of memory, axes and collectives. They are defined here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

PARTS = ("embedding", "norm", "attention", "ffn", "router", "experts", "head", "loss", "parameters")
"""The part of the model an operation belongs to; `parameters` is the optimizer's work."""

PASSES = ("forward", "recompute", "backward_input", "backward_weight", "optimizer")

OWNERS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "buffers", "workspace")
"""Owners of memory: `logits` are the tensors of the loss, `gathered` the unsharded layers of ZeRO, `buffers` communication buffers,
`workspace` kernels' scratch space, fragmentation and the driver."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")

AXIS_OF = {
    "zero": "shard",
    "secondary": "shard",
    "expert_secondary": "shard",
    "expert_shard": "shard",
    "sequence": "expert",
    "pipeline_back": "pipeline",
    "replica": "world",
}
"""The axis to which a process group's bytes are attributed, if the group has another name."""

CATEGORIES = ("matmul", "attention", "memory", "host", "replicate", "shard", "context", "tensor", "expert", "pipeline",
              "offload", "bubble", "optimizer", "data", "checkpoint", "other")  # fmt: skip
"""Where a step's time goes: kinds of compute, exposed communication of each axis, and waiting. `pipeline` is transfers
between stages, `bubble` is waiting for them; `offload` is waiting for activations on their way to or from the host; `host` is the
device waiting for launches."""


def wire_bytes(collective: str, ranks: int, given: int) -> Fraction:
    """Bytes that a rank must exchange with the other r-1 ranks of its group by the definition of the collective, whatever
    algorithm a library uses. `given` is the size of this rank's input:
    - all-gather of n bytes a rank: (r-1) n
    - reduce-scatter of N bytes on every rank: (r-1)/r N
    - all-reduce of N bytes: 2(r-1)/r N, a reduce-scatter and an all-gather
    - all-to-all of N bytes, split evenly: (r-1)/r N, the bytes that leave the rank
    - send and broadcast: the bytes sent (a receive is counted where it is sent)
    """
    others = Fraction(ranks - 1, ranks) if ranks > 0 else Fraction(0)
    match collective:
        case "all_gather":
            return Fraction((ranks - 1) * given)
        case "reduce_scatter" | "all_to_all":
            return others * given
        case "all_reduce":
            return 2 * others * given
        case "send" | "broadcast":
            return Fraction(given if ranks > 1 else 0)
        case _:
            return Fraction(0)


@dataclass(frozen=True)
class Work:
    """FLOPs (a multiply-add is two) and bytes moved in one step of one rank, by part and pass."""

    flops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bytes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    convention: str = "hardware FLOPs: causal attention, head in, embedding lookup out, recomputation in"

    @property
    def total(self) -> float:
        """All FLOPs."""
        return sum(sum(passes.values()) for passes in self.flops.values())


@dataclass(frozen=True)
class Memory:
    """Peak bytes by owner on the fullest rank of each pipeline rank, and the capacity of a device."""

    ranks: tuple[Mapping[str, float], ...] = ()
    capacity: float = 0.0
    host: tuple[float, ...] = ()
    """Bytes that each of these ranks holds in host memory; empty if none does."""

    @property
    def totals(self) -> tuple[float, ...]:
        """Peak of each pipeline rank."""
        return tuple(sum(owners.values()) for owners in self.ranks)

    @property
    def peak(self) -> float:
        """Peak of the fullest rank."""
        return max(self.totals, default=0.0)

    @property
    def fits(self) -> bool:
        """Whether every rank fits; True if the capacity is not known."""
        return not self.capacity or self.peak <= self.capacity


@dataclass(frozen=True)
class Traffic:
    """Bytes and messages that one rank sends in a step, by axis and collective."""

    bytes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    messages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(sum(kinds.values()) for kinds in self.bytes.values())


@dataclass(frozen=True)
class Span:
    """A time span on one stream of one pipeline rank."""

    rank: int
    stream: str
    """`compute`, or the axis that communicates."""
    name: str
    category: str
    start: float
    seconds: float
    microbatch: int = -1
    stage: int = -1


@dataclass(frozen=True)
class Timeline:
    """The spans of one step; seconds from its start."""

    spans: tuple[Span, ...] = ()
    seconds: float = 0.0
    left_out: int = 0
    """Microbatches of the step that are left out, with their seconds, since they repeat those shown."""


@dataclass(frozen=True)
class Account:
    """Everything known about a step, predicted or measured; unknown fields are empty."""

    origin: str
    """`plan`, `run` or `trace`."""
    step_seconds: float
    tokens: float
    """Tokens of a step, over all ranks."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the slowest rank by category; they add up to `step_seconds`."""
    work: Work = Work()
    memory: Memory = Memory()
    traffic: Traffic = Traffic()
    timeline: Timeline = Timeline()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True)
class Difference:
    """One quantity in two accounts."""

    account: str
    name: str
    first: float
    second: float

    @property
    def relative(self) -> float:
        """Second minus first, relative to the first."""
        if self.first == self.second:
            return 0.0
        return (self.second - self.first) / self.first if self.first else float("inf")


def quantities(account: Account) -> Iterator[tuple[str, str, float]]:
    """Every number of an account: the account it belongs to, its name, its value."""
    for account_name, kind in (("work", "flops"), ("moved", "bytes")):
        for part, passes in getattr(account.work, kind).items():
            for name, value in passes.items():
                yield account_name, f"{kind} {part} {name}", value
    for rank, owners in enumerate(account.memory.ranks):
        for owner, value in owners.items():
            yield "memory", f"rank {rank} {owner}", value
    for rank, value in enumerate(account.memory.host):
        yield "memory", f"rank {rank} host", value
    for kind in ("bytes", "messages"):
        for axis, collectives in getattr(account.traffic, kind).items():
            for name, value in collectives.items():
                yield "traffic", f"{kind} {axis} {name}", value
    if account.step_seconds:
        yield "time", "step", account.step_seconds
    for category, value in account.breakdown.items():
        yield "time", category, value


def compare(first: Account, second: Account) -> list[Difference]:
    """All quantities of both accounts, in the order of the first. A quantity that one side lacks counts as 0 there, unless that
    side lacks the entire account (work, memory, traffic or time)."""
    return differences(quantities(first), quantities(second))


def differences(first: Iterable[tuple[str, str, float]], second: Iterable[tuple[str, str, float]]) -> list[Difference]:
    """The same for lists of quantities: the account of each, its name, its value."""
    one, other = ({(a, n): v for a, n, v in each} for each in (first, second))
    shared = {a for a, _ in one} & {a for a, _ in other}
    names = [key for key in {**one, **other} if key[0] in shared]
    return [Difference(a, n, one.get((a, n), 0.0), other.get((a, n), 0.0)) for a, n in names]


_PLAIN = frozenset((int, float, str, bool, type(None)))


def as_dict(record: Any) -> Any:
    """A record as plain data for JSON."""
    if (names := getattr(record, "__dataclass_fields__", None)) is not None:
        return {name: one if type(one := getattr(record, name)) in _PLAIN else as_dict(one) for name in names}
    if isinstance(record, tuple | list):
        return [value if type(value) in _PLAIN else as_dict(value) for value in record]
    if isinstance(record, Mapping):
        return {key: value if type(value) in _PLAIN else as_dict(value) for key, value in record.items()}
    return record
