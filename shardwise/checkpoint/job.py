"""Whether a run may use a folder: no other run is in it, and its checkpoints are of the same job.

Two runs are the same job, so that one may resume from the other's checkpoint, when they have the same network, data, order of data
and optimizer. The rest may change: the layout, the number of steps, learning rates, logging, and which checkpoints are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.checkpoint.folder import LOCK, FolderLock, complete, is_checkpoint
from shardwise.checkpoint.format import RUN_FILE, OtherFormat, check_file, read_manifest
from shardwise.parallel.mesh import Mesh
from shardwise.run import Problem, Run, UserError, read_run, to_dict
from shardwise.run.sections.objective import ObjectiveConfig

# These keys and the step number determine the samples of a step; data sets are compared by their fingerprint.
_FIXED = {
    "data": ("weights", "holdout", "separate_documents"),
    "train": ("seq_len", "global_batch", "seed", "optimizer", "parametrization", "base_width", "base_layers"),
    "objective": tuple(ObjectiveConfig.__dataclass_fields__),
    "adapter": ("kind", "rank", "alpha", "dropout", "targets", "rank_stabilized", "double_quantization"),
}
_BEFORE_THE_RUN = ("logs", "events.jsonl", "launch")  # files that the launcher writes before the run uses the folder


def model_differences(before: Run, now: Run) -> list[str]:
    """All keys in which two networks differ, as `section.key: before -> now`."""
    return _differences(before, now, {"model": tuple(key for key in to_dict(now)["model"] if key != "preset")})


def _differences(before: Run, now: Run, keys: dict[str, tuple[str, ...]]) -> list[str]:
    old, new = to_dict(before), to_dict(now)
    pairs = [(section, key) for section, fixed in keys.items() for key in fixed]
    return [f"{s}.{k}: {old[s][k]!r} -> {new[s][k]!r}" for s, k in pairs if old[s][k] != new[s][k]]


def check_same_job(checkpoint: Path, run: Run) -> None:
    """Refuse to resume from a checkpoint of another job, and name all differences."""
    before = read_run(checkpoint / RUN_FILE)
    changed = model_differences(before, run) + _differences(before, run, _FIXED)
    if changed:
        reason = f"holds another job: {'; '.join(changed)}. Give --out another folder, or restore these keys"
        raise UserError(Problem(reason, where=str(checkpoint)))


def check_same_data(checkpoint: Path, before: object, now: str) -> None:
    """Refuse to resume on data with different tokens."""
    if before != now:
        reason = "was trained on other data than the run now names (or the built-in corpus of another Python version)"
        raise UserError(Problem(reason, key="data.sets", where=str(checkpoint)))


def check_folder(run: Run, out: Path) -> None:
    """Raise if a run may not use a folder, before any rank starts: it is not a run folder, is in use, or holds another job."""
    lock_folder(run, out).release()


@contextmanager
def hold_folder(run: Run, out: Path, mesh: Mesh, log: Callable[[str], None]) -> Iterator[None]:
    """Lock the folder for this run; rank 0 holds the lock for all ranks. If it is refused on rank 0, all ranks raise."""
    lock: FolderLock | None = None
    problem: UserError | None = None
    if mesh.rank == 0:
        try:
            lock = lock_folder(run, out)
        except UserError as e:
            problem = e
    refused, _ = gather(mesh, str(problem or ""))
    if refused:
        raise problem or UserError(refused)
    try:
        if lock is not None and lock.warning:
            log(f"warning: {lock.warning}")
        yield
    finally:
        if lock is not None:
            lock.release()


def lock_folder(run: Run, out: Path) -> FolderLock:
    """Lock a folder, and check that the run may use it."""
    if out.is_dir() and not (out / RUN_FILE).exists() and not (out / LOCK).exists():
        foreign = sorted(path.name for path in out.iterdir() if path.name not in _BEFORE_THE_RUN)
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
            except OtherFormat:
                raise
            except UserError:
                continue  # reported later, when it fails to verify
            check_same_job(folder, run)
            break
    except UserError:
        lock.release()
        raise
    return lock


TEXT = 480  # bytes of a message that are sent


def gather(mesh: Mesh, text: str = "", numbers: Sequence[int] = ()) -> tuple[str, list[tuple[int, ...]]]:
    """The message of the first rank that has one ("" when none has), and the integers of every rank. All ranks must call it, with
    the same number of integers. They are sent as CPU tensors: `all_gather_object` would unpickle the received bytes."""
    if mesh.layout.world == 1:
        return text, [tuple(numbers)]
    message = text.encode()[:TEXT].ljust(TEXT, b"\0")
    mine = torch.cat(
        (
            torch.frombuffer(bytearray(message), dtype=torch.uint8),
            torch.tensor(numbers, dtype=torch.int64).view(torch.uint8),
        )
    )
    every = [torch.empty_like(mine) for _ in range(mesh.layout.world)]
    dist.all_gather(every, mine)
    texts = [bytes(each[:TEXT].tolist()).rstrip(b"\0").decode(errors="replace") for each in every]
    return next(filter(None, texts), ""), [tuple(each[TEXT:].clone().view(torch.int64).tolist()) for each in every]
