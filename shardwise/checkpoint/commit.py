"""The commit of a checkpoint, by rank 0: once every rank's file is there and verified and the manifest is on disk, one rename
makes the checkpoint exist. A crash before the rename leaves the old state, a crash after it the new one.

Ranks report by files, not by messages: a rank that dies sends no message and would leave a collective hanging, while a missing
file is simply waited for until the run itself ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any

from shardwise.checkpoint.folder import remove
from shardwise.checkpoint.format import (
    MANIFEST,
    RUN_FILE,
    Manifest,
    Progress,
    read_shards,
    shard_file,
    size_and_checksum,
    to_json,
    unwatched,
)
from shardwise.checkpoint.writer import failure_file
from shardwise.data.tokenizer import Tokenizer
from shardwise.files import sync, write_atomically
from shardwise.run import Run, to_dict, to_toml

PAUSE = 0.02  # seconds between polls of the folder


class NotSaved(Exception):
    """A checkpoint was not saved; the message says why."""


@dataclass(frozen=True)
class Description:
    """The metadata that rank 0 writes for a checkpoint, captured together with the copy of the state."""

    run: Run
    step: int
    state: Mapping[str, Any]
    tokenizer: Tokenizer


def await_shards(draft: Path, world: int, stop: Event) -> None:
    """Return when every rank's file is there; raise when a rank reports a failure, or when `stop` is set."""
    while True:
        stopping = stop.is_set()  # read first, so that files present when it is set still count
        there = set(os.listdir(draft)) if draft.is_dir() else set()
        failed = [rank for rank in range(world) if failure_file(rank) in there]
        if failed:
            raise NotSaved((draft / failure_file(failed[0])).read_text(errors="replace"))
        missing = [rank for rank in range(world) if shard_file(rank) not in there]
        if not missing:
            return
        if stopping:
            raise NotSaved(f"rank {missing[0]} did not write its shards")
        stop.wait(PAUSE)


def commit(draft: Path, target: Path, description: Description, progress: Progress = unwatched) -> Manifest:
    """Verify the files in the draft, complete it, and rename it to `target`."""
    run = description.run
    write_atomically(draft / RUN_FILE, to_toml(run).encode())
    description.tokenizer.save(draft)
    shards = {shard_file(rank) for rank in range(run.layout.world)}
    paths = sorted(draft.iterdir())
    for path in paths:
        if path.name not in shards:
            sync(path)
    files = {}
    for path in paths:
        files[path.name] = size_and_checksum(path)
        progress(1)
    manifest = Manifest(
        step=description.step,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        layout=to_dict(run)["layout"],
        state=dict(description.state),
        files=files,
    )
    read_shards(draft, manifest, progress)  # raises unless all shards are there, and together make up every tensor
    write_atomically(draft / MANIFEST, to_json(manifest).encode())
    sync(draft)
    if target.exists():  # of a run that rolled back and reached this step again
        remove(target)
    draft.rename(target)
    return manifest
