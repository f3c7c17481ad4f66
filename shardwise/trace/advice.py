"""What to change first, and what the profiles do not contain. Each rule is a small function of the answers: it looks for one
bottleneck and returns advice with its evidence, or None where the evidence is weak.

A gain is an upper bound: how much shorter the step would be without the bottleneck, if no other took its place. Gains do not add
up, since two findings may concern the same time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from shardwise.run.problems import counted
from shardwise.trace.advice_idle import (
    Advice,
    data_stall,
    host_bound,
    idle_device,
    launch_time,
    milliseconds,
    synchronisation,
)
from shardwise.trace.answers import Explanation, Finding
from shardwise.trace.comms.describe import UNKNOWN

MIN_SHARE = 0.02
"""Findings below this share of a step are not reported."""
HALF = 0.5
"""Cautious estimate of the share that can be gained: twice the microbatches halve a bubble, and tensor cores are several times
faster than single precision."""

_SINGLE_PRECISION = re.compile(
    r"sgemm|_s884gemm_f32|gemm\w*_kernel<float|simt_\w*f32|fp32_gemm|implicit_convolve_sgemm"
)
_TENSOR_CORES = re.compile(r"tf32|tensorop|s1688|s16816|h884|h1688|bf16|f16")
_ALLOCATE = re.compile(r"^(cuda|hip)(Malloc|Free)(Host|Async|Managed|Array)?$")


def _speed(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.1f} GB/s" if bandwidth >= 1e8 else f"{bandwidth / 1e6:.1f} MB/s"


_ADVICE_BY_AXIS = {
    "tensor": "fewer tensor ranks, or keep them inside a node; sequence parallel, overlapped GEMMs (async tensor parallelism)",
    "shard": "prefetch the next layer, reduce gradients during the backward pass, larger microbatches, or shard within a node only",
    "replicate": "reduce gradients during the backward pass, larger buckets, more accumulation before a step",
    "context": "overlap the ring with attention, fewer context ranks, or longer sequences on each",
    "expert": "fewer expert ranks, keep them inside a node, overlap dispatch with the shared expert",
    "pipeline": "overlap P2P messages with compute; larger microbatches, so that there are fewer messages",
}


def exposed_axis(answers: Explanation) -> Advice | None:
    """The axis with the most exposed communication."""
    by_axis: dict[str, float] = {}
    for row in answers.axes:
        exposed = sum(max(m.exposed - m.wait, 0) for m in row.ranks.values())
        by_axis[row.axis] = by_axis.get(row.axis, 0.0) + answers.per_step(exposed)
    if not by_axis:
        return None
    axis = max(by_axis, key=lambda one: by_axis[one])
    rows = [row for row in answers.axes if row.axis == axis]
    whose = "communication of no named group" if axis == UNKNOWN else f"communication of {axis}"
    evidence = [f"{milliseconds(by_axis[axis])} a step of {whose} is not overlapped by compute"]
    waited = answers.per_step(sum(min(m.exposed, m.wait) for row in rows for m in row.ranks.values()))
    if waited > by_axis[axis] / 20:
        evidence[0] += f", plus {milliseconds(waited)} of waiting there for the last rank to arrive"
    for row in rows[:3]:
        total = row.total
        fast = f", {_speed(total.bus_bandwidth)}" if total.bus_bandwidth else ""
        count = total.messages / answers.steps_on(*row.ranks)
        evidence.append(f"{row.collective}: {counted(round(count), 'message')} a step and rank{fast}")
    advice = _ADVICE_BY_AXIS.get(
        axis, "overlap it with compute, or communicate less: larger buckets, fewer ranks in the group"
    )
    return Advice(by_axis[axis], f"{whose.capitalize()} is exposed", advice, evidence, sorted(rows[0].ranks))


def small_messages(answers: Explanation) -> Advice | None:
    """Messages too small for the link's bandwidth, measured against the fastest collective of the same axis."""
    best: dict[str, float] = {}
    for row in answers.axes:
        best[row.axis] = max(best.get(row.axis, 0.0), row.total.bus_bandwidth)
    found: list[Advice] = []
    for row in answers.axes:
        total, ranks = row.total, len(row.ranks)
        if total.sized < 20 * ranks or not total.bytes or total.bytes / total.sized > 4 * 2**20 or not total.timed:
            continue
        if total.bus_bandwidth >= 0.5 * best[row.axis]:
            continue
        lost = answers.per_step(min(total.exposed, total.timed - total.bytes * 1e9 / best[row.axis]))
        evidence = [
            f"{total.messages / answers.steps_on(*row.ranks):.0f} {row.collective} messages a step and rank, "
            f"{total.bytes / total.sized / 1024:.0f} KiB each",
            f"they reach {_speed(total.bus_bandwidth)}, the fastest of this axis {_speed(best[row.axis])}",
        ]
        advice = "fewer and larger messages: larger buckets, one flat tensor, more layers per FSDP unit"
        title = f"Messages of {row.axis} ({row.collective}) are small"
        found.append(Advice(lost, title, advice, evidence, sorted(row.ranks)))
    return max(found, key=lambda one: one.gain, default=None)


