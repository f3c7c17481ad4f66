"""The answers about a profile as plain records, one for each question. Times are integer nanoseconds. Each answer is kept for every
rank seen, and `spread` says how the ranks differ.

The records hold no columns of events and no code that looks at them, so a report, a comparison or a program can use them as they
are; `as_dict` of the ledger makes JSON of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.ledger import Timeline

CAUSES = ("host", "synchronisation", "data", "peer", "pipeline", "device", "unknown")
"""Why a device had nothing to run: the host launched late; the host had waited for the device and the queue ran dry; the next
batch was not ready; the host waited for other ranks, or for another stage; the kernel was launched in time but began later (its
stream waited for another, or the launch took that long); the profile does not tell."""

PASSES = ("forward", "recompute", "backward", "other")
"""Which pass launched a kernel, as far as the profile shows it; `other` is outside the model (optimizer, data)."""


@dataclass(frozen=True)
class Spread:
    """How one quantity differs over the ranks seen."""

    total: float
    mean: float
    lowest: float
    lowest_rank: int
    highest: float
    highest_rank: int


def spread(values: Mapping[int, float]) -> Spread:
    """Total, mean, and the ranks with the least and the most of it (the lowest rank of equals)."""
    if not values:
        return Spread(0, 0.0, 0, -1, 0, -1)
    low = min(values, key=lambda rank: (values[rank], rank))
    high = max(values, key=lambda rank: (values[rank], -rank))
    total = sum(values.values())
    return Spread(total, total / len(values), values[low], low, values[high], high)


@dataclass(frozen=True)
class Clock:
    """A rank's clock against that of the reference rank, from collectives that both took part in."""

    offset: int
    """Nanoseconds to add to this rank's times; 0 if smaller than the uncertainty."""
    uncertainty: int
    """Half of the matched collectives agree with the offset to within this; -1 when there are none."""
    matched: int
    """Collectives that the offset was found from."""


@dataclass(frozen=True)
class CommTime:
    """Collective events of one axis and kind on one rank."""

    messages: int
    """How many."""
    bytes: float
    """On the wire, by the convention of the ledger's traffic; 0 where sizes are not recorded."""
    payload: float
    """Of the whole tensor, for the algorithm bandwidth."""
    sized: int
    """Those whose size is known."""
    time: int
    """While at least one was in flight."""
    exposed: int
    """Of that, while nothing was computed."""
    summed: int
    """Sum of durations; events that overlap count twice."""
    wait: int
    """Of the summed time, waiting for the last rank to arrive; 0 where no other rank was seen."""
    matched: int
    """Those that were found on another rank too, so that `wait` is known."""
    timed: int = 0
    """Summed time without waiting of those whose size is known, for the bandwidths."""

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second on the wire of a rank while data moved (`busbw` of nccl-tests)."""
        return self.bytes * 1e9 / self.timed if self.timed else 0.0

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the tensor a second (`algbw` of nccl-tests)."""
        return self.payload * 1e9 / self.timed if self.timed else 0.0


@dataclass(frozen=True)
class AxisTime:
    """One axis and collective over the ranks."""

    axis: str
    """An axis of the layout, or the name of a process group that belongs to none."""
    collective: str
    ranks: Mapping[int, CommTime]
    group: int = 0
    """Ranks in the process group, the most seen; 0 when not known."""

    @property
    def total(self) -> CommTime:
        """Over all ranks seen."""
        rows = list(self.ranks.values())
        return CommTime(*(sum(getattr(row, name) for row in rows) for name in CommTime.__dataclass_fields__))


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name; on a profile without a device, operators with their self time."""

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
    """The module that launched most of its time."""

    @property
    def mean(self) -> float:
        """Of one call."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class CallTime:
    """Calls of one function of the driver or runtime."""

    name: str
    count: int
    total: int
    ranks: Mapping[int, int]
    """Nanoseconds on each rank."""


@dataclass(frozen=True)
class ModuleTime:
    """Device time that a module launched itself, without its submodules."""

    module: str
    """Its name, or `(phase optimizer)` and the like for a part of a step outside the model."""
    passes: Mapping[str, int]
    """Summed nanoseconds by pass, over the ranks seen."""
    kernels: int
    flops: float
    """Of its GEMMs and attention, where shapes were recorded."""
    ranks: Mapping[int, int]
    """Summed nanoseconds on each rank."""

    @property
    def total(self) -> int:
        """All passes."""
        return sum(self.passes.values())


