"""What to change first. Each rule is a small function of the answers: it looks for one thing, and either gives what it found,
with the numbers it rests on and what it would bring, or nothing, where the evidence is thin.

A gain is what the step would lose if the thing were gone and nothing else came in its place: an upper bound, and not to be
added up, since two findings may be about the same time.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from shardwise.trace.answers import Explanation, Finding
from shardwise.trace.axes import UNKNOWN

ENOUGH = 0.02
"""Share of a step below which nothing is said."""

Rule = Callable[[Explanation], Finding | None]

_SINGLE_PRECISION = re.compile(
    r"sgemm|_s884gemm_f32|gemm\w*_kernel<float|simt_\w*f32|fp32_gemm|implicit_convolve_sgemm"
)
_TENSOR_CORES = re.compile(r"tf32|tensorop|s1688|s16816|h884|h1688|bf16|f16")
_ALLOCATE = re.compile(r"^(cuda|hip)(Malloc|Free)(Host|Async|Managed|Array)?$")
_WAIT = re.compile(r"Synchronize|^cudaMemcpy$|^hipMemcpyWithStream$")
HALF = 0.5
"""Tensor cores multiply several times faster than single precision; half of the time is a cautious part of that."""


def findings(answers: Explanation) -> tuple[Finding, ...]:
    """All that the rules find, the largest gain first."""
    found = [finding for rule in RULES if (finding := rule(answers)) is not None]
    return tuple(sorted(found, key=lambda one: (-one.gain, one.rule)))


def _finding(
    answers: Explanation, rule: str, gain: float, title: str, advice: str, evidence: list[str], ranks: list[int]
) -> Finding | None:
    """A finding, unless it is too small to matter."""
    share = gain / answers.step_time if answers.step_time else 0.0
    if share < ENOUGH:
        return None
    hours = 24 * max(answers.world, len(answers.seen)) * min(share, 1.0)
    return Finding(rule, title, advice, tuple(evidence), tuple(ranks), int(gain), share, hours)


def _steps(answers: Explanation) -> int:
    return max(len(answers.steps), 1)


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.2f} ms"


def _mean(answers: Explanation, of_rank: dict[int, int]) -> float:
    """Of the ranks seen, in one step."""
    return sum(of_rank.values()) / max(len(answers.seen), 1) / _steps(answers)


def _idle(answers: Explanation, cause: str) -> tuple[float, list[int]]:
    """Mean idle time of a cause in a step, and the ranks that have more than the mean."""
    of_rank = {rank: causes.get(cause, 0) for rank, causes in answers.idle.items()}
    mean = _mean(answers, of_rank)
    return mean, [rank for rank, value in of_rank.items() if value >= mean * _steps(answers) and value]


def host_bound(answers: Explanation) -> Finding | None:
    """The device waits for launches."""
    if not answers.launches:
        return None
    gain, ranks = _idle(answers, "host")
    queues = list(answers.launches.values())
    launched = sum(q.launches for q in queues)
    late = sum(q.late for q in queues)
    if launched < 100 or late < 0.05 * launched:
        return None
    pace = sorted(q.launch_time for q in queues)[len(queues) // 2]
    short = sum(q.short for q in queues)
    evidence = [
        f"the device is idle {_ms(gain)} a step because the host launched late",
        f"{late} of {launched} kernels were launched when nothing was left to run",
        f"the host takes {pace / 1e3:.1f} us from launch to launch; {short / launched:.0%} of kernels are shorter",
    ]
    advice = "launch less often: torch.compile or CUDA graphs, fused operators, a larger microbatch; or do less between launches"
    return _finding(answers, "host_bound", gain, "The host launches too slowly", advice, evidence, ranks)


def synchronisation(answers: Explanation) -> Finding | None:
    """The host waits for the device, and the device then for the host."""
    gain, ranks = _idle(answers, "synchronisation")
    waits = [call for call in answers.calls if _WAIT.search(call.name)]
    if not waits:
        return None
    most = sorted(waits, key=lambda call: -call.total)[:3]
    evidence = [f"the device is idle {_ms(gain)} a step after the host had waited for it"]
    evidence += [
        f"{call.name}: {call.count / _steps(answers) / len(answers.seen):.1f} a step and rank" for call in most
    ]
    advice = "do not read values of the device in the step: no .item(), .cpu(), print or bool() of a tensor, no nonzero or masks"
    return _finding(answers, "synchronisation", gain, "The host waits for the device", advice, evidence, ranks)


def data_stall(answers: Explanation) -> Finding | None:
    """The next batch is not there."""
    gain, ranks = _idle(answers, "data")
    evidence = [f"the device is idle {_ms(gain)} a step while a batch is fetched"]
    advice = "more loading workers, prefetching, pinned memory; or tokenise and pack the data beforehand"
    return _finding(answers, "data_stall", gain, "Steps wait for data", advice, evidence, ranks)


def exposed_axis(answers: Explanation) -> Finding | None:
    """Traffic of an axis that nothing hides: the axis that has most of it."""
    by_axis: dict[str, float] = {}
    for row in answers.axes:
        moved = sum(max(m.exposed - m.wait, 0) for m in row.ranks.values())
        by_axis[row.axis] = by_axis.get(row.axis, 0.0) + moved / max(len(answers.seen), 1) / _steps(answers)
    if not by_axis:
        return None
    axis = max(by_axis, key=lambda one: by_axis[one])
    rows = [row for row in answers.axes if row.axis == axis]
    whose = "communication of no named group" if axis == UNKNOWN else f"traffic of {axis}"
    evidence = [f"{_ms(by_axis[axis])} a step of {whose} is hidden behind no computing"]
    for row in rows[:3]:
        total = row.total
        speed = f", {total.bus_bandwidth / 1e9:.1f} GB/s" if total.bus_bandwidth else ""
        evidence.append(
            f"{row.collective}: {total.messages / _steps(answers) / len(row.ranks):.0f} messages a step and rank{speed}"
        )
    advice = _ADVICE_BY_AXIS.get(
        axis, "overlap it with computing, or send less: larger buckets, fewer ranks in the group"
    )
    return _finding(
        answers,
        "exposed_axis",
        by_axis[axis],
        f"{whose.capitalize()} is exposed",
        advice,
        evidence,
        sorted(rows[0].ranks),
    )


_ADVICE_BY_AXIS = {
    "tensor": "fewer tensor ranks, or keep them inside a node; sequence parallel, overlapped products (async tensor parallelism)",
    "shard": "prefetch the next layer, reduce gradients during the backward pass, larger microbatches, or shard within a node only",
    "replicate": "reduce gradients during the backward pass, larger buckets, more accumulation before a step",
    "context": "overlap the ring with attention, fewer context ranks, or longer sequences on each",
    "expert": "fewer expert ranks, keep them inside a node, overlap dispatch with the shared expert",
    "pipeline": "overlap sends with computing, and larger microbatches so that there are fewer",
}


def small_messages(answers: Explanation) -> Finding | None:
    """Messages too small to use the link, measured against the fastest of the same axis."""
    best: dict[str, float] = {}
    for row in answers.axes:
        if row.total.timed:
            best[row.axis] = max(best.get(row.axis, 0.0), row.total.bus_bandwidth)
    worst: tuple[float, str, str, list[str], list[int]] | None = None
    for row in answers.axes:
        total = row.total
        if (
            total.sized < 20 * len(row.ranks)
            or not total.bytes
            or total.bytes / total.sized > 4 * 2**20
            or not total.timed
        ):
            continue
        ideal = total.bytes * 1e9 / best[row.axis]
        lost = min(total.exposed, total.timed - ideal) / max(len(answers.seen), 1) / _steps(answers)
        evidence = [
            f"{total.messages / _steps(answers) / len(row.ranks):.0f} {row.collective} messages a step and rank, "
            f"{total.bytes / total.sized / 1024:.0f} KiB each",
            f"they reach {total.bus_bandwidth / 1e9:.2f} GB/s, others of this axis {best[row.axis] / 1e9:.2f} GB/s",
        ]
        if total.bus_bandwidth < 0.5 * best[row.axis] and (worst is None or lost > worst[0]):
            worst = (lost, row.axis, row.collective, evidence, sorted(row.ranks))
    if worst is None:
        return None
    lost, axis, collective, evidence, ranks = worst
    advice = "send fewer and larger messages: larger buckets, one flat tensor, more layers to a sharded unit"
    return _finding(
        answers, "small_messages", lost, f"Messages of {axis} ({collective}) are small", advice, evidence, ranks
    )


def slow_rank(answers: Explanation) -> Finding | None:
    """One rank that others wait for."""
    if not answers.stragglers:
        return None
    worst = answers.stragglers[0]
    why = "its own work takes longer" if worst.reason == "compute" else "it comes late to collectives"
    advice = (
        "look at this device: clocks, temperature, errors, neighbours; if it is always the same machine, take it out"
        if worst.reason == "compute"
        else "look at this rank's host: data loading, logging, checkpoints, another process on its cores"
    )
    return _finding(
        answers,
        "slow_rank",
        worst.excess,
        f"Rank {worst.rank} holds the others up: {why}",
        advice,
        [worst.evidence],
        [worst.rank],
    )


def imbalance(answers: Explanation) -> Finding | None:
    """Ranks wait for each other in collectives, and no single one is to blame."""
    if answers.stragglers or len(answers.seen) < 2:
        return None
    matched = sum(row.total.matched for row in answers.axes)
    exposed = {rank: numbers["exposed_communication"] for rank, numbers in answers.ranks.items()}
    gain = min(_mean(answers, dict(answers.waits)), _mean(answers, exposed))
    uncertain = max((clock.uncertainty for clock in answers.clocks.values()), default=0)
    if matched < 20 or uncertain < 0 or uncertain * matched / len(answers.seen) / _steps(answers) > 0.5 * gain:
        return None
    by_axis = sorted(answers.axes, key=lambda row: -row.total.wait)[:2]
    evidence = [f"ranks wait {_ms(gain)} a step in collectives for the last one to come ({matched} messages matched)"]
    evidence += [
        f"{row.axis} {row.collective}: {row.total.wait / max(row.total.summed, 1):.0%} of its time is waiting"
        for row in by_axis
    ]
    advice = "give ranks the same work: pack sequences to one length, spread tokens evenly over experts, even out pipeline stages"
    return _finding(answers, "imbalance", gain, "Ranks wait for each other", advice, evidence, list(answers.seen))


def bubble(answers: Explanation) -> Finding | None:
    """The pipeline's bubble."""
    steps = [one for one in answers.pipelines if len(one.members) > 1 and len(one.ranks) == len(one.members)]
    if not steps:
        return None
    mean = sum(sum(r.bubble for r in one.ranks.values()) / len(one.ranks) for one in steps) / len(steps)
    share = sum(one.share for one in steps) / len(steps)
    one = steps[0]
    name = one.schedule or "a schedule of its own"
    evidence = [
        f"a rank of the pipeline does not work for {_ms(mean)} a step, {share:.0%} of its window",
        f"{name}, {len(one.members)} ranks, {one.microbatches} microbatches, {one.stages_per_rank} stages a rank",
    ]
    advice = f"more microbatches ({2 * one.microbatches} would halve it), interleaved stages, or a zero-bubble schedule"
    return _finding(answers, "bubble", mean * HALF, "The pipeline has a bubble", advice, evidence, sorted(one.members))


