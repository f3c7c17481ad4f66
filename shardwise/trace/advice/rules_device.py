"""Advice about one device and its host: launches, waiting, data, kernels, copies, memory, recomputation. Each rule looks for one
thing, and gives what it found or nothing.
"""

from __future__ import annotations

import re

from shardwise.trace.advice.finding import HALF, finding, idle_of, mean, milliseconds, steps_of
from shardwise.trace.answers import Explanation, Finding

_SINGLE_PRECISION = re.compile(
    r"sgemm|_s884gemm_f32|gemm\w*_kernel<float|simt_\w*f32|fp32_gemm|implicit_convolve_sgemm"
)
_TENSOR_CORES = re.compile(r"tf32|tensorop|s1688|s16816|h884|h1688|bf16|f16")
_ALLOCATE = re.compile(r"^(cuda|hip)(Malloc|Free)(Host|Async|Managed|Array)?$")
_WAIT = re.compile(r"Synchronize|^cudaMemcpy$|^hipMemcpyWithStream$")


def host_bound(answers: Explanation) -> Finding | None:
    """The device waits for launches."""
    if not answers.launches:
        return None
    gain, ranks = idle_of(answers, "host")
    queues = list(answers.launches.values())
    launched = sum(q.launches for q in queues)
    late = sum(q.late for q in queues)
    if launched < 100 or late < 0.05 * launched:
        return None
    pace = sorted(q.launch_time for q in queues)[len(queues) // 2]
    short = sum(q.short for q in queues)
    evidence = [
        f"the device is idle {milliseconds(gain)} a step because the host launched late",
        f"{late} of {launched} kernels were launched when nothing was left to run",
        f"the host takes {pace / 1e3:.1f} us from launch to launch; {short / launched:.0%} of kernels are shorter",
    ]
    advice = "launch less often: torch.compile or CUDA graphs, fused operators, a larger microbatch; or do less between launches"
    return finding(answers, "host_bound", gain, "The host launches too slowly", advice, evidence, ranks)


def synchronisation(answers: Explanation) -> Finding | None:
    """The host waits for the device, and the device then for the host."""
    gain, ranks = idle_of(answers, "synchronisation")
    waits = [call for call in answers.calls if _WAIT.search(call.name)]
    if not waits:
        return None
    most = sorted(waits, key=lambda call: -call.total)[:3]
    evidence = [f"the device is idle {milliseconds(gain)} a step after the host had waited for it"]
    evidence += [
        f"{call.name}: {call.count / steps_of(answers) / len(answers.seen):.1f} a step and rank" for call in most
    ]
    advice = "do not read values of the device in the step: no .item(), .cpu(), print or bool() of a tensor, no nonzero or masks"
    return finding(answers, "synchronisation", gain, "The host waits for the device", advice, evidence, ranks)


def data_stall(answers: Explanation) -> Finding | None:
    """The next batch is not there."""
    gain, ranks = idle_of(answers, "data")
    evidence = [f"the device is idle {milliseconds(gain)} a step while a batch is fetched"]
    advice = "more loading workers, prefetching, pinned memory; or tokenise and pack the data beforehand"
    return finding(answers, "data_stall", gain, "Steps wait for data", advice, evidence, ranks)


def tiny_kernels(answers: Explanation) -> Finding | None:
    """Kernels so short that starting them costs as much as running them, though the host keeps up."""
    queues = list(answers.launches.values())
    launched = sum(q.launches for q in queues)
    gain = mean(answers, {rank: q.short_gaps for rank, q in answers.launches.items()})
    if launched < 1000 or sum(q.short for q in queues) < 0.5 * launched:
        return None
    evidence = [
        f"{launched / len(queues) / steps_of(answers):.0f} kernels a step and rank, "
        f"{sum(q.short for q in queues) / launched:.0%} shorter than a launch takes",
        f"{milliseconds(gain)} a step lie in the short gaps between kernels that were launched in time",
    ]
    advice = "fuse: torch.compile, fused attention, norms and optimizers, foreach operations"
    return finding(answers, "tiny_kernels", gain, "Many tiny kernels", advice, evidence, sorted(answers.launches))


def copies(answers: Explanation) -> Finding | None:
    """Copies between host and device that nothing hides."""
    rows = [k for k in answers.kernels if k.kind == "copy" and re.search(r"HtoD|DtoH", k.name)]
    across = sum(k.total for k in rows) / max(len(answers.seen), 1) / steps_of(answers)
    exposed = mean(answers, dict(answers.exposed_copy))
    if not rows:
        return None
    evidence = [
        f"{milliseconds(across)} of copies between host and device a step and rank, {milliseconds(exposed)} of all behind nothing"
    ]
    evidence += [f"{k.name}: {k.count} copies, {milliseconds(k.total)}" for k in rows[:3]]
    pageable = any("Pageable" in k.name for k in rows)
    advice = (
        "pinned host memory and " if pageable else ""
    ) + "non_blocking copies on a stream of their own; make tensors on the device"
    return finding(
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
    total = sum(k.total for k in rows) / max(len(answers.seen), 1) / steps_of(answers)
    if not rows:
        return None
    evidence = [
        f"{milliseconds(total)} a step in {len(rows)} kernels that multiply in float32",
        *(f"{k.name[:80]}: {milliseconds(k.total)}" for k in rows[:3]),
    ]
    advice = "bfloat16 (float16 before Ampere), or torch.set_float32_matmul_precision('high') where the chip has TF32"
    return finding(
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
    count = row.kernels / ranks / steps_of(answers)
    device = row.total / ranks / steps_of(answers)
    pace = sorted(q.launch_time for q in queues)[len(queues) // 2]
    if count < 200:
        return None
    evidence = [
        f"{count:.0f} kernels a step in the optimizer, {device / count / 1e3:.1f} us each; a launch takes {pace / 1e3:.1f} us"
    ]
    advice = "a fused or foreach optimizer (fused=True), which takes all parameters in a few launches"
    return finding(
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
    total = sum(call.total for call in rows) / max(len(answers.seen), 1) / steps_of(answers)
    if sum(call.count for call in rows) < 2:
        return None
    evidence = [f"{call.name}: {call.count} calls in the steps, {milliseconds(call.total)}" for call in rows[:4]]
    advice = "PYTORCH_ALLOC_CONF=expandable_segments:True, equal shapes in every step, or less memory in use"
    return finding(
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
    gain = total / max(len(answers.seen), 1) / steps_of(answers)
    most = sorted(answers.modules.rows, key=lambda m: -m.passes.get("recompute", 0))[:3]
    evidence = [f"{total / everything:.0%} of the device's time computes activations once more"]
    evidence += [f"{m.module}: {milliseconds(m.passes['recompute'])}" for m in most]
    advice = "if memory allows, recompute less: only attention, or only some layers"
    return finding(answers, "recompute", gain, "Recomputation takes time", advice, evidence, list(answers.seen))
