"""Saves a run while it trains: training waits for the copy, a thread of its own does the rest.

The copy is written by every rank, the first rank commits it and removes what `train.keep` does not keep. A save that fails is
said and leaves the checkpoints before it as they are; training goes on, and only the last save of a run must succeed.
The next save waits for the one before. Whatever ranks must agree on they tell each other here, in the thread that trains:
a collective of another thread would be torn from its place among those of the training.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from torch import Tensor

from shardwise.data.tokenizer import Tokenizer
from shardwise.model.weight_writer import sync_folder
from shardwise.parallel.mesh import Mesh
from shardwise.report import words
from shardwise.run import UserError
from shardwise.train.metrics import FILE as METRICS
from shardwise.train.saves.commit import Description, NotSaved, await_parts, commit, sync_file
from shardwise.train.saves.contents import Kept, kept
from shardwise.train.saves.folder import checkpoints_of, draft_of_step, folder_of_step, remove, retire
from shardwise.train.saves.part import report_failure, write_part
from shardwise.train.saves.staging import Staging
from shardwise.train.saves.together import first_text, tell
from shardwise.train.step import TrainState

SPARE = 64 << 20  # bytes that a save leaves free, for the metrics and logs of the run
ROUND = 30.0  # seconds after which ranks that wait for each other's parts ask again
PATIENCE = 2.0  # seconds that the other ranks have for their parts when a run ends by an error


@dataclass
class _Saving:
    """A save on its way."""

    description: Description
    draft: Path
    pieces: list[Kept]
    began: float
    problem: str = ""
    written: Event = field(default_factory=Event)  # this rank's part is on the disk, or has failed
    stop: Event = field(default_factory=Event)  # wait for no other rank any more


class Saver:
    """The checkpoints of a run in its folder. Every rank has one, and all call the same methods in the same order."""

    def __init__(
        self, out: Path, mesh: Mesh, tokenizer: Tokenizer, fingerprint: str, log: Callable[[str], None]
    ) -> None:
        self.out = out
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.log = log
        self.staging = Staging()
        self.problem = ""  # why the last save did not come about; "" when it did
        self.attempt = first_text(tell(mesh, secrets.token_hex(4) if mesh.rank == 0 else ""))
        self._saving: _Saving | None = None
        self._thread: Thread | None = None

    def save(self, train_state: TrainState, more: Mapping[str, Any] | None = None) -> None:
        """Copy the state as it is now and have it written. `more` is kept beside the counters, plain JSON, and given back on
        resuming."""
        self._settle()
        pieces = kept(train_state)
        needed = sum(piece.values.nbytes for piece in pieces)
        heard = [each.numbers for each in tell(self.mesh, numbers=[needed, self._free()])]
        total, free = sum(bytes for bytes, _ in heard), min(free for _, free in heard)
        if total + SPARE > free:
            self.problem = (
                f"the disk of {self.out} has {words.size(free)} free, and a checkpoint takes {words.size(total)}, "
                f"with {words.size(SPARE)} to spare"
            )
            self.log(f"warning: step {train_state.step} is not saved: {self.problem}")
            return
        self.problem = ""
        began = time.perf_counter()
        staged = self.staging.copy(pieces)
        state = dict(
            tokens=train_state.tokens,
            loss_scale=asdict(train_state.loss_scale),
            data=self.fingerprint,
            more=dict(more or {}),
        )
        description = Description(train_state.run, train_state.step, state, self.tokenizer)
        draft = draft_of_step(self.out, train_state.step, self.attempt)
        self._saving = saving = _Saving(description, draft, pieces, began)

        def work() -> None:
            self._write(saving, staged)
            saving.written.set()
            if self.mesh.rank == 0:
                self._commit(saving)

        self._thread = Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Wait for the save under way; gives why the last one did not come about, or "". The same on all ranks."""
        self._settle()
        self.problem = first_text(tell(self.mesh, self.problem if self.mesh.rank == 0 else ""))
        return self.problem

    def abandon(self) -> None:
        """End without the other ranks, which may be gone: what is whole by now is still committed."""
        if self._saving is not None and self._thread is not None:
            self._saving.written.wait()
            self._thread.join(PATIENCE)
            self._saving.stop.set()
            self._thread.join()

    def _settle(self) -> None:
        """Wait for the save before, on all ranks."""
        saving, thread = self._saving, self._thread
        if saving is None or thread is None:
            return
        everyone = False
        while not everyone:  # in rounds, because a collective gives up on ranks that are merely slow to write
            written = saving.written.wait(ROUND)
            heard = tell(self.mesh, saving.problem, [written])
            everyone = all(each.numbers[0] for each in heard)
        if first_text(heard):
            saving.stop.set()  # the rank that failed may not even have had the room to say so in a file
        thread.join()
        self.problem = saving.problem
        if self.problem and self.mesh.rank == 0:
            remove(saving.draft)  # once more, now that no rank writes into it
        self._saving = self._thread = None

    def _write(self, saving: _Saving, staged: Tensor) -> None:
        try:
            write_part(saving.draft, self.mesh.rank, saving.pieces, staged)
        except Exception as e:  # whatever it is, the other ranks must not wait for this part
            reason = e.strerror if isinstance(e, OSError) else repr(e)
            saving.problem = f"rank {self.mesh.rank} cannot write {saving.draft}: {reason}"
            report_failure(saving.draft, self.mesh.rank, saving.problem)

    def _commit(self, saving: _Saving) -> None:
        """The first rank's work when its own part is done."""
        train, step = saving.description.run.train, saving.description.step
        target = folder_of_step(self.out, step)
        try:
            if saving.problem:
                raise NotSaved(saving.problem)
            await_parts(saving.draft, self.mesh.layout.world, saving.stop)
            if (metrics := self.out / METRICS).exists():
                sync_file(metrics)  # a power cut must not leave a checkpoint ahead of its curve
            manifest = commit(saving.draft, target, saving.description)
        except Exception as e:
            known = isinstance(e, NotSaved | UserError | OSError)
            saving.problem = saving.problem or (str(e) if known else repr(e))
            self.log(f"warning: step {step} is not saved: {saving.problem}; the checkpoints before it stay")
            remove(saving.draft)
            return
        taken = words.seconds(time.perf_counter() - saving.began)
        self.log(f"step {step}: saved {target} ({words.size(manifest.bytes)} in {taken})")
        try:
            sync_folder(target.parent)
            retire(self.out, train.keep, train.keep_every)
        except OSError as e:
            self.log(f"warning: after step {step} was saved, older checkpoints stay: {e.strerror}")

    def _free(self) -> int:
        """Bytes free where checkpoints go."""
        place = checkpoints_of(self.out)
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free
