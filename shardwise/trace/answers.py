"""The answers about a profile as plain records, one for each question. Times are integer nanoseconds. Each answer covers every
profiled rank, and `spread` shows how the ranks differ.

The records hold no event columns and no analysis code, so reports, comparisons and other programs can use them directly; the
ledger's `as_dict` converts them to JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.ledger import Timeline

CAUSES = ("host", "synchronisation", "data", "peer", "pipeline", "device", "unknown")
"""Why a device was idle: the host launched late; the host had synchronised with the device, so the queue was empty; the next batch
was not ready; the host waited for other ranks, or for another pipeline stage; the kernel was launched in time but started late (its
stream waited for another, or by launch latency); unknown."""

PASSES = ("forward", "recompute", "backward", "other")
"""The pass that launched a kernel; `other` is outside the model (optimizer, data)."""


@dataclass(frozen=True)
class Spread:
    """How one quantity differs across the profiled ranks."""

    total: float
    mean: float
    lowest: float
    lowest_rank: int
    highest: float
    highest_rank: int


def spread(values: Mapping[int, float]) -> Spread:
    """Total, mean, minimum and maximum over ranks (of equals the lowest rank)."""
    if not values:
        return Spread(0, 0.0, 0, -1, 0, -1)
    low = min(values, key=lambda rank: (values[rank], rank))
    high = max(values, key=lambda rank: (values[rank], -rank))
    total = sum(values.values())
    return Spread(total, total / len(values), values[low], low, values[high], high)


@dataclass(frozen=True)
class Clock:
    """A rank's clock relative to the reference rank, from collectives of both."""

    offset: int
    """Nanoseconds to add to this rank's times; 0 if smaller than the uncertainty."""
    uncertainty: int
    """Median absolute deviation of matched collectives from the offset; -1 if there are none."""
    matched: int
    """Collectives that the offset was computed from."""


@dataclass(frozen=True)
class CommTime:
    """Collective events of one axis and kind on one rank."""

    messages: int
    """Number of events; all kernels of one collective count once."""
    bytes: float
    """On the wire, by the convention of the ledger's traffic; 0 where sizes are not recorded."""
    payload: float
    """Bytes of the whole tensors, for the algorithm bandwidth."""
    sized: int
    """Events whose size is known."""
    time: int
    """While at least one was in flight."""
    exposed: int
    """Part of `time` that no compute overlapped."""
    summed: int
    """Sum of durations; events that overlap count twice."""
    wait: int
    """Part of `summed` spent waiting for the last rank to arrive; 0 where no other rank was profiled."""
    matched: int
    """Events matched with another rank, so that `wait` is known."""
    timed: int = 0
    """Summed time without waiting of events whose size is known, for the bandwidths."""

    @property
    def bus_bandwidth(self) -> float:
        """Wire bytes per second of a rank, without waiting (`busbw` of nccl-tests)."""
        return self.bytes * 1e9 / self.timed if self.timed else 0.0

    @property
    def algorithm_bandwidth(self) -> float:
        """Tensor bytes per second (`algbw` of nccl-tests)."""
        return self.payload * 1e9 / self.timed if self.timed else 0.0


@dataclass(frozen=True)
class AxisTime:
    """One axis and collective on all profiled ranks."""

    axis: str
    """An axis of the layout, or the name of a process group that belongs to none."""
    collective: str
    ranks: Mapping[int, CommTime]
    group: int = 0
    """Ranks in the largest such process group; 0 if unknown."""

    @property
    def total(self) -> CommTime:
        """Sum over the profiled ranks."""
        rows = list(self.ranks.values())
        return CommTime(*(sum(getattr(row, name) for row in rows) for name in CommTime.__dataclass_fields__))


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name; in a CPU-only profile, operators with their self time."""

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
    """The module with most of its time."""

    @property
    def mean(self) -> float:
        """Of one call."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class CallTime:
    """Calls of one driver or runtime function."""

    name: str
    count: int
    total: int
    ranks: Mapping[int, int]
    """Nanoseconds on each rank."""


@dataclass(frozen=True)
class ModuleTime:
    """Device time of kernels that a module launched itself, without its submodules."""

    module: str
    """Its name, or `(phase optimizer)` and the like for a part of a step outside the model."""
    passes: Mapping[str, int]
    """Nanoseconds by pass, summed over the profiled ranks."""
    kernels: int
    flops: float
    """FLOPs of its GEMMs, convolutions and attention, where shapes were recorded."""
    ranks: Mapping[int, int]
    """Summed nanoseconds on each rank."""

    @property
    def total(self) -> int:
        """All passes."""
        return sum(self.passes.values())


@dataclass(frozen=True)
class Modules:
    """Device time by module, and the share that could be attributed."""

    rows: tuple[ModuleTime, ...]
    attributed: Mapping[int, float]
    """Share of each rank's device time attributed to a module or a named phase."""
    in_modules: Mapping[int, float]
    """Share attributed to a module."""