def tiny_kernels(answers: Explanation) -> Finding | None:
    """Kernels so short that starting them costs as much as running them, though the host keeps up."""
    queues = list(answers.launches.values())
    launched = sum(q.launches for q in queues)
    gain = _mean(answers, {rank: q.short_gaps for rank, q in answers.launches.items()})
    if launched < 1000 or sum(q.short for q in queues) < 0.5 * launched:
        return None
    evidence = [
        f"{launched / len(queues) / _steps(answers):.0f} kernels a step and rank, "
        f"{sum(q.short for q in queues) / launched:.0%} shorter than a launch takes",
        f"{_ms(gain)} a step lie in the short gaps between kernels that were launched in time",
    ]
    advice = "fuse: torch.compile, fused attention, norms and optimizers, foreach operations"
    return _finding(answers, "tiny_kernels", gain, "Many tiny kernels", advice, evidence, sorted(answers.launches))


def copies(answers: Explanation) -> Finding | None:
    """Copies between host and device that nothing hides."""
    rows = [k for k in answers.kernels if k.kind == "copy" and re.search(r"HtoD|DtoH", k.name)]
    across = sum(k.total for k in rows) / max(len(answers.seen), 1) / _steps(answers)
    exposed = _mean(answers, dict(answers.exposed_copy))
    if not rows:
        return None
    evidence = [
        f"{_ms(across)} of copies between host and device a step and rank, {_ms(exposed)} of all copies behind nothing"
    ]
    evidence += [f"{k.name}: {k.count} copies, {_ms(k.total)}" for k in rows[:3]]
    pageable = any("Pageable" in k.name for k in rows)
    advice = (
        "pinned host memory and " if pageable else ""
    ) + "non_blocking copies on a stream of their own; make tensors on the device"
    return _finding(
        answers,
        "copies",
        min(across, exposed),
        "Copies between host and device are exposed",
        advice,
        evidence,
        sorted(answers.exposed_copy),
    )


