"""Scores the token sets of a run: the log-probabilities of its reference or teacher for every token are written beside the sets
(`data/scores.py`), on any layout. Each rank of the last stage writes its own scores, so the sets must be on a filesystem that all
ranks see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.data.batches import IGNORE_INDEX, Samples, target_places
from shardwise.data.open import rows_to_score
from shardwise.data.scores import ScoreWriter, folder_of, kind_of, score_index
from shardwise.model.device import choose_device
from shardwise.parallel.context import zigzag_positions
from shardwise.parallel.mesh import Mesh
from shardwise.plan.trainer.rank import reference_run
from shardwise.run import Problem, Run, UserError
from shardwise.run.sections.objective import FACTS
from shardwise.train.batches.microbatches import cut, stream_of
from shardwise.train.batches.reference import Reference, frozen_weights


def check_scoring(run: Run) -> Path:
    """Returns the folder of the scoring network; raises a `UserError` if something is wrong with it or with the sets."""
    facts, o = FACTS[run.objective.kind], run.objective
    if not facts.reference or facts.forward_only:
        reason = f"{o.kind} reads no numbers beside its data; dpo and distill do"
        raise UserError(Problem(reason, "objective.kind"))
    named = frozen_weights(run)
    if not named:
        key = "objective.teacher" if facts.teacher else "train.weights"
        raise UserError(Problem(f"is empty, and there is no {kind_of(run)} to ask", key))
    rows_to_score(run)
    return checkpoint_folder(named)


@torch.no_grad()
def score(run: Run, log: Callable[[str], None]) -> None:
    """Score every set. All ranks call this."""
    source = check_scoring(run)
    device = choose_device(run.train.device)
    mesh = Mesh(run.layout, device.type)
    say = log if mesh.rank == 0 else lambda text: None
    network = Reference(reference_run(run), mesh, device)
    network.read(say)
    for tokens, samples in rows_to_score(run):
        folder = folder_of(tokens, kind_of(run))
        writer = ScoreWriter(folder, score_index(run, tokens, str(source)))
        if mesh.rank == 0:
            writer.begin()
        _together(mesh)
        writer.open()
        _score_set(run, network, samples, writer, say)
        writer.close()
        _together(mesh)
        if mesh.rank == 0:
            writer.finish()
        say(f"{folder}: {tokens.tokens:,} tokens, {writer.index.count} log-probabilities each")
    _together(mesh)


def _together(mesh: Mesh) -> None:
    """A barrier over all ranks."""
    if mesh.layout.world > 1:
        dist.barrier()


def _score_set(run: Run, network: Reference, samples: Samples, writer: ScoreWriter, say: Callable[[str], None]) -> None:
    """Score all rows of a set, a step's number of rows at a time."""
    mesh, device, teaches = network.mesh, network.device, FACTS[run.objective.kind].teacher
    at_once, ranks = run.train.microbatch * run.accumulation, run.layout.data_ranks
    own = zigzag_positions(run.train.seq_len, run.layout.context, mesh.index("context"))
    writes = network.models[-1].last and mesh.index("tensor") == 0
    for start in range(0, samples.count, at_once * ranks):
        first = start + mesh.data_index * at_once
        # All ranks run full schedules; rows beyond the last repeat the first row, and their scores are dropped.
        rows = np.arange(first, first + at_once)
        batch = samples.take(np.where(rows < samples.count, rows, 0))
        microbatches = cut(batch, {"targets": batch.targets}, run, mesh, device)
        network.add_logprobs(microbatches, stream_of(run, device))
        for n, microbatch in enumerate(microbatches if writes else ()):
            some = slice(n * run.train.microbatch, (n + 1) * run.train.microbatch)
            places = [target_places(samples.parts[0], row, samples.length) for row in rows[some] if row < samples.count]
            if not places:
                continue
            learned = batch.targets[some][: len(places)] != IGNORE_INDEX
            known = np.where(learned, np.stack(places), -1)[:, own].ravel()
            said = microbatch.get("teacher_logprobs" if teaches else "reference")
            if said is None:  # its forward pass ended on another rank
                continue
            several = (said, microbatch["teacher_tokens"]) if teaches else (said,)
            kept = [each[: len(places)].reshape(len(known), -1).cpu().numpy() for each in several]
            writer.put(known, kept[0], kept[1] if teaches else None)
        say(f"{min(samples.count, start + at_once * ranks):,} of {samples.count:,} rows")
