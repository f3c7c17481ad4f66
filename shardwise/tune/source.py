"""Which source the batches of a run come from, by its objective."""

from __future__ import annotations

from shardwise.run import Run
from shardwise.train.batches.source import Source, TokenSource


def source_of(run: Run) -> Source:
    """Token sets, or what a run makes itself."""
    if run.objective.kind != "grpo":
        return TokenSource(run)
    from shardwise.tune.grpo import GrpoSource

    return GrpoSource(run)
