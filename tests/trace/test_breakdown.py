"""The breakdown equals one that is easy to trust, to the nanosecond, on whatever profiles there may be."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import trace_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_files import BASES, device_events, host_events, kernel, read, span, step, text_of

from shardwise.trace.kernel_names import category_of
from shardwise.trace.spans.activity import activity_of
from shardwise.trace.spans.intervals import difference, intersect, join, self_time_segments, total, union
from shardwise.trace.spans.steps import break_down, select_steps

quick = settings(max_examples=120, deadline=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


def compare(path: Path, text: bytes) -> None:
    profile = read(path, text)
    assert profile.problems == ()
    activity = activity_of(profile)
    found = oracle.spans(oracle.load(path))
    parts = oracle.pieces(found)
    low = min((start for start, _, _ in parts), default=0)
    shifted = [(start - low, end - low, kind) for start, end, kind in parts]
    for all_events in (True, False):
        chosen = select_steps(activity, all_events=all_events)
        windows = oracle.step_windows(found, chosen.numbers) if chosen.steps else oracle.whole(parts)
        right = oracle.breakdown(parts, windows)
        assert right == oracle.breakdown_by_sets(shifted, [(start - low, end - low) for start, end in windows])
        ours = asdict(break_down(activity, chosen.windows))
        assert ours == right
        assert ours["span"] == ours["idle"] + total(intersect(activity.intervals(), chosen.windows))


@quick
@given(events=device_events())
def test_device(folder: Path, events: list[str]) -> None:
    compare(folder / "device.json", text_of(events))


@quick
@given(events=host_events())
def test_host(folder: Path, events: list[str]) -> None:
    compare(folder / "host.json", text_of(events))


def test_many_events_in_several_blocks(folder: Path) -> None:
    """Large enough for blocks to end inside events, names and escapes."""
    chance = random.Random(7)
    events, now = [], BASES[2]
    for number in range(12_000):
        now += chance.randint(0, 900)
        name = chance.choice(("gemm", "nccl_x", 'odd "}, {" name \\ ü', "void f<g<h>>({lambda()#1})" * 5))
        events.append(
            kernel(
                name, now, chance.randint(0, 3000), chance.choice((7, 20)), correlation=number, nested=[{}, {"a": []}]
            )
        )
    compare_large(folder / "large.json.gz", text_of(events))


def compare_large(path: Path, text: bytes) -> None:
    assert len(text) > 2 << 20
    profile = read(path, text)
    assert profile.problems == ()
    assert np.array_equal(np.sort(profile.events.correlation), np.arange(12_000))
    found = oracle.spans(oracle.load(path))
    parts = oracle.pieces(found)
    activity = activity_of(profile)
    chosen = select_steps(activity)
    assert asdict(break_down(activity, chosen.windows)) == oracle.breakdown(parts, oracle.whole(parts))


def test_where_rounding_to_microseconds_loses_time(folder: Path) -> None:
    """400 kernels of 1.9 µs, one every 2 µs: 760 µs of computing. HolisticTraceAnalysis 0.5.0 rounds starts up and ends down to
    whole microseconds and finds 400 µs of computing and 399 µs idle, of 799 µs (measured with pandas 3.1.1); the oracle decides."""
    events = [kernel("gemm", 10_000 + 2000 * n, 1900) for n in range(400)]
    path = folder / "rounding.json"
    profile = read(path, text_of(events))
    activity = activity_of(profile)
    ours = asdict(break_down(activity, select_steps(activity).windows))
    parts = oracle.pieces(oracle.spans(oracle.load(path)))
    assert ours == oracle.breakdown(parts, oracle.whole(parts))
    assert (ours["span"], ours["compute"], ours["idle"]) == (799_900, 760_000, 39_900)


INTERVALS = st.lists(st.tuples(st.integers(-30, 60), st.integers(-5, 30)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(one=INTERVALS, other=INTERVALS)
def test_interval_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def both(pairs: list[tuple[int, int]]) -> tuple:
        start = np.array([s for s, _ in pairs], np.int64)
        end = np.array([s + d for s, d in pairs], np.int64)
        return union(start, end), {m for s, d in pairs for m in range(s, s + d)}

    def moments(intervals: tuple) -> set[int]:
        starts, ends = (column.tolist() for column in intervals)
        assert all(a < b for a, b in zip(starts, ends, strict=True))
        assert all(end < start for end, start in zip(ends, starts[1:], strict=False)), (
            "sorted, and none touching another"
        )
        return {m for s, e in zip(starts, ends, strict=True) for m in range(s, e)}

    (a, in_a), (b, in_b) = both(one), both(other)
    assert moments(a) == in_a
    assert total(a) == len(in_a)
    assert moments(intersect(a, b)) == in_a & in_b
    assert moments(difference(a, b)) == in_a - in_b
    assert moments(join(a, b)) == in_a | in_b


def test_own_time_when_spans_only_overlap() -> None:
    track = np.zeros(3, np.int32)
    piece, start, end = self_time_segments(track, np.array([0, 5, 20]), np.array([10, 15, 30]))
    assert list(zip(piece.tolist(), start.tolist(), end.tolist(), strict=True)) == [
        (0, 0, 5),
        (1, 5, 10),
        (1, 10, 15),
        (2, 20, 30),
    ]


def test_steps(folder: Path) -> None:
    """Complete steps by default; a range of them, or everything, when asked for; and the profiler's last, empty one left out."""
    work = [span("cpu_op", "aten::mm", at, 10) for at in (100, 300, 500)]
    events = [*work, *(kernel("gemm", at, 50) for at in (120, 320, 520, 690)), step(3, 90, 200), step(4, 290, 200),
              step(5, 490, 200), step(6, 690, 5), span("Trace", "PyTorch Profiler (0)", 95, 900, pid="Spans", tid="x")]  # fmt: skip
    profile = read(folder / "steps.json", text_of(events))
    activity = activity_of(profile)
    chosen = select_steps(activity)
    assert chosen.numbers == (4, 5), "3 begins before the recording does, 6 holds nothing"
    assert break_down(activity, chosen.windows).span == 400
    assert select_steps(activity, 3, 4).numbers == (3, 4)
    assert select_steps(activity, first=5).numbers == (5, 6)
    assert select_steps(activity, first=9).numbers == ()
    everything = select_steps(activity, all_events=True)
    assert (everything.steps, total(everything.windows)) == ((), 740 - 120)


@pytest.mark.parametrize(
    ("category", "names"),
    [
        ("memory", (
            "loop_convert_fusion", "triton_poi_fused_convert_element_type_add_0", "aten::_log_softmax",
            "void cunn_SoftMaxForward<4, float, float, float, at::native::LogSoftMaxForwardEpilogue>(float*, float const*, int)",
            "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>",
        )),
        ("attention", (
            "flash_fwd_splitkv_kernel", "aten::_softmax", "void flashinfer::BatchPrefillWithPagedKVCacheKernel<x>",
            "flashinfer::BatchDecodeWithPagedKVCacheKernel", "void flashinfer::BatchMLAPagedAttentionKernel<x>",
        )),
        ("matmul", ("aten::convolution", "implicit_convolve_sgemm", "cudnn::cnn::conv2d_grouped_direct_kernel", "aten::mm")),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(category: str, names: tuple[str, ...]) -> None:
    assert {name: category_of(name) for name in names} == dict.fromkeys(names, category)
