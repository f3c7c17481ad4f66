"""Advice about ranks together: traffic that nothing hides, messages that are too small, ranks that are waited for, bubbles. Each
rule looks for one thing, and gives what it found or nothing.
"""

from __future__ import annotations

from shardwise.trace.advice.finding import HALF, finding, mean, milliseconds, speed, steps_of
from shardwise.trace.answers import Explanation, Finding
from shardwise.trace.sending.axes import UNKNOWN


def exposed_axis(answers: Explanation) -> Finding | None:
    """Traffic of an axis that nothing hides: the axis that has most of it."""
    by_axis: dict[str, float] = {}
    for row in answers.axes:
        moved = sum(max(m.exposed - m.wait, 0) for m in row.ranks.values())
        by_axis[row.axis] = by_axis.get(row.axis, 0.0) + moved / max(len(answers.seen), 1) / steps_of(answers)
    if not by_axis:
        return None
    axis = max(by_axis, key=lambda one: by_axis[one])
    rows = [row for row in answers.axes if row.axis == axis]
    whose = "communication of no named group" if axis == UNKNOWN else f"traffic of {axis}"
    evidence = [f"{milliseconds(by_axis[axis])} a step of {whose} is hidden behind no computing"]
    waits = sum(min(m.exposed, m.wait) for row in rows for m in row.ranks.values())
    waited = waits / max(len(answers.seen), 1) / steps_of(answers)
    if waited > by_axis[axis] / 20:
        evidence[0] += f", beside {milliseconds(waited)} in which a rank waits there for the last one to come"
    for row in rows[:3]:
        total = row.total
        fast = f", {speed(total.bus_bandwidth)}" if total.bus_bandwidth else ""
        evidence.append(
            f"{row.collective}: {total.messages / steps_of(answers) / len(row.ranks):.0f} messages a step and rank{fast}"
        )
    advice = _ADVICE_BY_AXIS.get(
        axis, "overlap it with computing, or send less: larger buckets, fewer ranks in the group"
    )
    return finding(
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
        lost = min(total.exposed, total.timed - ideal) / max(len(answers.seen), 1) / steps_of(answers)
        evidence = [
            f"{total.messages / steps_of(answers) / len(row.ranks):.0f} {row.collective} messages a step and rank, "
            f"{total.bytes / total.sized / 1024:.0f} KiB each",
            f"they reach {speed(total.bus_bandwidth)}, others of this axis {speed(best[row.axis])}",
        ]
        if total.bus_bandwidth < 0.5 * best[row.axis] and (worst is None or lost > worst[0]):
            worst = (lost, row.axis, row.collective, evidence, sorted(row.ranks))
    if worst is None:
        return None
    lost, axis, collective, evidence, ranks = worst
    advice = "send fewer and larger messages: larger buckets, one flat tensor, more layers to a sharded unit"
    return finding(
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
    return finding(
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
    gain = min(mean(answers, dict(answers.waits)), mean(answers, exposed))
    uncertain = max((clock.uncertainty for clock in answers.clocks.values()), default=0)
    if matched < 20 or uncertain < 0 or uncertain * matched / len(answers.seen) / steps_of(answers) > 0.5 * gain:
        return None
    by_axis = sorted((row for row in answers.axes if row.collective != "recv"), key=lambda row: -row.total.wait)[:2]
    evidence = [
        f"ranks wait {milliseconds(gain)} a step in collectives for the last one to come ({matched} messages matched)"
    ]
    evidence += [
        f"{row.axis} {row.collective}: {row.total.wait / max(row.total.summed, 1):.0%} of its time is waiting"
        for row in by_axis
    ]
    advice = "give ranks the same work: pack sequences to one length, spread tokens evenly over experts, even out pipeline stages"
    return finding(answers, "imbalance", gain, "Ranks wait for each other", advice, evidence, list(answers.seen))


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
        f"a rank of the pipeline does not work for {milliseconds(mean)} a step, {share:.0%} of its window",
        f"{name}, {len(one.members)} ranks, {one.microbatches} microbatches, {one.stages_per_rank} stages a rank",
    ]
    advice = f"more microbatches ({2 * one.microbatches} would halve it), interleaved stages, or a zero-bubble schedule"
    return finding(answers, "bubble", mean * HALF, "The pipeline has a bubble", advice, evidence, sorted(one.members))
