"""Peak memory of one rank of large jobs, as rehearsals on an H200 measured it (benchmarks/gpu/RESULTS.md), beside today's plan."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.measure.counts.rounds import microbatches_at_peak, microbatches_to_run, with_microbatches
from shardwise.measure.rehearse import TOLERANCE
from shardwise.plan.cost.job import job_of
from shardwise.plan.trainer.memory import memory_of_rank
from shardwise.run import Run, read_run

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/gpu/rehearsal.py"))
MEASURED = {
    "mixtral": 122.7, "v3": 27.4, "405b-fp8": 21.6,
    "8b-context": 24.1, "8x7b-tensor": 85.9, "gemma": 75.7, "32b-pipeline": 45.8, "70b-rowwise": 8.32,
    "8x22b-fp8": 34.3, "opt": 15.3,
    "a3b": 54.55, "neox-pipeline": 27.23, "65b-zero2": 18.94,
    "palm": 13.44, "bloom": 31.80, "mt-nlg": 15.52, "v3-fp8": 18.13, "405b-gather": 15.42,
}  # fmt: skip
"""GiB."""
NEWER = {
    "neox-zb": 18.11, "v3-tensor": 45.88, "8x7b-pipeline": 31.63,
    "8b-tensor": 28.96, "13b-rowwise": 55.92, "32b-ulysses": 20.02, "70b-zero3": 20.61,
    "7b-machine": 53.86, "13b-zero2": 104.1, "14b-fp8": 42.34, "66b-interleaved": 15.63, "72b-zb": 35.94, "70b-ulysses": 13.68,
    "1.5b-ddp": 46.15, "7b1": 47.70, "8x22b-zero3": 20.31, "a3b-pipeline": 12.67, "405b-interleaved": 84.43,
    "8b-ulysses": 20.69, "33b-zero2": 43.69, "14b-pipeline": 89.43, "32b-rowwise": 28.19, "palm-interleaved": 36.50,
    "gpt3-attention": 14.12, "70b-2048": 14.68, "405b-16k": 19.25, "8x7b-zero2": 41.99, "a3b-tensor": 28.47, "v3-2048": 18.16,
}  # fmt: skip
"""Those of rehearsals that run enough microbatches for the gradients of all stages. 405b-context and v3-context were measured when
blocks of attention saved their output twice. All are of a time when the loss of tensor ranks was not chunked. 70b-ring is planned
4.2% above the measured 6.51 GiB."""


def rehearsed(name: str) -> tuple[Run, int]:
    """The run that a rehearsal runs, and its rank."""
    words, rank = BENCHMARK["JOBS_BESIDE_PLAN"][name]
    run = BENCHMARK["on_machines"](words)
    if run.layout.tensor > 1:
        run = replace(run, train=replace(run.train, loss="plain"))
    count = microbatches_at_peak(run, rank) if name in NEWER else microbatches_to_run(run, rank)[0]
    return with_microbatches(run, count), rank


def peak(run: Run, rank: int) -> float:
    owners = memory_of_rank(run, replace(job_of(run), imbalance=1.0), rank)
    return sum(size for owner, size in owners.items() if owner != "workspace") / 2**30


@pytest.mark.parametrize("name", MEASURED | NEWER)
@pytest.mark.drawn(8)
def test_the_plan_has_the_peak_that_was_measured(name: str) -> None:
    assert (MEASURED | NEWER)[name] == pytest.approx(peak(*rehearsed(name)), rel=TOLERANCE["memory peak"])


def test_a_rehearsal_runs_enough_microbatches_for_the_gradients_of_all_stages() -> None:
    """The gradients of a rank's first stage come last: with one round of microbatches, when most activations are gone. A rehearsal
    of one round held 1.4 GiB less than planned."""
    words, rank = BENCHMARK["JOBS_BESIDE_PLAN"]["8x7b-pipeline"]
    run = read_run(None, [*words.split(), *BENCHMARK["COMMON"].split()])
    assert (microbatches_to_run(run, rank)[0], microbatches_at_peak(run, rank)) == (4, 8)
    run, rank = rehearsed("neox-pipeline")
    assert microbatches_at_peak(run, rank) == 4
