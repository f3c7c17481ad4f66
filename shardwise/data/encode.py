"""One unit of work: read its documents, tokenise them in batches, and leave its tokens and document ends in
the work folder. The small record that says how many there are is renamed into place last, and marks the unit
as done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.documents import MOST_PROBLEMS, Part, Reader
from shardwise.data.inputs import Input, Unit
from shardwise.data.shards import DTYPES, ENDS, dtype_for
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.problems import Problem, UserError

# Characters tokenised in one call: enough to hide the cost of the call, few enough to stay small in memory.
_BATCH = 2**19

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Done:
    """What a finished unit holds."""

    tokens: int
    documents: int
    skipped: int
    text_bytes: int


class PartFiles:
    """Where a unit's outputs lie in the work folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self.tokens = folder / f"{number:06d}.tokens"
        self.ends = folder / f"{number:06d}.ends"
        self.record = folder / f"{number:06d}.json"

    def done(self) -> Done | None:
        """The record of a unit that was finished earlier."""
        try:
            return Done(**json.loads(self.record.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Job:
    """What is the same for every unit; each worker process gets it once."""

    inputs: Sequence[Input]
    field: str
    tokenizer: Tokenizer
    folder: Path

    def encode(self, unit: Unit, report: Report) -> Done:
        """Do one unit. `report(bytes, tokens)` is called as they are done."""
        files = PartFiles(self.folder, unit.number)
        total = sum(piece.bytes for piece in unit.pieces)
        told = 0

        def tell(consumed: int, tokens: int) -> None:
            nonlocal told
            consumed = min(consumed, total - told)  # sizes of row groups are estimates
            told += consumed
            report(consumed, tokens)

        drafts = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in (files.tokens, files.ends, files.record)]
        try:
            with open(drafts[0], "wb") as out:
                batches = _Batches(self.tokenizer, out, tell)
                self._read(unit, batches)
            drafts[1].write_bytes(np.array(batches.ends, dtype=ENDS).tobytes())
            done = Done(batches.tokens, len(batches.ends), batches.skipped, batches.text_bytes)
            drafts[2].write_text(json.dumps(asdict(done)), encoding="utf-8")
            for draft, path in zip(drafts, (files.tokens, files.ends, files.record), strict=True):
                os.replace(draft, path)
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)
        tell(total, 0)
        return done

    def _read(self, unit: Unit, batches: _Batches) -> None:
        problems: list[Problem] = []
        for piece in unit.pieces:
            reader = Reader(self.inputs[piece.input], piece, self.field)
            try:
                for part in reader:
                    batches.add(reader, part)
                batches.flush()
            except UserError as e:
                problems += e.problems
                batches.drop()
            if len(problems) >= MOST_PROBLEMS:
                break
        if problems:
            raise UserError(*problems)


class _Batches:
    """Gathers parts of documents, tokenises them together and writes them."""

    def __init__(self, tokenizer: Tokenizer, out: IO[bytes], tell: Report) -> None:
        self.tokenizer = tokenizer
        self.out = out
        self.tell = tell
        self.dtype = DTYPES[dtype_for(tokenizer.vocab)]
        self.end = np.array([tokenizer.end], dtype=self.dtype)
        self.ends: list[int] = []
        self.tokens = self.skipped = self.text_bytes = 0
        self._reader: Reader | None = None
        self._parts: list[Part] = []
        self._characters = self._consumed = 0

    def add(self, reader: Reader, part: Part) -> None:
        self._reader = reader
        self._consumed += part.consumed
        if part.first and part.last and (not part.text or part.text.isspace()):
            self.skipped += 1
            return
        self._parts.append(part)
        self._characters += len(part.text)
        if self._characters >= _BATCH:
            self.flush()

    def drop(self) -> None:
        """Forget what was gathered: the unit has failed."""
        self._parts, self._characters, self._consumed = [], 0, 0

    def flush(self) -> None:
        if self._parts:
            texts = [part.text for part in self._parts]
            self.text_bytes += sum(len(t) if t.isascii() else len(_utf8(t)) for t in texts)
            before = self.tokens
            pieces: list[NDArray[Any]] = []
            for part, ids in zip(self._parts, self._encode(texts), strict=True):
                # A tokenizer that normalises may leave nothing of a text.
                if part.first and part.last and not len(ids):
                    self.skipped += 1
                    continue
                pieces.append(ids)
                self.tokens += len(ids)
                if part.last:
                    pieces.append(self.end)
                    self.tokens += 1
                    self.ends.append(self.tokens)
            if pieces:
                self.out.write(np.concatenate(pieces, dtype=self.dtype).data)
            self.tell(self._consumed, self.tokens - before)
        self.drop()

    def _encode(self, texts: list[str]) -> list[NDArray[Any]]:
        try:
            return self.tokenizer.encode_batch(texts)
        except (UnicodeEncodeError, TypeError):
            self._blame()
            raise

    def _blame(self) -> None:
        """JSON can spell half a character; find the documents that do."""
        assert self._reader is not None
        for part in self._parts:
            try:
                part.text.encode("utf-8")
            except UnicodeEncodeError as e:
                message = f"holds half of a surrogate pair (character {e.start + 1}), which is not text"
                self._reader.refuse(part.place, message)
        if self._reader.problems:
            raise UserError(*self._reader.problems)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")