@dataclass(frozen=True)
class Modules:
    """Device time by module, and how much of it could be attributed."""

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
    """Kernels that the device waited for: launched when it had nothing left to run."""
    mean_depth: float
    """Kernels launched and not yet begun, mean over the window."""
    deepest: int
    empty: int
    """Nanoseconds in which nothing was queued and nothing ran."""
    short: int
    """Kernels shorter than the time from one launch to the next: the host cannot keep up with them."""
    launch_time: int
    """Median nanoseconds from one launch to the next on the thread that launches most."""
    short_gaps: int
    """Nanoseconds in gaps no longer than `launch_time` before kernels that were launched in time: the cost of starting a kernel."""


@dataclass(frozen=True)
class PipelineRank:
    """What one rank of a pipeline did in one step."""

    actions: tuple[str, ...]
    start: int
    """First action, on the reference clock."""
    end: int
    work: int
    bubble: int
    """Nanoseconds of the pipeline's window in which this rank did not work: before its first action, waiting for messages, after
    its last action."""
    scheduled: int
    """The bubble when the executed lists are played with the measured work of each action and delay of each message."""
    instant: int
    """The same when messages arrive at once: the bubble of the schedule alone."""


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
    """The name of the schedule that was executed; empty when it is unknown or ranks are missing."""
    stages_per_rank: int
    microbatches: int

    @property
    def share(self) -> float:
        """The share of the ranks' time that is bubble."""
        total = self.window * len(self.ranks)
        return sum(rank.bubble for rank in self.ranks.values()) / total if total else 0.0


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for."""

    rank: int
    reason: str
    """`compute`: its own work takes longer; `late`: it arrives late at collectives with no more work than others."""
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
    """Those with the most time on it."""
    segments: tuple[tuple[int, str, str, int, int], ...]
    """Rank, category, name, start and end of the longest segments, a few thousand at most."""


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
    """Thinned; the highest point of each piece is kept."""


@dataclass(frozen=True)
class Flops:
    """Operations of the GEMMs and attention whose shapes were recorded."""

    convention: str
    ranks: Mapping[int, float]
    peak: float
    """Operations a second of one device; 0 when not known."""
    utilisation: Mapping[int, float]
    """Operations over span times peak; empty when the peak is not known."""


@dataclass(frozen=True)
class Finding:
    """One thing to change, and what it would gain."""

    rule: str
    title: str
    advice: str
    evidence: tuple[str, ...]
    ranks: tuple[int, ...]
    gain: int
    """Nanoseconds a step that could be gained at most, on the ranks that hold the others up."""
    share: float
    """Of the step."""
    gpu_hours_per_day: float
    """Device hours gained in a day of the whole job."""


@dataclass(frozen=True)
class Explanation:
    """All answers. What the profiles do not show is empty, and `unseen` says why."""

    world: int
    """Ranks of the job, as the profiles say."""
    seen: tuple[int, ...]
    devices: Mapping[int, str]
    """Name of each rank's device; empty for a rank that ran on the host alone."""
    steps: tuple[int, ...]
    """Profiler steps looked at; empty when the whole file was."""
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
    """Copies that neither compute nor communication overlapped, on each rank."""
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
    """Nanoseconds each rank waited in matched collectives for the last rank to arrive, without the first collective of the window,
    whose waiting shows only how the ranks began."""
    timeline: Timeline
    """What ran when on each rank, on one clock, short enough to draw."""
    unseen: tuple[str, ...] = ()
    """What the profiles do not show, in sentences."""

    @property
    def step_count(self) -> int:
        """Steps looked at; the whole file counts as one."""
        return max(len(self.steps), 1)

    @property
    def slowest(self) -> int:
        """The rank whose steps took longest."""
        return max(self.ranks, key=lambda rank: self.ranks[rank]["span"], default=0)

    def per_step(self, total: float) -> float:
        """A sum over ranks and steps, as the mean of one step of one rank."""
        return total / max(len(self.seen), 1) / self.step_count
