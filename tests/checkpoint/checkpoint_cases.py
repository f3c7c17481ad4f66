"""What the ranks of the checkpoint tests do: train some steps and save, take a checkpoint up again, or run the whole loop."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from shardwise.checkpoint.resume import resume
from shardwise.checkpoint.saver import Saver
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.parallel.local_parameter import local, local_box
from shardwise.run import Run
from shardwise.train.loop import train
from shardwise.train.step import TrainState

DATA = "fingerprint"


def trained(run: Run, steps: int) -> TrainState:
    """A train state after some steps."""
    train_state = TrainState(run)
    cases.steps(train_state, 0, steps, True)
    return train_state


def saver_of(train_state: TrainState, out: Path, logged: list[str] | None = None) -> Saver:
    """A saver for a train state outside of the loop."""
    return Saver(out, train_state.mesh, ByteTokenizer(), DATA, (logged if logged is not None else []).append)


def train_and_save(rank: int, run: Run, out: Path, steps: int) -> int:
    """Some steps, then a checkpoint; gives the bytes that this rank wrote."""
    train_state = trained(run, steps)
    saver = saver_of(train_state, out)
    saver.save(train_state, more=dict(note=[1, 2]))
    # What happens to the state while it is written must not reach the checkpoint.
    for held in train_state.parallel.parameters:
        values = local(held.parameter).detach()
        values.fill_(torch.nan if values.is_floating_point() else 0)
    assert saver.finish() == ""
    return saver.staging.block.numel()


def resume_and_train(rank: int, run: Run, out: Path, last: int) -> dict[str, Any]:
    """Go on from the newest checkpoint; losses, norms, and this rank's shards of the final parameters."""
    train_state = TrainState(run)
    found = resume(train_state, out, DATA, print)
    assert found is not None
    assert found.more == dict(note=[1, 2])
    losses, norms = cases.steps(train_state, found.step, last, True)
    parameters = {
        h.name: (cases.slices(local_box(h, train_state.mesh)), local(h.parameter.detach()).cpu().numpy())
        for h in train_state.parallel.parameters
    }
    return dict(losses=losses, norms=norms, parameters=parameters, tokens=train_state.tokens)


def whole_run(rank: int, run: Run, out: Path) -> str:
    """The loop itself; gives what it logged."""
    logged = io.StringIO()
    with contextlib.redirect_stdout(logged):
        train(run, out)
    return logged.getvalue()


def save_where_one_rank_fails(rank: int, run: Run, out: Path, mute: bool) -> list[str]:
    """Three saves; in the second, rank 1 finds the disk full, and with `mute` cannot even leave a file that says so. Gives what
    came of each."""
    train_state = trained(run, 1)
    saver = saver_of(train_state, out)
    results = []
    for number in range(3):
        train_state.step = number + 1
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and number == 1:

                def full(*_: Any) -> Any:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

                patch.setattr(os, "write", full)
                if mute:
                    patch.setattr(os, "replace", full)
            saver.save(train_state)
            results.append(saver.finish())
    return results
