"""Every rule of the advice, where it must speak and where it must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_jobs import Host, explained, job_member, message

from shardwise.ledger import Timeline
from shardwise.trace import advice
from shardwise.trace.answers import (
    CAUSES,
    AxisTime,
    CallTime,
    Clock,
    CommTime,
    Explanation,
    Flops,
    KernelTime,
    LaunchQueue,
    Modules,
    ModuleTime,
    PipelineRank,
    PipelineStep,
    Straggler,
)

MS = 10**6
STEP = 100 * MS


def answers(**given: Any) -> Explanation:
    """Two ranks, one step of 100 ms, nothing to complain about but what is given."""
    numbers = dict(span=STEP, compute=90 * MS, communication=0, copy=0, idle=0, exposed_communication=40 * MS)
    plain = Explanation(
        world=16, seen=(0, 1), devices={}, steps=(5,), step_time=STEP, ranks={0: numbers, 1: numbers}, spreads={},
        clocks={0: Clock(0, 0, 50), 1: Clock(0, 10, 50)}, axes=(), categories={}, idle={0: {}, 1: {}}, exposed_copy={},
        kernels=(), calls=(), modules=Modules((), {}, {}), launches={}, pipelines=(), stragglers=(), critical_path=None,
        memory={}, flops=Flops("", {}, 0.0, {}), findings=(), waits={}, timeline=Timeline(),
    )  # fmt: skip
    return replace(plain, **given)


def idle(cause: str, share: float = 0.1) -> dict[int, dict[str, int]]:
    """Both ranks idle for this reason."""
    return {rank: {cause: int(share * STEP)} for rank in (0, 1)}


def queue(**given: Any) -> dict[int, LaunchQueue]:
    """A queue that keeps up."""
    usual = dict(launches=2000, median_delay=10**5, longest_delay=10**6, late=10, mean_depth=9.0, deepest=99, empty=0, short=100,
                 launch_time=10_000, short_gaps=0)  # fmt: skip
    return {rank: LaunchQueue(**usual | given) for rank in (0, 1)}


def axis(name: str = "tensor", collective: str = "all_reduce", **given: Any) -> AxisTime:
    """Messages of an axis on both ranks: 20 ms, exposed, at 50 GB/s."""
    usual = dict(messages=10, bytes=1e9, payload=1e9, sized=10, time=20 * MS, exposed=20 * MS, summed=20 * MS, wait=0, matched=0,
                 timed=20 * MS)  # fmt: skip
    return AxisTime(name, collective, {rank: CommTime(**usual | given) for rank in (0, 1)}, 8)


def kernel(name: str, kind: str = "compute", total: int = 40 * MS) -> KernelTime:
    """On both ranks together."""
    return KernelTime(name, kind, 100, total, MS, 0.2, {0: total // 2, 1: total // 2})


def call(name: str, count: int = 40, total: int = 10 * MS) -> CallTime:
    """Calls of the runtime."""
    return CallTime(name, count, total, {0: total})


def module(name: str, kernels: int = 2000, **passes: int) -> ModuleTime:
    """A module's time on both ranks."""
    return ModuleTime(
        name, {"forward": 0, "recompute": 0, "backward": 0, "other": 0} | passes, kernels, 0.0, {0: 1, 1: 1}
    )


def pipeline(bubble: int, members: tuple[int, ...] = (0, 1)) -> PipelineStep:
    """One step of 1F1B."""
    rank = PipelineRank((), 0, STEP, STEP - bubble, bubble, bubble, bubble)
    return PipelineStep(5, members, STEP, {0: rank, 1: rank}, "1f1b", 1, 8)


