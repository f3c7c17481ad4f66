"""Where a run starts: from the newest of its checkpoints that verifies, or else from the weights that `train.weights` names.

Ranks verify together, each its share of the files. Then each reads its own shards, whatever layout wrote them. Random generators
continue where the same ranks left them. From `train.weights`, which is another run or a folder made by `shardwise convert
from-hf`, only weights are read: steps are counted from 1, and the optimizer state starts empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.adapters import check_same_base
from shardwise.checkpoint.folder import (
    checkpoint_folder,
    checkpoints_of,
    clean,
    complete,
    folder_of_step,
    set_aside,
    step_of,
)
from shardwise.checkpoint.format import RUN_FILE, OtherFormat, Progress, damage, read_manifest, unwatched
from shardwise.checkpoint.job import check_same_data, check_same_job, gather, model_differences
from shardwise.checkpoint.reader import Reader, open_checkpoint
from shardwise.checkpoint.replicas import load_outer, load_unsent, prefix_read
from shardwise.checkpoint.run_state import Network, State
from shardwise.checkpoint.state import buffers, random_states
from shardwise.checkpoint.versions import load_versions
from shardwise.checkpoint.weights import begins_anew, open_weights
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.model.adapters import row_lengths
from shardwise.model.quantized.nf4 import Quantizer
from shardwise.parallel.local_parameter import local, local_box, local_slice
from shardwise.parallel.mesh import Mesh
from shardwise.run import Problem, UserError, read_run
from shardwise.run.parameters import matrix_of


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumed from, and the extra values saved beside its counters."""

    folder: Path
    step: int
    more: dict[str, Any]


def resume(
    state: State, out: Path, fingerprint: str, log: Callable[[str], None], progress: Progress = unwatched
) -> Resumed | None:
    """Load the newest checkpoint of a run folder into a new train state, whatever layout wrote it; returns None if there is none.
    Every rank calls it. `progress` is called with the bytes of every block read."""
    if state.mesh.rank == 0:
        clean(out)
    folder = _choose(out, state.mesh, log, progress)
    if folder is None:
        return None
    check_same_job(folder, state.job)
    manifest = read_manifest(folder)
    check_same_data(folder, manifest.state.get("data"), fingerprint)
    if state.run.adapter.used:
        check_same_base(folder, state.run)
        _load_base(state, progress)
    reader = open_checkpoint(folder, kind="", progress=progress)
    _load(state, reader)
    try:
        scale = manifest.state["loss_scale"]
        state.loss_scale.scale, state.loss_scale.good = scale["scale"], scale["good"]
        state.step, state.tokens, more = manifest.step, manifest.state["tokens"], manifest.state["more"]
    except (KeyError, TypeError):
        raise UserError(Problem("does not say how far training had come", where=str(folder))) from None
    load_versions(state, reader)
    return Resumed(folder, manifest.step, more)


def _choose(out: Path, mesh: Mesh, log: Callable[[str], None], progress: Progress) -> Path | None:
    """The newest checkpoint that verifies; newer ones that do not are logged with the reason, and set aside."""
    candidates = complete(out) if mesh.rank == 0 else []
    reasons: list[str] = []
    damaged: list[Path] = []
    # Rank 0's view of the folder counts; names may become visible on other machines a little later.
    while (step := gather(mesh, numbers=[_next_step(candidates)])[1][0][0]) >= 0:
        folder = folder_of_step(out, step)
        other, problem = False, ""
        try:
            problem = str(next(damage(folder, (mesh.rank, mesh.layout.world), progress), ""))
        except OtherFormat as e:
            other, problem = True, str(e)
        problem, others = gather(mesh, problem, [other])
        if any(other for (other,) in others):
            raise OtherFormat(problem)
        if not problem:
            for each in damaged if mesh.rank == 0 else []:
                log(f"{each.name} is set aside as {set_aside(each).name}; going on from {folder.name}, the one before")
            return folder
        log(f"warning: {problem}")
        reasons.append(problem)
        damaged.append(folder)
    if reasons:
        hint = f"no checkpoint of {out} verifies; repair them, or remove {checkpoints_of(out)} to begin anew"
        raise UserError(*reasons, hint)
    return None


