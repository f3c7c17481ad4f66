"""Writes checkpoints of a run while it trains: training waits only for the copy, a background thread does the rest.

Every rank writes its copy; rank 0 commits, and removes the checkpoints that `train.keep` does not keep. A checkpoint that fails is
logged and leaves earlier ones as they are; training goes on, and only the last checkpoint of a run must succeed. A checkpoint
waits for the previous one. Ranks gather the values they must agree on in the training thread: collectives of another thread would
interleave with those of training, in a different order on every rank.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from torch import Tensor

from shardwise.checkpoint.adapters import describe_base
from shardwise.checkpoint.commit import Description, NotSaved, await_shards, commit
from shardwise.checkpoint.folder import checkpoints_of, draft_of_step, folder_of_step, remove, retire
from shardwise.checkpoint.format import LocalShard, Progress, unwatched
from shardwise.checkpoint.job import gather
from shardwise.checkpoint.run_state import State
from shardwise.checkpoint.state import Staging, local_shards
from shardwise.checkpoint.writer import report_failure, write_shards
from shardwise.data.tokenizer import Tokenizer
from shardwise.files import sync
from shardwise.parallel.mesh import Mesh
from shardwise.report import words
from shardwise.run import UserError

SPARE = 64 << 20  # bytes that a checkpoint leaves free, for the metrics and logs of the run
ROUND = 30.0  # seconds after which ranks that wait for each other's shards ask again
PATIENCE = 2.0  # seconds that the other ranks have for their shards when a run ends by an error


@dataclass
class _Pending:
    """A checkpoint being written."""

    description: Description
    draft: Path
    shards: list[LocalShard]
    began: float
    problem: str = ""
    written: Event = field(default_factory=Event)  # this rank's shards are on the disk, or have failed
    stop: Event = field(default_factory=Event)  # do not wait for other ranks any longer


class Saver:
    """Writes the checkpoints of a run into its folder. Every rank has a `Saver`, and all call the same methods in the same
    order."""

    def __init__(
        self,
        out: Path,
        mesh: Mesh,
        tokenizer: Tokenizer,
        fingerprint: str,
        log: Callable[[str], None],
        progress: Progress = unwatched,
    ) -> None:
        self.out, self.mesh, self.log, self.progress = out, mesh, log, progress
        self.tokenizer, self.fingerprint = tokenizer, fingerprint
        self.staging = Staging()
        self.problem = ""  # why the last checkpoint was not saved; "" when it was
        self.attempt, _ = gather(mesh, secrets.token_hex(4) if mesh.rank == 0 else "")
        self._described: dict[str, Any] | None = None  # the adapters' base
        self._pending: _Pending | None = None
        self._thread: Thread | None = None

    def save(self, state: State, more: Mapping[str, Any] | None = None) -> None:
        """Copy the current state and start writing it. `more` is plain JSON, stored beside the counters and returned on
        resuming."""
        self._settle()
        shards = local_shards(state)
        needed = sum(shard.values.nbytes for shard in shards)
        _, every = gather(self.mesh, numbers=[needed, self._free()])
        total, free = sum(needed for needed, _ in every), min(free for _, free in every)
        if total + SPARE > free:
            self.problem = (
                f"the disk of {self.out} has {words.size(free)} free, and a checkpoint takes {words.size(total)}, "
                f"with {words.size(SPARE)} to spare"
            )
            self.log(f"warning: step {state.step} is not saved: {self.problem}")
            return
        self.problem = ""
        if self._described is None:
            self._described = describe_base(state.run)
        began = time.perf_counter()
        staged = self.staging.copy(shards)
        counters = dict(
            tokens=state.tokens,
            loss_scale=dict(scale=state.loss_scale.scale, good=state.loss_scale.good),
            data=self.fingerprint,
            more=dict(more or {}),
            **self._described,
        )
        description = Description(state.job, state.step, counters, self.tokenizer)
        draft = draft_of_step(self.out, state.step, self.attempt)
        self._pending = pending = _Pending(description, draft, shards, began)

        def work() -> None:
            self._write(pending, staged)
            pending.written.set()
            if self.mesh.rank == 0:
                self._commit(pending)

        self._thread = Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Wait for the checkpoint being written; returns why the last one was not saved, or "". The same on all ranks."""
        self._settle()
        self.problem, _ = gather(self.mesh, self.problem if self.mesh.rank == 0 else "")
        return self.problem

    def abandon(self) -> None:
        """End without the other ranks, which may be gone: a checkpoint whose shards are all written by now is still committed."""
        if self._pending is not None and self._thread is not None:
            self._pending.written.wait()
            self._thread.join(PATIENCE)
            self._pending.stop.set()
            self._thread.join()

    def _settle(self) -> None:
        """Wait for the previous checkpoint, on all ranks."""
        pending, thread = self._pending, self._thread
        if pending is None or thread is None:
            return
        everyone = False
        while not everyone:  # in rounds, because one collective would time out on ranks that are merely slow to write
            written = pending.written.wait(ROUND)
            failed, every = gather(self.mesh, pending.problem, [written])
            everyone = all(written for (written,) in every)
        if failed:
            pending.stop.set()  # the failed rank may not have been able to write its failure file
        thread.join()
        self.problem = pending.problem
        if self.problem and self.mesh.rank == 0:
            remove(pending.draft)  # once more, now that no rank writes into it
        self._pending = self._thread = None

    def _write(self, pending: _Pending, staged: Tensor) -> None:
        try:
            write_shards(pending.draft, self.mesh.rank, pending.shards, staged, self.progress)
        except Exception as e:  # whatever it is, the other ranks must not wait for these shards
            reason = e.strerror if isinstance(e, OSError) else repr(e)
            pending.problem = f"rank {self.mesh.rank} cannot write {pending.draft}: {reason}"
            report_failure(pending.draft, self.mesh.rank, pending.problem)

    def _commit(self, pending: _Pending) -> None:
        """Rank 0's work after its own shards are written."""
        train, step = pending.description.run.train, pending.description.step
        target = folder_of_step(self.out, step)
        try:
            if pending.problem:
                raise NotSaved(pending.problem)
            await_shards(pending.draft, self.mesh.layout.world, pending.stop)
            for records in self.out.glob("*.jsonl"):
                sync(records)  # a power cut must not leave a checkpoint ahead of the metrics of its steps
            manifest = commit(pending.draft, target, pending.description, self.progress)
        except Exception as e:
            known = isinstance(e, NotSaved | UserError | OSError)
            pending.problem = pending.problem or (str(e) if known else repr(e))
            self.log(f"warning: step {step} is not saved: {pending.problem}; the checkpoints before it stay")
            remove(pending.draft)
            return
        taken = words.seconds(time.perf_counter() - pending.began)
        self.log(f"step {step}: saved {target} ({words.size(manifest.bytes)} in {taken})")
        try:
            sync(target.parent)
            retire(self.out, train.keep, train.keep_every)
        except OSError as e:
            self.log(f"warning: after step {step} was saved, older checkpoints stay: {e.strerror}")

    def _free(self) -> int:
        """Bytes free on the disk of the checkpoints."""
        place = checkpoints_of(self.out)
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free
