"""The four accounts of a step, as plain records: work, memory, traffic and time. The planner fills them by formula, the
trainer by counting, the trace reader from a profile; `compare` lays any two of them side by side.

Names are shared by all three: parts of the model, passes over it, owners of memory, axes and collectives. What a name
means is said once, here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

PARTS = ("embedding", "norm", "attention", "ffn", "router", "experts", "head", "loss", "parameters")
"""What an operation belongs to; `parameters` is the optimizer's own work."""

PASSES = ("forward", "recompute", "backward_input", "backward_weight", "optimizer")

OWNERS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "buffers", "workspace")
"""What holds memory: `logits` are the loss's own tensors, `gathered` the whole layers of ZeRO, `buffers` those of
communication, `workspace` kernels' scratch, fragmentation and what the driver keeps."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")

AXIS_OF = {"zero": "shard", "expert_shard": "shard", "sequence": "expert", "pipeline_back": "pipeline"}
"""The axis that a grouping's bytes are blamed on, where it has another name."""

CATEGORIES = ("matmul", "attention", "memory", "host", "replicate", "shard", "context", "tensor", "expert", "pipeline",
              "bubble", "optimizer", "data", "checkpoint", "other")  # fmt: skip
"""Where a step's time goes: kinds of computing, traffic of each axis that nothing hid, and waiting. `pipeline` is
transfers between stages, `bubble` waiting for them; `host` is the device waiting for launches."""


def wire_bytes(collective: str, ranks: int, given: int) -> Fraction:
    """Bytes that the definition of an operation makes a rank receive, or send, from or to the other r-1 ranks of its group,
    whatever algorithm a library uses; `given` is the size of what this rank puts in:
    - all-gather of n bytes a rank: (r-1) n
    - reduce-scatter of N bytes on every rank: (r-1)/r N
    - all-reduce of N bytes: 2(r-1)/r N, a reduce-scatter and an all-gather
    - all-to-all of N bytes dealt evenly: (r-1)/r N, what leaves the rank for others
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
    """Operations (a multiply-add is two) and bytes moved in one step of one rank, by part and pass."""

    flops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bytes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    convention: str = "hardware FLOPs: causal attention, head in, embedding lookup out, recomputation in"

    @property
    def total(self) -> float:
        """All operations."""
        return sum(sum(passes.values()) for passes in self.flops.values())


@dataclass(frozen=True)
class Memory:
    """Bytes by owner on the fullest rank of each pipeline rank, at the moment they are most; and what a device holds."""

    ranks: tuple[Mapping[str, float], ...] = ()
    capacity: float = 0.0

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
        """Whether every rank has room, where a device's capacity is known."""
        return not self.capacity or self.peak <= self.capacity


@dataclass(frozen=True)
class Traffic:
    """Bytes one rank puts on the wire in a step, and messages, by axis and collective."""

    bytes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    messages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(sum(kinds.values()) for kinds in self.bytes.values())


@dataclass(frozen=True)
class Span:
    """Something that took time: on which pipeline rank, on which stream, what it was and whose it is."""

    rank: int
    stream: str
    """`compute`, or the axis whose traffic it is."""
    name: str
    category: str
    start: float
    seconds: float
    microbatch: int = -1
    stage: int = -1


@dataclass(frozen=True)
class Timeline:
    """Who did what when in one step; seconds from its start."""

    spans: tuple[Span, ...] = ()
    seconds: float = 0.0
    left_out: int = 0
    """Microbatches of the step that are not among the spans, since they repeat those that are; nor are their seconds."""


@dataclass(frozen=True)
class Account:
    """Everything known of a step, predicted or measured; what was not measured is empty."""

    origin: str
    """`plan`, `run` or `trace`."""
    step_seconds: float
    tokens: float
    """In a step, over all ranks."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the slowest rank by category; they add up to `step_seconds`."""
    work: Work = Work()
    memory: Memory = Memory()
    traffic: Traffic = Traffic()
    timeline: Timeline = Timeline()

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
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
        """How far the second is from the first, as a share of the first."""
        if self.first == self.second:
            return 0.0
        return (self.second - self.first) / self.first if self.first else float("inf")


def quantities(account: Account) -> Iterator[tuple[str, str, float]]:
    """Every number of an account: which of the four it belongs to, its name, its value."""
    for account_name, kind in (("work", "flops"), ("moved", "bytes")):
        for part, passes in getattr(account.work, kind).items():
            for name, value in passes.items():
                yield account_name, f"{kind} {part} {name}", value
    for rank, owners in enumerate(account.memory.ranks):
        for owner, value in owners.items():
            yield "memory", f"rank {rank} {owner}", value
    for kind in ("bytes", "messages"):
        for axis, collectives in getattr(account.traffic, kind).items():
            for name, value in collectives.items():
                yield "traffic", f"{kind} {axis} {name}", value
    if account.step_seconds:
        yield "time", "step", account.step_seconds
    for category, value in account.breakdown.items():
        yield "time", category, value


def compare(first: Account, second: Account) -> list[Difference]:
    """All quantities that either account has, in the order of the first; what one lacks counts as 0 there, unless it
    lacks that whole account."""
    one, other = ({(a, n): v for a, n, v in quantities(account)} for account in (first, second))
    shared = {a for a, _ in one} & {a for a, _ in other}
    names = [key for key in {**one, **other} if key[0] in shared]
    return [Difference(a, n, one.get((a, n), 0.0), other.get((a, n), 0.0)) for a, n in names]


def as_dict(record: Any) -> Any:
    """A record as JSON would hold it."""
    if isinstance(record, Mapping):
        return {key: as_dict(value) for key, value in record.items()}
    if isinstance(record, tuple | list):
        return [as_dict(value) for value in record]
    if hasattr(record, "__dataclass_fields__"):
        return {name: as_dict(getattr(record, name)) for name in record.__dataclass_fields__}
    return record
