"""A run folder: the names in its `checkpoints/`, and the lock that keeps other runs out.

`step-00000100` is a complete checkpoint. A name that begins with a dot is a checkpoint being written or removed, of no value once
its run is over. `damaged-step-…` failed to verify and was set aside. A checkpoint is renamed before it is removed, so that a crash
in between never leaves half a checkpoint under a checkpoint's name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
from datetime import UTC, datetime
from pathlib import Path

from shardwise.checkpoint.format import MANIFEST, RUN_FILE
from shardwise.files import sync
from shardwise.run import Problem, UserError

LOCK = ".lock"
_STEP = re.compile(r"step-(\d{8,})")
_DAMAGED = re.compile(r"damaged-step-(\d{8,})")
_PASSING = re.compile(r"\.step-\d{8,}\..*")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def checkpoints_of(out: Path) -> Path:
    """The folder of a run's checkpoints."""
    return out / "checkpoints"


def folder_of_step(out: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return checkpoints_of(out) / f"step-{step:08d}"


def draft_of_step(out: Path, step: int, attempt: str) -> Path:
    """The folder in which the checkpoint of a step is written. `attempt` differs each time a run is started, so that files of a
    dead run are never mistaken for this one's."""
    return checkpoints_of(out) / f".step-{step:08d}.{attempt}.partial"


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder, None for any other."""
    found = _STEP.fullmatch(folder.name)
    return int(found[1]) if found else None


def complete(out: Path) -> list[Path]:
    """A run folder's checkpoints, oldest first."""
    place = checkpoints_of(out)
    if not place.is_dir():
        return []
    found = {step: path for path in place.iterdir() if (step := step_of(path)) is not None and path.is_dir()}
    return [found[step] for step in sorted(found)]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds weights and the run that they belong to."""
    weights = ("model.safetensors", "model.safetensors.index.json", MANIFEST)
    return (folder / RUN_FILE).is_file() and any((folder / file).is_file() for file in weights)


def checkpoint_folder(path: str | Path) -> Path:
    """The path itself when it is a checkpoint, or the newest complete checkpoint of a run folder."""
    path = Path(path)
    for folder in (path, *reversed(complete(path))):
        if is_checkpoint(folder):
            return folder
    if not path.exists():
        reason = "there is no such folder"
    elif not path.is_dir():
        reason = "is a file; a checkpoint is a folder with run.toml and manifest.json or model.safetensors"
    elif (path / "config.json").is_file():
        reason = "is a Hugging Face folder; `shardwise convert from-hf` makes a checkpoint of it"
    elif checkpoints_of(path).is_dir():
        reason = "is a run folder without a complete checkpoint yet"
    else:
        reason = "is neither a checkpoint (run.toml, manifest.json or model.safetensors) nor a run folder with checkpoints/step-*"
    raise UserError(Problem(reason, where=str(path)))


def remove(folder: Path) -> None:
    """Remove a checkpoint: rename it first, then delete its files."""
    going = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.going")
    if going != folder:
        shutil.rmtree(going, ignore_errors=True)
        folder.rename(going)
        sync(folder.parent)
    shutil.rmtree(going, ignore_errors=True)


def clean(out: Path) -> None:
    """Remove half-written and half-removed checkpoints of earlier runs. Only the holder of the folder's lock may call it."""
    place = checkpoints_of(out)
    for path in place.iterdir() if place.is_dir() else ():
        if _PASSING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint that does not verify, so that it is neither resumed from nor counted among those to keep."""
    aside = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    sync(folder.parent)
    return aside


def retire(out: Path, keep: int, keep_every: int) -> None:
    """Remove all but the newest `keep` checkpoints and those of every `keep_every`-th step; and damaged ones, once the run has
    passed their step again."""
    whole = complete(out)
    for folder in whole[:-keep]:
        step = step_of(folder)
        if not (keep_every and step is not None and step % keep_every == 0):
            remove(folder)
    newest = step_of(whole[-1]) if whole else None
    for path in checkpoints_of(out).iterdir():
        found = _DAMAGED.fullmatch(path.name)
        if found and newest is not None and int(found[1]) <= newest:
            shutil.rmtree(path, ignore_errors=True)


class FolderLock:
    """Locks a run folder from construction until `release`. `warning` is set when the file system cannot lock.

    The operating system keeps the lock (`flock`) for as long as the process lives: when it dies, however it dies, the lock is gone
    with it, and no file has to be cleaned up or judged stale. On a file system shared by machines the lock holds between them if
    the file system supports it, as NFS does. The file's content, holder and start time, is only for the error message.
    """

    def __init__(self, out: Path) -> None:
        self.warning = ""
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as e:
            reason = "is a file, not a folder" if isinstance(e, FileExistsError) else f"cannot be written: {e.strerror}"
            raise UserError(Problem(reason, where=str(out))) from None
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            who = _holder(self.handle)
            if e.errno in _NO_LOCKS:
                self.warning = f"the file system of {out} has no locks; make sure that no other run uses the folder"
            else:
                os.close(self.handle)
                reason = f"is in use by another run{who}; wait for it to end, or give --out another folder"
                raise UserError(Problem(reason, where=str(out))) from None
        since = datetime.now(UTC).isoformat(timespec="seconds")
        note = dict(host=socket.gethostname(), process=os.getpid(), since=since)
        with contextlib.suppress(OSError):  # on a full disk the lock holds without the note
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, (json.dumps(note) + "\n").encode(), 0)

    def release(self) -> None:
        """Release the folder. The file stays: the next process to lock it may have it open already."""
        os.close(self.handle)


def _holder(handle: int) -> str:
    try:
        note = json.loads(os.pread(handle, 4096, 0))
        return f" (process {note['process']} on {note['host']}, since {note['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
