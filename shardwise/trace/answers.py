"""What is said of a profile: plain records, one for each question. Times are whole nanoseconds, bytes and operations are
numbers; each answer is kept for every rank seen, and `spread` says how the ranks differ.

The records hold no columns of events and no code that looks at them, so a report, a comparison or a program can take them
as they are; `as_dict` of the ledger makes JSON of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.ledger import Timeline

CAUSES = ("host", "synchronisation", "data", "peer", "pipeline", "device", "unknown")
"""Why a device had nothing to run: the host launched late; the host had waited for the device and the queue ran dry; a batch
was awaited; the host waited for other ranks, or for another stage; the work was launched in time but began later (its stream
waited for another, or the launch took that long); nothing in the profile tells."""

PASSES = ("forward", "recompute", "backward", "other")
"""Which part of a step launched a kernel, as far as a profile shows it; `other` is outside the model (optimizer, data)."""


@dataclass(frozen=True)
class Spread:
    """One quantity over the ranks seen."""

    total: float
    mean: float
    lowest: float
    lowest_rank: int
    highest: float
    highest_rank: int


def spread(values: Mapping[int, float]) -> Spread:
    """Total, mean, and who has least and most of it (the lowest rank of those that have as much)."""
    if not values:
        return Spread(0, 0.0, 0, -1, 0, -1)
    low = min(values, key=lambda rank: (values[rank], rank))
    high = max(values, key=lambda rank: (values[rank], -rank))
    total = sum(values.values())
    return Spread(total, total / len(values), values[low], low, values[high], high)


@dataclass(frozen=True)
class Clock:
    """How a rank's clock stands to that of the reference rank, from collectives that both took part in."""

    offset: int
    """Nanoseconds to add to this rank's times; 0 where the offset found is within its uncertainty."""
    uncertainty: int
    """Half of the matched collectives agree with the offset to within this; -1: nothing to tell it by."""
    matched: int
    """Collectives it was told by."""


@dataclass(frozen=True)
class Moved:
    """Messages of one axis and collective on one rank."""

    messages: int
    bytes: float
    """On the wire, by the convention of the ledger's traffic; 0 where the profile does not tell sizes."""
    payload: float
    """Of the whole tensor that the collective is about: what `algorithm` bandwidth divides by the time."""
    sized: int
    """Messages whose size is known."""
    time: int
    """While at least one such message was under way."""
    exposed: int
    """Of that, while nothing was computed."""
    summed: int
    """Durations added up, so messages that overlap count twice."""
    wait: int
    """Of the summed time, waiting for the last rank to arrive; 0 where no other rank was seen."""
    matched: int
    """Messages that were found on another rank too, so that `wait` is known."""
    timed: int = 0
    """Summed time without waiting, of the messages whose size is known: what bandwidth divides by."""

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that a rank put on the wire while data moved (`busbw` of nccl-tests)."""
        return self.bytes * 1e9 / self.timed if self.timed else 0.0

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the tensor a second (`algbw` of nccl-tests)."""
        return self.payload * 1e9 / self.timed if self.timed else 0.0


@dataclass(frozen=True)
class AxisTime:
    """One axis and collective over the ranks."""

    axis: str
    """An axis of the layout, or the name of a process group that is none."""
    collective: str
    ranks: Mapping[int, Moved]
    group: int = 0
    """Ranks that talk with each other, the most seen; 0 where it is not known."""

    @property
    def total(self) -> Moved:
        """Over all ranks seen."""
        rows = list(self.ranks.values())
        return Moved(*(sum(getattr(row, name) for row in rows) for name in Moved.__dataclass_fields__))


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name; on a profile without a device, operators with their own time."""

    name: str
    kind: str
    """`compute`, `communication` or `copy`."""
    count: int
    total: int
    longest: int
    share: float
    """Of the summed time of all kernels."""
    ranks: Mapping[int, int]
    """Total on each rank that ran it."""
    module: str = ""
    """Where most of its time was launched from."""

    @property
    def mean(self) -> float:
        """Of one call."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class CallTime:
    """Calls of the driver or runtime of one name, on the host."""

    name: str
    count: int
    total: int
    ranks: Mapping[int, int]
    """Nanoseconds on each rank."""


@dataclass(frozen=True)
class ModuleTime:
    """Device time that a module launched itself, without the modules in it."""

    module: str
    """Its name, or `(phase optimizer)` and the like for a part of a step that is no module."""
    passes: Mapping[str, int]
    """Summed nanoseconds by pass, over the ranks seen."""
    kernels: int
    flops: float
    """Of its matrix products and attention, where shapes were recorded."""
    ranks: Mapping[int, int]
    """Summed nanoseconds on each rank."""

    @property
    def total(self) -> int:
        """All passes."""
        return sum(self.passes.values())


@dataclass(frozen=True)
class Modules:
    """Kernels by module, and how much of the device's time could be told."""

    rows: tuple[ModuleTime, ...]
    attributed: Mapping[int, float]
    """Share of each rank's summed device time that belongs to a module or a named phase."""
    in_modules: Mapping[int, float]
    """Share that belongs to a module."""


