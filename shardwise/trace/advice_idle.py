"""Findings about idle time: what the device waited for, and what to do. Every cause has a rule with evidence of its own where the
profile shows it; where no rule speaks, `idle_device` names the largest cause, so that much idle time is never without advice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.trace.answers import Explanation

IDLE_SHARE = 0.1
"""Idle time above this share of the step always has a finding."""
_WAIT = re.compile(r"Synchronize|^cudaMemcpy$|^hipMemcpyWithStream$")


class Advice(NamedTuple):
    """What a rule returns."""

    gain: float
    """Nanoseconds a step."""
    title: str
    advice: str
    evidence: list[str]
    ranks: Sequence[int]


def milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.2f} ms"


def _idle_of(answers: Explanation, cause: str) -> tuple[float, list[int]]:
    """Mean idle time of a cause in a step, and the ranks at or above the mean."""
    of_rank = {rank: causes.get(cause, 0) for rank, causes in answers.idle.items()}
    usual = answers.per_step(sum(of_rank.values()))
    return usual, [rank for rank, value in of_rank.items() if value >= usual * answers.steps_on(rank) and value]


def launch_time(answers: Explanation) -> int:
    """Median over the ranks of the time between launches."""
    return sorted(q.launch_time for q in answers.launches.values())[len(answers.launches) // 2]


def host_bound(answers: Explanation) -> Advice | None:
    """The device waits for launches."""
    gain, ranks = _idle_of(answers, "host")
    queues = list(answers.launches.values())
    launched, late = sum(q.launches for q in queues), sum(q.late for q in queues)
    if launched < 100 or late < 0.05 * launched:
        return None
    short = sum(q.short for q in queues)
    evidence = [
        f"the device is idle {milliseconds(gain)} a step because the host launched late",
        f"{answers.per_step(late):.0f} of {answers.per_step(launched):.0f} kernels a step and rank were launched after the device "
        "had run out of work",
        f"the host takes {launch_time(answers) / 1e3:.1f} µs from launch to launch; {short / launched:.0%} of kernels are shorter",
    ]
    advice = "fewer launches: torch.compile or CUDA graphs, fused operators, a larger microbatch; or do less between launches"
    return Advice(gain, "The host launches too slowly", advice, evidence, ranks)


def synchronisation(answers: Explanation) -> Advice | None:
    """The host synchronises with the device, and then the device waits for the host."""
    gain, ranks = _idle_of(answers, "synchronisation")
    waits = [call for call in answers.calls if _WAIT.search(call.name)]
    if not waits:
        return None
    most = sorted(waits, key=lambda call: -call.total)[:3]
    evidence = [f"the device is idle {milliseconds(gain)} a step after the host synchronised with it"]
    evidence += [f"{call.name}: {answers.per_step(call.count):.1f} a step and rank" for call in most]
    advice = "do not read device values in the step: no .item(), .cpu(), print or bool() of a tensor, no nonzero or boolean masks"
    return Advice(gain, "The host synchronises with the device", advice, evidence, ranks)


def data_stall(answers: Explanation) -> Advice:
    """The next batch is not ready."""
    gain, ranks = _idle_of(answers, "data")
    evidence = [f"the device is idle {milliseconds(gain)} a step while a batch is fetched"]
    advice = "more DataLoader workers, prefetching, pinned memory; or tokenise and pack the data beforehand"
    return Advice(gain, "Steps wait for data", advice, evidence, ranks)


_WHAT_TO_DO = {
    "host": ("the host launched late", "fewer launches (torch.compile, CUDA graphs, fused operators), or do less between them"),
    "synchronisation": ("the host had synchronised with it", "no .item(), .cpu(), print or bool() of a tensor in the step"),
    "data": ("the next batch was not ready", "more DataLoader workers, prefetching, pinned memory"),
    "peer": ("the host waited for other ranks", "find the rank that comes last (trace all ranks), or communicate asynchronously"),
    "pipeline": ("the host waited for another pipeline stage", "more microbatches, even stages, or a zero-bubble schedule"),
    "device": (
        "kernels were launched in time and started late",
        "look at what they wait for: events between streams, copies, kernels of other processes; fuse very short kernels",
    ),
    "unknown": (
        "nothing recorded says why: no launches, CUDA graphs without kernels, or time outside of what was recorded",
        "profile whole steps (schedule=), host and device both (activities=), and look at the program's own time between them",
    ),
}  # fmt: skip
"""Why the device is idle, and what to do, by cause."""

_RULES: dict[str, Callable[[Explanation], Advice | None]] = {
    "host": host_bound,
    "synchronisation": synchronisation,
    "data": data_stall,
}


def idle_device(answers: Explanation) -> Advice | None:
    """Much idle time whose largest cause no other rule reports."""
    causes = dict.fromkeys(name for of_rank in answers.idle.values() for name in of_rank)
    times = {cause: _idle_of(answers, cause)[0] for cause in causes}
    everything = sum(times.values())
    if not answers.step_time or everything < IDLE_SHARE * answers.step_time:
        return None
    cause = max(times, key=lambda one: times[one])
    if cause in _RULES and _RULES[cause](answers) is not None:
        return None
    why, advice = _WHAT_TO_DO[cause]
    who = "device" if answers.launches or any(answers.devices.values()) else "host"
    if who == "host" and cause == "host":
        why, advice = (
            "its threads were outside of operators",
            "look at the program's own Python: data, logging, waiting for others",
        )
    evidence = [
        f"the {who} is idle {milliseconds(everything)} a step, {everything / answers.step_time:.0%} of it",
        f"{milliseconds(times[cause])} of that: {why}",
    ]
    evidence += [
        f"{milliseconds(times[one])}: {_WHAT_TO_DO[one][0]}"
        for one in sorted(times, key=lambda one: -times[one])
        if one != cause and times[one] > 0.1 * everything
    ]
    return Advice(times[cause], f"The {who} is idle: {why}", advice, evidence, _idle_of(answers, cause)[1])