def slow_rank(answers: Explanation) -> Advice | None:
    """One rank that others wait for."""
    if not answers.stragglers:
        return None
    worst = answers.stragglers[0]
    slow = worst.reason == "compute"
    why = "its own work takes longer" if slow else "it arrives late at collectives"
    advice = (
        "look at this device: clocks, temperature, errors, neighbours; if it is always the same machine, take it out"
        if slow
        else "look at this rank's host: data loading, logging, checkpoints, another process on its cores"
    )
    title = f"Rank {worst.rank} holds the others up: {why}"
    return Advice(worst.excess, title, advice, [worst.evidence], [worst.rank])


def imbalance(answers: Explanation) -> Advice | None:
    """Ranks wait for each other in collectives, and none is a straggler."""
    if answers.stragglers or len(answers.seen) < 2:
        return None
    matched = sum(row.total.matched for row in answers.axes)
    exposed = sum(numbers["exposed_communication"] for numbers in answers.ranks.values())
    gain = min(answers.per_step(sum(answers.waits.values())), answers.per_step(exposed))
    uncertain = max((clock.uncertainty for clock in answers.clocks.values()), default=0)
    if matched < 20 or uncertain < 0 or answers.per_step(uncertain * matched) > 0.5 * gain:
        return None
    by_axis = sorted((row for row in answers.axes if row.collective != "recv"), key=lambda row: -row.total.wait)[:2]
    evidence = [
        f"ranks wait {milliseconds(gain)} a step in collectives for the last rank to arrive ({matched} events matched in all steps)"
    ]
    evidence += [
        f"{row.axis} {row.collective}: {row.total.wait / max(row.total.summed, 1):.0%} of its time is waiting"
        for row in by_axis
    ]
    advice = (
        "give ranks the same work: pack sequences to one length, balance tokens over experts, even out pipeline stages"
    )
    return Advice(gain, "Ranks wait for each other", advice, evidence, answers.seen)


def bubble(answers: Explanation) -> Advice | None:
    """The pipeline's bubble."""
    steps = [one for one in answers.pipelines if len(one.members) > 1 and len(one.ranks) == len(one.members)]
    if not steps:
        return None
    mean = sum(sum(r.bubble for r in one.ranks.values()) / len(one.ranks) for one in steps) / len(steps)
    share = sum(one.share for one in steps) / len(steps)
    one = steps[0]
    evidence = [
        f"the bubble of a rank is {milliseconds(mean)} a step, {share:.0%} of the pipeline's window",
        f"{one.schedule or 'an unknown schedule'}, {len(one.members)} ranks, {one.microbatches} microbatches, "
        f"{one.stages_per_rank} stages a rank",
    ]
    advice = f"more microbatches ({2 * one.microbatches} would halve it), interleaved stages, or a zero-bubble schedule"
    return Advice(mean * HALF, "The pipeline has a bubble", advice, evidence, sorted(one.members))


