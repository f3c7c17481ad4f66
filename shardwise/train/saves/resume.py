"""Taking a run up again: the newest checkpoint that verifies, read into any layout.

Ranks verify together, each its share of the files. Then each reads the boxes it holds: PyTorch's planner finds the saved pieces
that overlap a box, and only their rows are read. Random generators go on where the same ranks left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.model.saved_files import NewerFormat, check_file, damage, read_manifest
from shardwise.model.saved_reader import SavedReader
from shardwise.model.weight_files import WeightReader
from shardwise.model.weights import RUN_FILE, is_checkpoint
from shardwise.parallel.local_parameter import Box, local, local_box
from shardwise.parallel.mesh import Mesh
from shardwise.run import Problem, Run, UserError
from shardwise.train.faults.events import FILE as EVENTS_FILE
from shardwise.train.loss_scale import LossScale
from shardwise.train.saves.contents import buffers, random_states, set_random_state
from shardwise.train.saves.folder import checkpoints_of, clean, complete, folder_of_step, set_aside, step_of
from shardwise.train.saves.job import check_same_data, check_same_job
from shardwise.train.saves.lock import FILE as LOCK_FILE
from shardwise.train.saves.lock import FolderLock
from shardwise.train.saves.together import first_text, tell
from shardwise.train.step import TrainState


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on from, and what was kept beside its counters."""

    folder: Path
    step: int
    more: dict[str, Any]


def check_folder(run: Run, out: Path) -> None:
    """Raise what forbids a run to use a folder, before any rank starts: it is another's, or in use, or of another job."""
    _lock(run, out).release()


@contextmanager
def held(run: Run, out: Path, mesh: Mesh, log: Callable[[str], None]) -> Iterator[None]:
    """The folder is this run's alone, held by the first rank for all of them. Refused on one, refused on all."""
    lock: FolderLock | None = None
    problem: UserError | None = None
    if mesh.rank == 0:
        try:
            lock = _lock(run, out)
        except UserError as e:
            problem = e
    refused = first_text(tell(mesh, str(problem or "")))
    if refused:
        raise problem or UserError(refused)
    try:
        if lock is not None and lock.warning:
            log(f"warning: {lock.warning}")
        yield
    finally:
        if lock is not None:
            lock.release()


def _lock(run: Run, out: Path) -> FolderLock:
    """The lock of a folder that a run may use."""
    if out.is_dir() and not (out / RUN_FILE).exists() and not (out / LOCK_FILE).exists():
        foreign = sorted(path.name for path in out.iterdir() if path.name not in ("logs", EVENTS_FILE))
        if foreign:
            reason = f"holds {foreign[0]} but no {RUN_FILE}, so it is no run folder; give --out a new one"
            raise UserError(Problem(reason, where=str(out)))
    if is_checkpoint(out):
        reason = (
            f'holds weights, and is no run folder; to begin with them, give --out a new one and train.weights = "{out}"'
        )
        raise UserError(Problem(reason, where=str(out)))
    lock = FolderLock(out)
    try:
        for folder in reversed(complete(out)):
            try:
                check_file(folder, RUN_FILE, read_manifest(folder))
            except NewerFormat:
                raise
            except UserError:
                continue  # told when it is found not to verify
            check_same_job(folder, run)
            break
    except UserError:
        lock.release()
        raise
    return lock


def resume(train_state: TrainState, out: Path, fingerprint: str, log: Callable[[str], None]) -> Resumed | None:
    """Bring a freshly built trainee to the newest checkpoint of a run folder; None when there is none. Every rank calls it."""
    mesh = train_state.mesh
    if mesh.rank == 0:
        clean(out)
    folder = _choose(out, mesh, log)
    if folder is None:
        return None
    check_same_job(folder, train_state.run)
    return load(train_state, folder, fingerprint)


