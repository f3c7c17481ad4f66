"""Which tests stay together on one worker, and which begin first."""

from __future__ import annotations

import functools

WAITING = (
    "chaos/test_chaos",
    "chaos/test_elastic",
    "chaos/test_slow",
    "chaos/test_grpo",
    "train/test_launch",
    "train/faults/test_stop",
    "checkpoint/test_crashes",
    "chaos/test_every_fault",
)
"""Files that one worker takes while the ranks of the first suffer every kind of fault, which the last looks at
(`chaos/conftest.py`)."""
LONGEST = (
    "cuda/test_compiled_cuda",
    *WAITING,
    "tune/test_demo",
    "docs/test_pages",
    "workbench/test_shown_runs",
    "workbench/test_page",
    "train/test_loop",
    "measure/test_verify",
    "tune/test_grpo_ranks",
    "trace/test_broken",
    "checkpoint/test_adapter_checkpoints",
    "plan/test_search",
    "trace/test_odd_traces",
    "train/test_distill",
    "cli/test_plan",
    "serve/test_sampler",
    "measure/test_profile",
    "data/prepare/test_prepare",
)
"""Files that stay with one worker for longest; they begin first, so that none is left alone with one at the end."""
SPREAD = "parallel/test_layouts.py"
"""The file whose tests share a run of ranks, by their parameter, and nothing else."""
PARTS = {"cuda/test_compiled_cuda.py": 4}
"""Files whose cases share nothing but the ranks that are started for them, and would keep one worker for longer than all others
take: in how many parts they are taken. Each has four ranks, each of which compiles with as many processes as there are cores."""


def scope_of(nodeid: str) -> str:
    """What stays together on one worker: a file, as its tests share what they make, or those that wait; where a run of ranks is all
    they share, that run; a part of a file that is taken in parts."""
    name, _, test = nodeid.partition("::")
    file, case = name.removeprefix("tests/"), test.partition("[")[2].removesuffix("]")
    if file.startswith(WAITING):
        return "waiting"
    if file in PARTS:
        return f"{name} {int(case) % PARTS[file]}"
    return f"{name} {case}" if file == SPREAD else name


@functools.cache
def place_of(file: str) -> tuple[bool, int, str]:
    """Where a file comes: long ones first, in the order of `LONGEST`, the one that is spread at the end."""
    early = next((n for n, name in enumerate(LONGEST) if file.startswith(name)), len(LONGEST))
    return file == SPREAD, early, file
