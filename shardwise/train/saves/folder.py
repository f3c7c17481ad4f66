"""The names in a run folder's `checkpoints/`: `step-00000100` is a whole checkpoint; a name that begins with a dot is one on its
way in or out, of no value once its run is over; `damaged-step-…` failed to verify and was set aside.

What is removed is first renamed, so that a crash in between never leaves half a checkpoint under a checkpoint's name.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from shardwise.model.weight_writer import sync_folder

_STEP = re.compile(r"step-(\d{8,})")
_DAMAGED = re.compile(r"damaged-step-(\d{8,})")
_PASSING = re.compile(r"\.step-\d{8,}\..*")


def checkpoints_of(out: Path) -> Path:
    """Where a run folder keeps its checkpoints."""
    return out / "checkpoints"


def folder_of_step(out: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return checkpoints_of(out) / f"step-{step:08d}"


def draft_of_step(out: Path, step: int, attempt: str) -> Path:
    """Where the checkpoint of a step is written. `attempt` differs each time a run is started, so that what a dead one left
    behind is never taken for a part of this one's."""
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


def remove(folder: Path) -> None:
    """Take a checkpoint away: out of sight at once, off the disk after it."""
    going = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.going")
    if going != folder:
        shutil.rmtree(going, ignore_errors=True)
        folder.rename(going)
        sync_folder(folder.parent)
    shutil.rmtree(going, ignore_errors=True)


def clean(out: Path) -> None:
    """Remove what an earlier run left half-written or half-removed. Only for who holds the folder's lock."""
    place = checkpoints_of(out)
    if place.is_dir():
        for path in place.iterdir():
            if _PASSING.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint that does not verify, so that it is neither resumed from nor counted among those to keep."""
    aside = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    sync_folder(folder.parent)
    return aside


def retire(out: Path, keep: int, keep_every: int) -> None:
    """Remove all but the newest `keep` checkpoints and those of every `keep_every`-th step; and damaged ones, once the run has
    come past them again."""
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