SPEAKS: list[tuple[advice.Rule, dict[str, Any], int]] = [
    (advice.host_bound, dict(idle=idle("host"), launches=queue(late=900)), 10 * MS),
    (advice.synchronisation, dict(idle=idle("synchronisation"), calls=(call("cudaStreamSynchronize"),)), 10 * MS),
    (advice.data_stall, dict(idle=idle("data")), 10 * MS),
    (advice.idle_device, dict(idle=idle("device", 0.64)), 64 * MS),
    (advice.exposed_axis, dict(axes=(axis(),)), 20 * MS),
    (advice.small_messages, dict(axes=(axis(messages=100, sized=100, bytes=1e7), axis(collective="all_gather"))), int(19.8 * MS)),
    (advice.slow_rank, dict(stragglers=(Straggler(1, "compute", 7 * MS, 0.07, "why"),)), 7 * MS),
    (advice.imbalance, dict(axes=(axis(wait=12 * MS, matched=30),), waits={0: 12 * MS, 1: 8 * MS}), 10 * MS),
    (advice.bubble, dict(pipelines=(pipeline(30 * MS),)), 15 * MS),
    (advice.tiny_kernels, dict(launches=queue(short=1500, short_gaps=6 * MS)), 6 * MS),
    (advice.copies, dict(kernels=(kernel("Memcpy HtoD (Pageable -> Device)", "copy"),), exposed_copy={0: 9 * MS, 1: 9 * MS}),
     9 * MS),
    (advice.single_precision, dict(kernels=(kernel("ampere_sgemm_128x64_nn"),)), 10 * MS),
    (advice.loose_optimizer, dict(launches=queue(), modules=Modules((module("(phase optimizer)", other=4 * MS),), {}, {})), 8 * MS),
    (advice.allocator, dict(calls=(call("cudaMalloc"), call("cudaFree"))), 10 * MS),
    (advice.recompute, dict(modules=Modules((module("a", forward=60 * MS, recompute=40 * MS),), {}, {})), 20 * MS),
]  # fmt: skip

SILENT: list[tuple[advice.Rule, dict[str, Any]]] = [
    (advice.host_bound, dict(idle=idle("host"), launches=queue(late=20))),  # the queue says it is not the launches
    (advice.host_bound, dict(idle=idle("host", 0.01), launches=queue(late=900))),
    (advice.host_bound, dict(idle=idle("host"))),
    (advice.synchronisation, dict(idle=idle("synchronisation"))),  # no such call was seen
    (advice.synchronisation, dict(idle=idle("synchronisation", 0.01), calls=(call("cudaStreamSynchronize"),))),
    (advice.data_stall, dict(idle=idle("data", 0.01))),
    (advice.idle_device, dict(idle=idle("data", 0.64))),  # another rule says it
    (advice.idle_device, dict(idle=idle("device", 0.08))),
    (advice.exposed_axis, dict(axes=(axis(wait=20 * MS),))),  # all of it is waiting, which is another finding
    (advice.exposed_axis, dict(axes=(axis(exposed=MS),))),
    (advice.small_messages, dict(axes=(axis(messages=100, sized=100, bytes=1e7),))),  # nothing of the axis is faster
    (advice.small_messages, dict(axes=(axis(messages=100, sized=100), axis(collective="all_gather")))),  # not small
    (advice.slow_rank, dict()),
    (advice.imbalance, dict(axes=(axis(wait=12 * MS, matched=4),), waits={0: 12 * MS, 1: 8 * MS})),  # too few
    (advice.imbalance, dict(axes=(axis(matched=30),), waits={0: 9 * MS, 1: 9 * MS}, clocks={0: Clock(0, 5 * MS, 9)})),  # clocks
    (advice.imbalance, dict(axes=(axis(wait=12 * MS, matched=30),), waits={0: 12 * MS, 1: 8 * MS},
                           stragglers=(Straggler(1, "late", 7 * MS, 0.07, ""),))),
    (advice.bubble, dict(pipelines=(pipeline(3 * MS),))),
    (advice.bubble, dict(pipelines=(pipeline(30 * MS, (0, 1, 2)),))),  # a rank is missing
    (advice.tiny_kernels, dict(launches=queue(short=100, short_gaps=6 * MS))),
    (advice.copies, dict(kernels=(kernel("Memcpy DtoD (Device -> Device)", "copy"),), exposed_copy={0: 9 * MS})),
    (advice.copies, dict(kernels=(kernel("Memcpy HtoD (Pinned -> Device)", "copy"),), exposed_copy={0: 0, 1: 0})),
    (advice.single_precision, dict(kernels=(kernel("sm80_xmma_gemm_tf32f32_tn"), kernel("cutlass_80_tensorop_s1688gemm")))),
    (advice.loose_optimizer, dict(launches=queue(), modules=Modules((module("(phase optimizer)", 60, other=4 * MS),), {}, {}))),
    (advice.allocator, dict(calls=(call("cudaMalloc", 1),))),
    (advice.allocator, dict(calls=(call("cudaMallocX", 99),))),
    (advice.recompute, dict(modules=Modules((module("a", forward=95 * MS, recompute=5 * MS),), {}, {}))),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "given", "gain"), SPEAKS, ids=lambda value: getattr(value, "__name__", ""))
def test_speaks(rule: advice.Rule, given: dict[str, Any], gain: int) -> None:
    found = advice.finding(rule, answers(**given))
    assert found is not None
    assert found.rule == rule.__name__
    assert found.gain == pytest.approx(gain, abs=2)
    assert found.share == pytest.approx(gain / STEP, abs=1e-6)
    assert found.gpu_hours_per_day == pytest.approx(24 * 16 * gain / STEP, rel=1e-4)
    assert found.evidence
    assert found.advice