def tiny_kernels(answers: Explanation) -> Advice | None:
    """Kernels so short that start overhead matters, even if the host keeps up."""
    queues = list(answers.launches.values())
    launched, short = sum(q.launches for q in queues), sum(q.short for q in queues)
    if launched < 1000 or short < 0.5 * launched:
        return None
    gain = answers.per_step(sum(q.short_gaps for q in queues))
    evidence = [
        f"{launched / answers.steps_on(*answers.launches):.0f} kernels a step and rank, "
        f"{short / launched:.0%} shorter than the time between launches",
        f"{milliseconds(gain)} a step in short gaps before kernels that were launched in time",
    ]
    advice = "fuse: torch.compile, fused attention, norms and optimizers, foreach operations"
    return Advice(gain, "Many tiny kernels", advice, evidence, sorted(answers.launches))


def copies(answers: Explanation) -> Advice | None:
    """Exposed memcpys between host and device."""
    rows = [k for k in answers.kernels if k.kind == "copy" and re.search(r"HtoD|DtoH", k.name)]
    if not rows:
        return None
    across, exposed = answers.per_step(sum(k.total for k in rows)), answers.per_step(sum(answers.exposed_copy.values()))
    evidence = [
        f"{milliseconds(across)} of copies between host and device a step and rank",
        f"{milliseconds(exposed)} a step and rank of all copies are exposed",
    ]
    evidence += [
        f"{k.name}: {answers.per_step(k.count):.1f} copies, {milliseconds(answers.per_step(k.total))} a step and rank"
        for k in rows[:3]
    ]
    pinned = "pinned host memory and " if any("Pageable" in k.name for k in rows) else ""
    advice = f"{pinned}non_blocking copies on a separate stream; create tensors on the device"
    title = "Copies between host and device are exposed"
    return Advice(min(across, exposed), title, advice, evidence, sorted(answers.exposed_copy))


def single_precision(answers: Explanation) -> Advice | None:
    """GEMMs in float32 without tensor cores."""
    rows = [
        k
        for k in answers.kernels
        if k.kind == "compute" and _SINGLE_PRECISION.search(k.name) and not _TENSOR_CORES.search(k.name)
    ]
    if not rows:
        return None
    total = answers.per_step(sum(k.total for k in rows))
    evidence = [
        f"{milliseconds(total)} a step and rank in {len(rows)} float32 GEMM kernels",
        *(f"{k.name[:80]}: {milliseconds(answers.per_step(k.total))} a step and rank" for k in rows[:3]),
    ]
    advice = "bfloat16 (float16 before Ampere), or torch.set_float32_matmul_precision('high') where the chip has TF32"
    return Advice(total * HALF, "GEMMs in single precision", advice, evidence, sorted(rows[0].ranks))


def loose_optimizer(answers: Explanation) -> Advice | None:
    """An optimizer that launches kernels for each parameter."""
    row = next((m for m in answers.modules.rows if m.module == "(phase optimizer)"), None)
    if row is None or not answers.launches:
        return None
    steps = answers.steps_on(*row.ranks)
    count, device = row.kernels / steps, row.total / steps
    if count < 200:
        return None
    launch = launch_time(answers)
    evidence = [
        f"{count:.0f} kernels a step in the optimizer, {device / count / 1e3:.1f} µs each; a launch takes {launch / 1e3:.1f} µs"
    ]
    advice = "a fused or foreach optimizer (fused=True), which updates all parameters in a few launches"
    return Advice(count * launch - device, "The optimizer is not fused", advice, evidence, sorted(row.ranks))


def allocator(answers: Explanation) -> Advice | None:
    """The caching allocator calls cudaMalloc or cudaFree during steps."""
    rows = [call for call in answers.calls if _ALLOCATE.match(call.name)]
    if sum(call.count for call in rows) < 2:
        return None
    total = answers.per_step(sum(call.total for call in rows))
    evidence = [
        f"{call.name}: {answers.per_step(call.count):.1f} calls, {milliseconds(answers.per_step(call.total))} a step and rank"
        for call in rows[:4]
    ]
    advice = "PYTORCH_ALLOC_CONF=expandable_segments:True, the same shapes in every step, or less memory in use"
    ranks = sorted({rank for call in rows for rank in call.ranks})
    return Advice(total, "The allocator calls the driver", advice, evidence, ranks)