def _choose(out: Path, mesh: Mesh, log: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies; newer ones that do not are named with the reason, and set aside."""
    candidates = complete(out) if mesh.rank == 0 else []
    reasons: list[str] = []
    damaged: list[Path] = []
    # The first rank's view of the folder counts; names may reach other machines a little later.
    while (step := tell(mesh, numbers=[_next_step(candidates)])[0].numbers[0]) >= 0:
        folder = folder_of_step(out, step)
        newer, problem = False, ""
        try:
            problem = str(next(damage(folder, (mesh.rank, mesh.layout.world)), ""))
        except NewerFormat as e:
            newer, problem = True, str(e)
        words = tell(mesh, problem, [newer])
        problem = first_text(words)
        if any(w.numbers[0] for w in words):
            raise NewerFormat(problem)
        if not problem:
            for each in damaged if mesh.rank == 0 else []:
                log(f"{each.name} is set aside as {set_aside(each).name}; going on from {folder.name}, the one before")
            return folder
        log(f"warning: {problem}")
        reasons.append(problem)
        damaged.append(folder)
    if reasons:
        hint = f"no checkpoint of {out} verifies; mend them, or remove {checkpoints_of(out)} to begin anew"
        raise UserError(*reasons, hint)
    return None


def _next_step(candidates: list[Path]) -> int:
    """The newest of the checkpoints not yet looked at, -1 when there is none."""
    step = step_of(candidates.pop()) if candidates else None
    return -1 if step is None else step


def load(train_state: TrainState, folder: Path, fingerprint: str) -> Resumed:
    """Bring a trainee to the state of a checkpoint, whatever layout wrote it."""
    reader = SavedReader(folder, kind="")
    manifest = reader.manifest
    state = manifest.state
    check_same_data(folder, state.get("data"), fingerprint)
    _load_tensors(train_state, reader)
    try:
        train_state.loss_scale = LossScale(**state["loss_scale"])
        train_state.step, train_state.tokens, more = manifest.step, state["tokens"], state["more"]
    except (KeyError, TypeError):
        raise UserError(Problem("does not say how far training had come", where=str(folder))) from None
    return Resumed(folder, manifest.step, more)


@torch.no_grad()
def _load_tensors(train_state: TrainState, reader: SavedReader) -> None:
    mesh = train_state.mesh
    beside: dict[str, dict[str, str]] = {}  # parameter to the names of the optimizer's state beside it
    for name in reader.names:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter, _, what = rest.rpartition("/")
            beside.setdefault(parameter, {})[what] = name
    for n, held in enumerate(train_state.parallel.parameters):
        place, mine = local_box(held, mesh), local(held.parameter)
        mine.copy_(read_box(reader, f"model/{held.name}", place))
        values = {}
        for what, name in beside.get(held.name, {}).items():
            number = not reader.shape(name)
            values[what] = reader.get(name) if number else read_box(reader, name, place).to(mine.dtype)
        if values:
            train_state.optimizer.set_state(n, values)
    for name, buffer in buffers(train_state):
        buffer.copy_(read_box(reader, f"model/{name}", Box((0,) * buffer.ndim, tuple(buffer.shape))))
    for device, _ in random_states(train_state):
        name = f"random/{mesh.rank}/{device}"
        if name in reader:
            set_random_state(train_state, device, reader.get(name))


def read_box(reader: SavedReader | WeightReader, name: str, place: Box) -> Tensor:
    """A box of a saved tensor, from the rows of all pieces that overlap it, or of the one piece that it is."""
    if name not in reader:
        raise UserError(Problem(f"does not hold {name}", where=str(reader.folder)))
    if isinstance(reader, WeightReader):
        first, *others = [slice(o, o + n) for o, n in zip(place.offset, place.size, strict=True)]
        return reader.rows(name, first.start, first.stop)[(slice(None), *others)]
    pieces = reader.pieces[name]
    values = torch.empty(place.size, dtype=reader.dtype(name))
    saved = TensorStorageMetadata(
        TensorProperties(dtype=values.dtype), torch.Size(reader.shape(name)), [_chunk(p.offset, p.size) for p in pieces]
    )
    for item in create_read_items_for_chunk_list(name, saved, [_chunk(place.offset, place.size)]):
        piece = pieces[item.storage_index.index or 0]
        where = tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))
        reader.read(piece, item.storage_offsets, item.lengths, values[where])
    return values


def _chunk(offset: tuple[int, ...], size: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
