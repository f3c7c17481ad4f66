"""Checks a run's data, weights, packages and folder before any rank starts. The command that starts ranks imports nothing more than
this: the training code takes seconds to import, and the fork server imports it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.folder import checkpoint_folder, complete
from shardwise.checkpoint.job import check_folder
from shardwise.run import ModelConfig, Run
from shardwise.run.second_models.teacher import teacher_model
from shardwise.run.sections.objective import FACTS
from shardwise.train.batches.source import Source, TokenSource
from shardwise.train.progress.metrics import check_installed

OpenSource = Callable[[Run], Source]
"""Opens the source of a run's batches."""


def check(run: Run, out: Path, open_source: OpenSource = TokenSource) -> None:
    """Raise an error if a run's data, weights, packages or folder are wrong, before any rank starts. With several machines the
    folder is not checked: a machine that starts later finds it in use by the very run that it joins."""
    check_installed(run)
    open_source(run)
    # A run with checkpoints resumes from those and no longer needs the weights it started from, unless it trains adapters only.
    if run.train.weights and (run.adapter.used or not complete(out)):
        _open(run.train.weights, run.model)
    teaches = FACTS[run.objective.kind].teacher
    named = run.objective.teacher if teaches else run.objective.reference
    if named and not run.objective.stored:
        _open(named, teacher_model(run) if teaches else run.model)
    if run.cluster.nodes == 1:
        check_folder(run, out)


def _open(named: str, model: ModelConfig) -> None:
    from shardwise.checkpoint.weights import open_weights

    open_weights(checkpoint_folder(named), model)