@dataclass(frozen=True)
class LaunchQueue:
    """How far the host is ahead of the device on one rank."""

    launches: int
    median_delay: int
    """Nanoseconds from a launch call to the start of its kernel."""
    longest_delay: int
    late: int
    """Kernels launched when the device had already run out of work."""
    mean_depth: float
    """Kernels launched but not started, mean over the window."""
    deepest: int
    empty: int
    """Nanoseconds in which no kernel was queued or running."""
    short: int
    """Kernels shorter than `launch_time`: the host cannot keep up with them."""
    launch_time: int
    """Median nanoseconds between launches on the thread with most launches."""
    short_gaps: int
    """Nanoseconds in gaps up to `launch_time` before kernels that were launched in time: kernel start overhead."""


@dataclass(frozen=True)
class PipelineRank:
    """What one rank of a pipeline did in one step."""

    actions: tuple[str, ...]
    start: int
    """First action, on the reference clock."""
    end: int
    work: int
    bubble: int
    """Nanoseconds of the pipeline's window in which this rank did not work: before its first action, waiting for P2P messages,
    after its last action."""
    scheduled: int
    """Bubble of the simulated schedule with the measured work of each action and latency of each P2P message."""
    instant: int
    """The same with zero latency: the bubble of the schedule alone."""
    times: tuple[tuple[int, int], ...] = ()
    """Start and end of the work of each action, from the start of the pipeline's window. Waiting in an action is taken to come
    first, so the gaps between actions are the bubble."""


@dataclass(frozen=True)
class PipelineStep:
    """One step of one pipeline group."""

    step: int
    members: tuple[int, ...]
    """Global ranks, by stage."""
    window: int
    """Nanoseconds from the first work on any rank to the end of the last."""
    ranks: Mapping[int, PipelineRank]
    schedule: str
    """Name of the executed schedule; empty if unknown or if ranks are missing."""
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
    """`compute`: its own work takes longer; `late`: it arrives late at collectives without more work than others."""
    excess: int
    """Nanoseconds a step: above the median compute of its peers, or later than the rank before it."""
    share: float
    """Of the step."""
    evidence: str


@dataclass(frozen=True)
class CriticalPath:
    """The chain of work and waiting across ranks that ends with the last event; its parts add up to `length`."""

    length: int
    categories: Mapping[str, int]
    """`compute`, `communication AXIS`, `copy`, `host`, `idle`."""
    ranks: Mapping[int, int]
    kernels: Mapping[str, int]
    """Kernels with the most time on the path."""
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
    """Peak bytes reserved by the allocator."""
    times: tuple[int, ...]
    allocated: tuple[int, ...]
    """Downsampled to the maximum of each bin."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of the GEMMs, convolutions and attention whose shapes were recorded."""

    convention: str
    ranks: Mapping[int, float]
    peak: float
    """FLOP/s of one device; 0 if unknown."""
    utilisation: Mapping[int, float]
    """FLOPs over span times peak; empty if the peak is unknown."""
    known: Mapping[int, float] = field(default_factory=dict)
    """Share of the time of GEMM and attention kernels whose operators have recorded shapes: what is missing of it is missing in
    the FLOPs, too."""


@dataclass(frozen=True)
class Finding:
    """One thing to change, and what it would gain."""

    rule: str
    title: str
    advice: str
    evidence: tuple[str, ...]
    ranks: tuple[int, ...]
    gain: int
    """Upper bound in nanoseconds a step."""
    share: float
    """Of the step."""
    gpu_hours_per_day: float
    """Device-hours gained per day of the whole job."""


@dataclass(frozen=True)
class Explanation:
    """All answers. What the profiles do not contain is empty, and `unseen` says why."""

    world: int
    """Ranks of the job, as the profiles say."""
    seen: tuple[int, ...]
    """Profiled ranks."""
    devices: Mapping[int, str]
    """Device name of each rank; empty for a CPU-only rank."""
    steps: tuple[int, ...]
    """Profiler steps analysed; empty if the whole file was."""
    step_time: int
    """Mean nanoseconds of a step on the slowest rank; of the whole window if there are no steps."""
    ranks: Mapping[int, Mapping[str, int]]
    """`span`, `compute`, `communication`, `copy`, `idle`, `exposed_communication` of each rank."""
    spreads: Mapping[str, Spread]
    """The spread of each over the ranks."""
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
    """Nanoseconds each rank waited in matched collectives for the last rank to arrive. Without the first collective of the window,
    where waits only show when the ranks began."""
    timeline: Timeline
    """Spans of each rank on one clock, downsampled for drawing."""
    unseen: tuple[str, ...] = ()
    """What the profiles do not contain, in sentences."""

    step_counts: Mapping[int, int] = field(default_factory=dict)
    """Steps analysed on each rank, 1 for a whole file; a rank that is not here has all of `steps`."""

    def steps_on(self, *ranks: int) -> int:
        """Steps of these ranks, added up."""
        return max(sum(self.step_counts.get(rank, max(len(self.steps), 1)) for rank in ranks), 1)

    @property
    def slowest(self) -> int:
        """The rank whose steps took longest."""
        return max(self.ranks, key=lambda rank: self.ranks[rank]["span"] / self.steps_on(rank), default=0)

    def per_step(self, total: float) -> float:
        """A sum over ranks and steps, as the mean of one step of one rank."""
        return total / self.steps_on(*self.seen)
