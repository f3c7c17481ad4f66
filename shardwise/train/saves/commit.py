"""The last steps of a checkpoint, taken by the first rank: every part is there and fits, the manifest is on the disk, and one
rename makes the checkpoint exist. A crash before it leaves the old state, a crash after it the new one.

The parts report by files, not by messages: a rank that dies sends no message and would leave a collective hanging, while a
file that does not come is simply waited for until the run itself is told to end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any

from shardwise.data.tokenizer import Tokenizer
from shardwise.model.saved_files import (
    MANIFEST,
    Manifest,
    data_file,
    file_checksum,
    read_pieces,
    table_file,
    to_json,
)
from shardwise.model.weight_writer import sync_folder, write_text
from shardwise.model.weights import RUN_FILE
from shardwise.run import Run, to_dict, to_toml
from shardwise.train.saves.folder import remove
from shardwise.train.saves.part import failure_file

PAUSE = 0.02  # seconds between looks at the folder


class NotSaved(Exception):
    """A checkpoint that did not come about, and why."""


@dataclass(frozen=True)
class Description:
    """What the first rank knows of a checkpoint, taken when the copy was."""

    run: Run
    step: int
    state: Mapping[str, Any]
    tokenizer: Tokenizer


def await_parts(draft: Path, world: int, stop: Event) -> None:
    """Return when every rank's table is there; raise when one says that it failed, or when told to stop."""
    while True:
        stopping = stop.is_set()  # looked at first, so that what is there when it is set still counts
        there = set(os.listdir(draft)) if draft.is_dir() else set()
        failed = [rank for rank in range(world) if failure_file(rank) in there]
        if failed:
            raise NotSaved((draft / failure_file(failed[0])).read_text(errors="replace"))
        missing = [rank for rank in range(world) if table_file(rank) not in there]
        if not missing:
            return
        if stopping:
            raise NotSaved(f"rank {missing[0]} did not write its part")
        stop.wait(PAUSE)


def commit(draft: Path, target: Path, description: Description) -> Manifest:
    """Verify the parts in the draft, complete it, and give it its name."""
    run = description.run
    write_text(draft / RUN_FILE, to_toml(run))
    description.tokenizer.save(draft)
    files: dict[str, tuple[int, int | None]] = {}
    data = {data_file(rank) for rank in range(run.layout.world)}
    for path in sorted(draft.iterdir()):
        files[path.name] = (path.stat().st_size, None if path.name in data else file_checksum(path))
        if path.name not in data:
            sync_file(path)
    manifest = Manifest(
        step=description.step,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        layout=to_dict(run)["layout"],
        state=dict(description.state),
        files=files,
    )
    read_pieces(draft, manifest)  # raises unless all pieces are there, and together make up every tensor
    write_text(draft / MANIFEST, to_json(manifest))
    sync_folder(draft)
    if target.exists():  # of a run that went back behind this step and came here again
        remove(target)
    draft.rename(target)
    return manifest


def sync_file(path: Path) -> None:
    """Bring a file that others wrote to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