@dataclass(frozen=True)
class LaunchQueue:
    """How far the host is ahead of the device on one rank."""

    launches: int
    median_delay: int
    """Nanoseconds from a launch call to the start of its kernel."""
    longest_delay: int
    late: int
    """Kernels that the device waited for: launched when it had nothing left to do."""
    mean_depth: float
    """Kernels launched and not yet begun, over the time of the window."""
    deepest: int
    empty: int
    """Nanoseconds during which nothing was queued and nothing ran."""
    short: int
    """Kernels shorter than the time of one launch call, so that a host that launches one after another is too slow."""
    launch_time: int
    """Median nanoseconds from one launch to the next on the thread that launches most."""
    short_gaps: int
    """Nanoseconds between kernels that were launched in time, in gaps no longer than a launch takes: the price of starting
    a kernel, whatever is in it."""


@dataclass(frozen=True)
class PipelineRank:
    """What one rank of a pipeline did in one step."""

    actions: tuple[str, ...]
    start: int
    """First action, on the reference clock."""
    end: int
    work: int
    bubble: int
    """Nanoseconds of the pipeline's window in which this rank did not work: before its first action, waiting for a message,
    after its last."""
    scheduled: int
    """The bubble of the executed lists when they are played: each action takes as long as it worked, and each message that was
    waited for as long as it did."""
    instant: int
    """The same when messages arrive at once: what the schedule alone costs."""


@dataclass(frozen=True)
class PipelineStep:
    """One step of one pipeline: ranks that send to each other."""

    step: int
    members: tuple[int, ...]
    """Global ranks, by stage."""
    window: int
    """Nanoseconds from the first work of any rank to the end of the last."""
    ranks: Mapping[int, PipelineRank]
    schedule: str
    """The name of the schedule these lists are; empty when they are none that is known or ranks are missing."""
    stages_per_rank: int
    microbatches: int

    @property
    def share(self) -> float:
        """The part of the ranks' time that is bubble."""
        total = self.window * len(self.ranks)
        return sum(rank.bubble for rank in self.ranks.values()) / total if total else 0.0


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for."""

    rank: int
    reason: str
    """`compute`: its own work takes longer; `late`: it comes late to collectives with no more work than others."""
    excess: int
    """Nanoseconds a step, against the median of its peers."""
    share: float
    """Of the step."""
    evidence: str


@dataclass(frozen=True)
class CriticalPath:
    """The chain of work and waiting, over ranks, that ends with the last thing done; its parts add up to `length`."""

    length: int
    categories: Mapping[str, int]
    """`compute`, `communication AXIS`, `copy`, `host`, `idle`."""
    ranks: Mapping[int, int]
    kernels: Mapping[str, int]
    """The names that hold most of it."""
    segments: tuple[tuple[int, str, str, int, int], ...]
    """Rank, category, name, start and end; at most a few thousand, the longest."""


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes allocated on a device over time."""

    device: str
    peak: int
    peak_at: int
    """Nanoseconds from the window's start."""
    reserved: int
    """The most that the allocator held."""
    times: tuple[int, ...]
    allocated: tuple[int, ...]
    """Decimated; the highest point of each piece is kept."""


@dataclass(frozen=True)
class Flops:
    """Operations of the matrix products and attention whose shapes were recorded."""

    convention: str
    ranks: Mapping[int, float]
    peak: float
    """Operations a second of one device; 0 where it is not known."""
    utilisation: Mapping[int, float]
    """Operations over span times peak; empty where the peak is not known."""


@dataclass(frozen=True)
class Finding:
    """One thing to change, and what it would bring."""

    rule: str
    title: str
    advice: str
    evidence: tuple[str, ...]
    ranks: tuple[int, ...]
    gain: int
    """Nanoseconds a step that could be won at most, on the ranks that hold the others up."""
    share: float
    """Of the step."""
    gpu_hours_per_day: float
    """Device hours won in a day of the whole job."""


@dataclass(frozen=True)
class Explanation:
    """All answers. What could not be told is empty, and `unseen` says why."""

    world: int
    """Ranks of the job, as the profiles say."""
    seen: tuple[int, ...]
    devices: Mapping[int, str]
    """Name of each rank's device; empty for a rank that ran on the host alone."""
    steps: tuple[int, ...]
    """Profiler steps that were looked at; empty when the whole file was."""
    step_time: int
    """Mean nanoseconds of a step on the slowest rank (of the whole window where there are no steps)."""
    ranks: Mapping[int, Mapping[str, int]]
    """`span`, `compute`, `communication`, `copy`, `idle`, `exposed_communication` of each rank."""
    spreads: Mapping[str, Spread]
    """The same over the ranks."""
    clocks: Mapping[int, Clock]
    axes: tuple[AxisTime, ...]
    categories: Mapping[int, Mapping[str, int]]
    """Each rank's span in the ledger's categories; they add up to it."""
    idle: Mapping[int, Mapping[str, int]]
    """Idle by cause on each rank; the causes add up to its `idle`."""
    exposed_copy: Mapping[int, int]
    """Copies that neither computing nor communication hid, on each rank."""
    kernels: tuple[KernelTime, ...]
    calls: tuple[CallTime, ...]
    modules: Modules
    launches: Mapping[int, LaunchQueue]
    pipelines: tuple[PipelineStep, ...]
    stragglers: tuple[Straggler, ...]
    critical_path: CriticalPath | None
    memory: Mapping[int, tuple[MemoryCurve, ...]]
    flops: Flops
    findings: tuple[Finding, ...]
    waits: Mapping[int, int]
    """Nanoseconds each rank waited in matched collectives for the last one to come, without its first collective of the window,
    which takes up how ranks began."""
    timeline: Timeline
    """What ran when on each rank, on one clock; joined and cut so that it can be drawn."""
    unseen: tuple[str, ...] = field(default=())
    """What the profiles do not show, in sentences."""