def _next_step(candidates: list[Path]) -> int:
    """The step of the newest checkpoint not yet verified, -1 when there is none."""
    step = step_of(candidates.pop()) if candidates else None
    return -1 if step is None else step


def load_weights(
    state: State, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress = unwatched
) -> None:
    """Load the weights that a run starts from into a new train state. Every rank calls it, and reads its own shards. Warns when
    they were trained with another tokenizer than the data's, which is nearly always a mistake."""
    if not state.run.train.weights:
        return
    reader = _load_base(state, progress)
    assert reader is not None
    changed = model_differences(read_run(reader.folder / RUN_FILE), state.run)
    log(f"beginning with the weights of {reader.folder}" + (f", with {'; '.join(changed)}" if changed else ""))
    with contextlib.suppress(UserError):  # not every folder has its tokenizer
        before = load_tokenizer(reader.folder)
        if before.digest != tokenizer.digest:
            theirs, ours = (f"{each.kind}, {each.vocab:,}" for each in (before, tokenizer))
            log(f"warning: those weights know other tokens ({theirs}) than the data's ({ours})")


def _load_base(state: State, progress: Progress) -> Reader | None:
    """Read this rank's shards of `train.weights`, if set: all parameters but adapters."""
    if not state.run.train.weights:
        return None
    reader = open_weights(checkpoint_folder(state.run.train.weights), state.run.model, progress)
    read_model(state, reader)
    return reader


@torch.no_grad()
def read_model(state: Network, reader: Reader, prefix: str = "") -> None:
    """Read parameters and buffers from a folder of a whole network, or adapters from a checkpoint of adapters."""

    def rounded(name: str) -> Tensor:
        """A matrix on the device in the compute dtype, as a run without 4-bit weights would use it."""
        return reader.get(name).to(state.device, getattr(torch, state.run.train.dtype))

    adapters = state.run.adapter.used and bool(prefix)
    in_4_bits = Quantizer(rounded, state.run.adapter.double_quantization)
    for each in state.parallel.parameters:
        if not prefix and begins_anew(state.run.model, reader, each.name):
            continue
        if not adapters and each.entry.init == "magnitude":
            lengths = row_lengths(rounded(matrix_of(each.name)))
            local(each.parameter.detach()).copy_(local_slice(lengths, each.cuts, state.mesh))
        if state.run.adapter.used and (
            each.entry.frozen if adapters else each.name not in reader and not each.entry.dtype
        ):
            continue
        if each.entry.dtype:
            local(each.parameter.detach()).copy_(local_slice(in_4_bits.part(each.name), each.cuts, state.mesh))
        else:
            reader.read_into(local(each.parameter.detach()), prefix + each.name, local_box(each, state.mesh).offset)
    for name, buffer in () if adapters else buffers(state.parallel.models):
        reader.read_into(buffer, prefix + name, (0,) * buffer.ndim)


@torch.no_grad()
def _load(state: State, reader: Reader) -> None:
    """Read this rank's shards of a checkpoint."""
    own = prefix_read(state, reader)
    read_model(state, reader, f"{own}model/")
    keys: dict[str, list[str]] = {}  # keys of the optimizer state by parameter
    for name in reader.names:
        if name.startswith(f"{own}optimizer/"):
            parameter, _, key = name.removeprefix(f"{own}optimizer/").rpartition("/")
            keys.setdefault(parameter, []).append(key)
    for n, each in enumerate(state.parallel.parameters):
        where, values = local_box(each, state.mesh), {}
        for key in keys.get(each.name, ()):
            name = f"{own}optimizer/{each.name}/{key}"
            if reader.shape(name):
                values[key] = torch.empty_like(local(each.parameter))
                reader.read_into(values[key], name, where.offset)
            else:  # a scalar of the whole parameter
                values[key] = reader.get(name)
        if values:
            state.optimizer.set_state(n, values)
    load_outer(state, reader)
    load_unsent(state, reader)
    state.kept = {name.removeprefix("kept/"): reader.get(name) for name in reader.names if name.startswith("kept/")}
    for device, _ in random_states(state):
        name = f"random/{state.mesh.rank}/{device}"
        if name in reader:
            generator = reader.get(name)
            torch.set_rng_state(generator) if device == "cpu" else torch.cuda.set_rng_state(generator, state.device)