def single_precision(answers: Explanation) -> Finding | None:
    """Products in float32 that tensor cores could do."""
    rows = [
        k
        for k in answers.kernels
        if k.kind == "compute" and _SINGLE_PRECISION.search(k.name) and not _TENSOR_CORES.search(k.name)
    ]
    total = sum(k.total for k in rows) / max(len(answers.seen), 1) / _steps(answers)
    if not rows:
        return None
    evidence = [
        f"{_ms(total)} a step in {len(rows)} kernels that multiply in float32",
        *(f"{k.name[:80]}: {_ms(k.total)}" for k in rows[:3]),
    ]
    advice = "bfloat16 (float16 before Ampere), or torch.set_float32_matmul_precision('high') where the chip has TF32"
    return _finding(
        answers,
        "single_precision",
        total * HALF,
        "Products in single precision",
        advice,
        evidence,
        sorted(rows[0].ranks),
    )


def loose_optimizer(answers: Explanation) -> Finding | None:
    """An optimizer that launches kernels one parameter at a time."""
    row = next((m for m in answers.modules.rows if m.module == "(phase optimizer)"), None)
    queues = list(answers.launches.values())
    if row is None or not queues:
        return None
    ranks = max(len(row.ranks), 1)
    count = row.kernels / ranks / _steps(answers)
    device = row.total / ranks / _steps(answers)
    pace = sorted(q.launch_time for q in queues)[len(queues) // 2]
    if count < 200:
        return None
    evidence = [
        f"{count:.0f} kernels a step in the optimizer, {device / count / 1e3:.1f} us each; a launch takes {pace / 1e3:.1f} us"
    ]
    advice = "a fused or foreach optimizer (fused=True), which takes all parameters in a few launches"
    return _finding(
        answers,
        "loose_optimizer",
        count * pace - device,
        "The optimizer is not fused",
        advice,
        evidence,
        sorted(row.ranks),
    )


def allocator(answers: Explanation) -> Finding | None:
    """The allocator asks the driver for memory during steps."""
    rows = [call for call in answers.calls if _ALLOCATE.match(call.name)]
    total = sum(call.total for call in rows) / max(len(answers.seen), 1) / _steps(answers)
    if sum(call.count for call in rows) < 2:
        return None
    evidence = [f"{call.name}: {call.count} calls in the steps, {_ms(call.total)}" for call in rows[:4]]
    advice = "PYTORCH_ALLOC_CONF=expandable_segments:True, equal shapes in every step, or less memory in use"
    return _finding(
        answers,
        "allocator",
        total,
        "The allocator goes to the driver",
        advice,
        evidence,
        sorted({r for c in rows for r in c.ranks}),
    )


def recompute(answers: Explanation) -> Finding | None:
    """Time spent on computing activations again."""
    total = sum(m.passes.get("recompute", 0) for m in answers.modules.rows)
    everything = sum(m.total for m in answers.modules.rows)
    if not everything or total < 0.1 * everything:
        return None
    gain = total / max(len(answers.seen), 1) / _steps(answers)
    most = sorted(answers.modules.rows, key=lambda m: -m.passes.get("recompute", 0))[:3]
    evidence = [f"{total / everything:.0%} of the device's time computes activations once more"]
    evidence += [f"{m.module}: {_ms(m.passes['recompute'])}" for m in most]
    advice = "if memory allows, recompute less: only attention, or only some layers"
    return _finding(answers, "recompute", gain, "Recomputation takes time", advice, evidence, list(answers.seen))


RULES: tuple[Rule, ...] = (
    host_bound, synchronisation, data_stall, exposed_axis, small_messages, slow_rank, imbalance, bubble, tiny_kernels, copies,
    single_precision, loose_optimizer, allocator, recompute,
)  # fmt: skip
