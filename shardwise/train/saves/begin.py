"""Beginning with weights that are there already (`train.weights`): those of another run, or of a folder that `shardwise
convert from-hf` made. Only weights are taken; steps are counted anew, and the optimizer begins with nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.model.saved_reader import SavedReader
from shardwise.model.weight_files import WeightReader
from shardwise.model.weights import RUN_FILE, checkpoint_folder, compare_shapes, open_checkpoint, state_shapes
from shardwise.parallel.local_parameter import Box, local, local_box
from shardwise.run import Run, UserError, read_run
from shardwise.train.saves.contents import buffers
from shardwise.train.saves.folder import complete
from shardwise.train.saves.job import model_differences
from shardwise.train.saves.resume import read_box
from shardwise.train.step import TrainState


def check_weights(run: Run, out: Path) -> None:
    """Raise what is wrong with the weights that a run begins with, before any rank starts. One that has checkpoints of its own
    goes on from those, and the weights may be gone."""
    if run.train.weights and not complete(out):
        _open(run)


def _open(run: Run) -> WeightReader | SavedReader:
    """The weights that a run begins with, which fit its network."""
    reader = open_checkpoint(checkpoint_folder(run.train.weights))
    problems = compare_shapes(reader, state_shapes(run.model), reader.names)
    if problems:
        raise UserError(*problems)
    return reader


@torch.no_grad()
def begin(train_state: TrainState, tokenizer: Tokenizer, log: Callable[[str], None]) -> None:
    """Give a freshly built trainee the weights that its run begins with. Every rank calls it, and reads what it holds. Where they
    learned by another tokenizer than the data's, which is nearly always a mistake, that is said."""
    if not train_state.run.train.weights:
        return
    reader = _open(train_state.run)
    for held in train_state.parallel.parameters:
        local(held.parameter).copy_(read_box(reader, held.name, local_box(held, train_state.mesh)))
    for name, buffer in buffers(train_state):
        buffer.copy_(read_box(reader, name, Box((0,) * buffer.ndim, tuple(buffer.shape))))
    changed = model_differences(read_run(reader.folder / RUN_FILE), train_state.run)
    log(f"beginning with the weights of {reader.folder}" + (f", with {'; '.join(changed)}" if changed else ""))
    with contextlib.suppress(UserError):  # not every folder has its tokenizer
        before = load_tokenizer(reader.folder)
        if before.digest != tokenizer.digest:
            log(f"warning: those weights know other tokens ({_words(before)}) than the data's ({_words(tokenizer)})")


def _words(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab:,}"
