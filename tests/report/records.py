"""Records for the tests of reports: a believable step of an interleaved pipeline, and strategies for any record at all."""

from __future__ import annotations

import re

from hypothesis import strategies as st

from shardwise.ledger import CATEGORIES, COLLECTIVES, OWNERS, Account, Memory, Span, Timeline, Traffic
from shardwise.run.axes import AXES
from shardwise.schedules.make import make_schedule
from shardwise.schedules.timing import Cost, time

GIB = 2.0**30
PASS_NAMES = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}

amounts = st.floats(0, 1e13)
texts = st.text(max_size=12).filter(lambda text: not {"nan", "inf"} & set(re.split(r"\W", text.lower())))
"""Any but the words that tell a page with a number that is none."""
memories = st.builds(
    Memory,
    st.lists(st.dictionaries(st.sampled_from((*OWNERS, "<odd>")), amounts), max_size=20).map(tuple),
    st.sampled_from([0.0, 80 * GIB]),
)
traffics = st.builds(
    Traffic,
    *(st.dictionaries(st.sampled_from(AXES), st.dictionaries(st.sampled_from(COLLECTIVES), amounts)) for _ in range(2)),
)
spans = st.builds(
    Span,
    rank=st.integers(0, 40),
    stream=st.sampled_from(("compute", *AXES)),
    name=st.one_of(st.sampled_from((*PASS_NAMES.values(), "F2.5")), texts),
    category=st.sampled_from(CATEGORIES),
    start=st.floats(0, 1e4),
    seconds=st.floats(0, 1e3),
    microbatch=st.integers(-1, 5000),
    stage=st.integers(-1, 300),
)
timelines = st.builds(Timeline, st.lists(spans, max_size=30).map(tuple), st.floats(0, 1e4))
breakdowns = st.dictionaries(st.sampled_from((*CATEGORIES, "<odd>")), st.floats(0, 1e6))
accounts = breakdowns.map(lambda parts: Account("plan", sum(parts.values()), 1e6, parts))


def pipeline_step(ranks: int = 4, microbatches: int = 12, unit: float = 0.01) -> Timeline:
    """An interleaved 1F1B step with traffic behind it."""
    schedule = make_schedule("interleaved", ranks, microbatches, 2)
    timing = time(schedule, Cost.even(schedule.stages, unit, unit, unit), unit / 10)
    spans = []
    for rank, actions in enumerate(schedule.ranks):
        for (kind, stage, microbatch), start, end in zip(actions, timing.start[rank], timing.end[rank], strict=True):
            spans.append(Span(rank, "compute", PASS_NAMES[kind], "matmul", start, end - start, microbatch, stage))
            spans.append(Span(rank, "tensor", "all_gather", "tensor", start, (end - start) / 2, microbatch, stage))
        spans.append(Span(rank, "compute", "optimizer", "optimizer", timing.makespan, unit))
    return Timeline(tuple(spans), timing.makespan + unit)


def pipeline_memory(ranks: int, capacity: float = 80 * GIB) -> Memory:
    """The first ranks hold the most activations, the last the logits."""
    return Memory(
        tuple(
            {"parameters": 9.5 * GIB, "activations": max(4, 40 - rank) * GIB, "logits": 6 * GIB * (rank == ranks - 1)}
            for rank in range(ranks)
        ),
        capacity,
    )
