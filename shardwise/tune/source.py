"""Chooses the source of a run's batches by its objective."""

from __future__ import annotations

from shardwise.run import Run
from shardwise.train.batches.source import Source, TokenSource


def source_of(run: Run) -> Source:
    """Token sets, or for GRPO the answers that the run generates itself."""
    if run.objective.kind != "grpo":
        return TokenSource(run)
    from shardwise.tune.grpo import GrpoSource

    return GrpoSource(run)