def recompute(answers: Explanation) -> Advice | None:
    """Time spent on recompute."""
    total = sum(m.passes.get("recompute", 0) for m in answers.modules.rows)
    everything = sum(m.total for m in answers.modules.rows)
    if not everything or total < 0.1 * everything:
        return None
    most = sorted(answers.modules.rows, key=lambda m: -m.passes.get("recompute", 0))[:3]
    evidence = [f"{total / everything:.0%} of device time is recompute of activations"]
    evidence += [f"{m.module}: {milliseconds(answers.per_step(m.passes['recompute']))} a step and rank" for m in most]
    advice = "if memory allows, recompute less: only attention, or only some layers"
    return Advice(answers.per_step(total), "Recompute takes time", advice, evidence, answers.seen)


Rule = Callable[[Explanation], Advice | None]

RULES: tuple[Rule, ...] = (
    host_bound, synchronisation, data_stall, idle_device, exposed_axis, small_messages, slow_rank, imbalance, bubble,
    tiny_kernels, copies, single_precision, loose_optimizer, allocator, recompute,
)  # fmt: skip


def findings(answers: Explanation) -> tuple[Finding, ...]:
    """Findings of all rules that matter, the largest gain first."""
    found = [one for rule in RULES if (one := finding(rule, answers)) is not None]
    return tuple(sorted(found, key=lambda one: (-one.gain, one.rule)))


def finding(rule: Rule, answers: Explanation) -> Finding | None:
    """The finding of one rule, None if it does not matter."""
    found = rule(answers)
    share = found.gain / answers.step_time if found is not None and answers.step_time else 0.0
    if found is None or share < MIN_SHARE:
        return None
    hours = 24 * max(answers.world, len(answers.seen)) * min(share, 1.0)
    texts = found.title, found.advice, tuple(found.evidence), tuple(found.ranks)
    return Finding(rule.__name__, *texts, int(found.gain), share, hours)


def not_recorded(answers: Explanation, dropped: int, lost: Mapping[int, int]) -> tuple[str, ...]:
    """What these profiles do not contain, in sentences: why an answer is empty or uncertain. `dropped` are unmatched collective
    events, `lost` each rank's launches without kernels."""
    missing = answers.world - len(answers.seen)
    gone = sum(lost[rank] for rank in answers.launches)
    unsized = sum(row.total.messages - row.total.sized for row in answers.axes)
    clocks = answers.clocks.values()
    reasons = (
        (missing > 0, f"{missing} of {answers.world} ranks have no profile: waiting for them counts as transfer"),
        (gone, f"{gone} launches (CUDA graphs, or dropped events) have no kernels in the profile: they look idle, cause unknown"),
        (any(row.axis == UNKNOWN for row in answers.axes),
         "some collectives name no process group: their axis is unknown, and they are matched as if of one group"),
        (unsized, f"the size of {unsized} messages is not in the profile, so their bytes and bandwidth are not counted"),
        (dropped, f"{dropped} messages could not be matched: ranks have different numbers of them, or they do not end together"),
        (len(answers.seen) > 1 and any(clock.uncertainty < 0 for clock in clocks),
         "clocks of some ranks could not be aligned, since they share no matched collective"),
        (answers.modules.rows and not any(answers.modules.in_modules.values()),
         "no modules: record with labels, with_modules or with_stack to attribute kernels to modules"),
        (not answers.flops.ranks, "no FLOPs: record shapes with record_shapes=True"),
        (not any(answers.memory.values()), "no memory over time: record it with profile_memory=True"),
        (not any(answers.devices.values()) and not answers.launches,
         "no device: times are self time of operators on the host's threads"),
    )  # fmt: skip
    return tuple(sentence for holds, sentence in reasons if holds)