@pytest.mark.parametrize(("rule", "given"), SILENT, ids=lambda value: getattr(value, "__name__", ""))
def test_says_nothing(rule: advice.Rule, given: dict[str, Any]) -> None:
    assert advice.finding(rule, answers(**given)) is None


def test_every_rule_is_tried_and_ranked() -> None:
    assert {rule for rule, *_ in SPEAKS} == {rule for rule, _ in SILENT} == set(advice.RULES)
    found = advice.findings(answers(idle=idle("data", 0.03), axes=(axis(),)))
    assert [one.rule for one in found] == ["exposed_axis", "data_stall"]


@pytest.mark.parametrize(("rule", "given", "gain"), SPEAKS, ids=lambda value: getattr(value, "__name__", ""))
def test_figures_are_of_one_step(rule: advice.Rule, given: dict[str, Any], gain: int) -> None:
    """Six steps of the same say what one of them says: no figure of the evidence is a sum over steps."""
    one = advice.finding(rule, answers(**given))
    six = advice.finding(
        rule, answers(**{name: _six_times(value) for name, value in given.items()}, steps=tuple(range(6)))
    )
    assert one is not None
    assert six is not None
    assert [line for line in six.evidence if "in all steps" not in line] == [
        line for line in one.evidence if "in all steps" not in line
    ]


def _six_times(value: Any) -> Any:
    """What six steps have, of what one has."""
    if isinstance(value, dict):
        return {key: _six_times(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_six_times(each) for each in value)
    if isinstance(value, Modules):
        return replace(value, rows=_six_times(value.rows))
    if isinstance(value, LaunchQueue):
        return replace(
            value, **{name: 6 * getattr(value, name) for name in ("launches", "late", "short", "short_gaps")}
        )
    if isinstance(value, CommTime):
        return CommTime(*(6 * getattr(value, name) for name in CommTime.__dataclass_fields__))
    if isinstance(value, AxisTime):
        return replace(value, ranks=_six_times(value.ranks))
    if isinstance(value, KernelTime | CallTime):
        return replace(value, count=6 * value.count, total=6 * value.total, ranks=_six_times(value.ranks))
    if isinstance(value, ModuleTime):
        return replace(value, kernels=6 * value.kernels, passes=_six_times(value.passes), ranks=_six_times(value.ranks))
    return 6 * value if isinstance(value, int) else value


@pytest.mark.parametrize("cause", CAUSES)
def test_much_idle_time_always_has_advice(cause: str) -> None:
    """Whatever else the profile lacks: no launches, no calls."""
    found = advice.findings(answers(idle=idle(cause, 0.98)))
    assert [one.gain for one in found] == [98 * MS]
    assert found[0].advice
    assert "98%" in " ".join(found[0].evidence) or "98.00 ms" in found[0].evidence[0]


def job(folder: Path, slow: int | None, late: int | None) -> Explanation:
    """Four ranks, three steps, ten all-reduces a step; one may compute longer or come late."""
    files = {}
    for rank in range(4):
        host = Host()
        for step in range(3):
            begin = 10_000 * step
            host.step(step, begin, 10_000)
            for number in range(10):
                at = begin + 1000 * number
                work = 400 if rank == slow else 300
                start = at + (100 if rank == late else 0)
                host.launch("gemm", at - 5, start, work)
                arrive = start + work
                end = at + 100 + 400 + 20
                told = message("allreduce", 64, "0", 4, 10 * step + number)
                host.launch("ncclDevKernel_AllReduce", at, arrive, end - arrive, 9, **told)
        files[rank] = (job_member(rank, 4, {"0": ("default_pg", range(4))}), host.events)
    return explained(folder, files)


def test_a_rank_that_computes_longer(tmp_path: Path) -> None:
    (found,) = job(tmp_path, slow=2, late=None).stragglers
    assert (found.rank, found.reason, found.excess, found.share) == (2, "compute", 1000, 0.1)


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    (found,) = job(tmp_path, slow=None, late=3).stragglers
    # Ten times a hundred, without the very first, which takes up how ranks began.
    assert (found.rank, found.reason, found.excess) == (3, "late", 29 * 100 // 3)


def test_no_rank_is_slow(tmp_path: Path) -> None:
    answers_ = job(tmp_path, slow=None, late=None)
    assert answers_.stragglers == ()
    assert {rank: clock.offset for rank, clock in answers_.clocks.items()} == dict.fromkeys(range(4), 0)
