"""Scores of every token of a set by a frozen network, stored beside the set: a reference's log-probability of the token, or a
teacher's k likeliest tokens at its position with their log-probabilities. A run that reads them holds no second network.

The scores are in the order of the set's tokens, one row of k for each, in files as long as the set; the index is written last. A
document of conversations is scored alone, whatever row it is packed into, so its scores serve every `train.seq_len` up to the one
they were made with. A text is read in windows, whose length decides the context of a token: there `train.seq_len` has to be the
same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.shards import DTYPES, TokenSet, dtype_for
from shardwise.files import sync, write_atomically
from shardwise.run import Run
from shardwise.run.problems import Problem, UserError
from shardwise.run.sections.objective import FACTS, targets_of

INDEX, LOGPROBS, TOKENS = "index.json", "logprobs.bin", "tokens.bin"
FORMAT, VERSION = "shardwise-scores", 1


@dataclass(frozen=True)
class ScoreIndex:
    """The content of `index.json`."""

    kind: str
    """`reference` or `teacher`."""
    source: str
    """The folder of the network's weights."""
    fingerprint: str
    """The fingerprint of the set."""
    tokens: int
    count: int
    """Log-probabilities stored per token (k)."""
    vocab: int
    temperature: float
    seq_len: int
    separate_documents: bool
    dtype: str

    @property
    def digest(self) -> str:
        """A hash of everything that determines the scores."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def score_index(run: Run, tokens: TokenSet, source: str) -> ScoreIndex:
    """The index of the scores that a run would write beside a set."""
    teaches = FACTS[run.objective.kind].teacher
    return ScoreIndex(
        kind=kind_of(run),
        source=source,
        fingerprint=tokens.fingerprint,
        tokens=tokens.tokens,
        count=targets_of(run.objective, run.model.vocab) - 1 if teaches else 1,
        vocab=run.model.vocab,
        temperature=run.objective.temperature if teaches else 1.0,
        seq_len=run.train.seq_len,
        separate_documents=run.data.separate_documents,
        dtype="float64" if run.train.dtype == "float64" else "float32",
    )


def kind_of(run: Run) -> str:
    """Which network's scores a run reads."""
    return "teacher" if FACTS[run.objective.kind].teacher else "reference"


def folder_of(tokens: TokenSet, kind: str) -> Path:
    """The folder of a set's scores."""
    return tokens.folder / f"scores-{kind}"


def _files(index: ScoreIndex) -> dict[str, np.dtype[Any]]:
    token = DTYPES[dtype_for(index.vocab)]
    return {LOGPROBS: np.dtype(index.dtype)} | ({TOKENS: token} if index.kind == "teacher" else {})


class ScoreWriter:
    """Writes scores from many ranks at once: rank 0 allocates the files, then each rank writes its scores at their positions. They
    are written, not mapped: on a network filesystem ranks of two machines would overwrite each other's halves of a page, and a full
    disk would kill a rank by a signal."""

    def __init__(self, folder: Path, index: ScoreIndex) -> None:
        self.folder, self.index = folder, index
        self.files: dict[str, int] = {}

    def _draft(self, name: str) -> Path:
        return self.folder / f"{name}.part"

    def begin(self) -> None:
        """Allocate the files; files of an interrupted scoring are overwritten."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / INDEX).unlink(missing_ok=True)
        for name, dtype in _files(self.index).items():
            with open(self._draft(name), "wb") as file:
                os.truncate(file.fileno(), self.index.tokens * self.index.count * dtype.itemsize)

    def open(self) -> None:
        """Open the files; call before the first `put`."""
        self.files = {name: os.open(self._draft(name), os.O_WRONLY | os.O_CLOEXEC) for name in _files(self.index)}

    def put(self, places: NDArray[np.int64], logprobs: NDArray[Any], tokens: NDArray[Any] | None) -> None:
        """Write the scores of the set's tokens at indices `places`; -1 is skipped."""
        known = np.flatnonzero(places >= 0)
        for run in np.split(known, np.flatnonzero(np.diff(places[known]) != 1) + 1):  # of neighbours
            for name, values in ((LOGPROBS, logprobs), (TOKENS, tokens)):
                if len(run) and values is not None:
                    self._write(name, int(places[run[0]]), values[run])

    def _write(self, name: str, first: int, values: NDArray[Any]) -> None:
        dtype = _files(self.index)[name]
        data = np.ascontiguousarray(values, dtype=dtype).tobytes()
        begin, done = first * self.index.count * dtype.itemsize, 0
        try:
            while done < len(data):
                done += os.pwrite(self.files[name], memoryview(data)[done:], begin + done)
        except OSError as e:
            raise UserError(Problem(f"cannot be written: {e.strerror}", where=str(self._draft(name)))) from None

    def close(self) -> None:
        """Flush this rank's scores to disk."""
        for file in self.files.values():
            os.fsync(file)
            os.close(file)
        self.files = {}

    def finish(self) -> None:
        """Rename the files into place and write the index; call once, when all ranks have closed."""
        for name in _files(self.index):
            sync(self._draft(name))
            os.replace(self._draft(name), self.folder / name)
        content = {"format": FORMAT, "version": VERSION, **asdict(self.index)}
        write_atomically(self.folder / INDEX, json.dumps(content, indent=1).encode("utf-8"))


class Scores:
    """The scores of a set, opened for reading."""

    def __init__(self, folder: Path, index: ScoreIndex) -> None:
        self.index = index
        shape = (index.tokens, index.count)
        self.maps = {name: np.memmap(folder / name, dtype, "r", shape=shape) for name, dtype in _files(index).items()}

    def fill(self, places: NDArray[np.int64], logprobs: NDArray[Any], tokens: NDArray[Any] | None) -> None:
        """Copy the scores of the set's tokens at indices `places` into arrays [places, k]. Their k may be smaller than the stored
        one: they then get the likeliest tokens."""
        known, asked = places >= 0, logprobs.shape[1]
        logprobs[known] = self.maps[LOGPROBS][places[known], :asked]
        if tokens is not None:
            tokens[known] = self.maps[TOKENS][places[known], :asked]


def open_scores(run: Run, tokens: TokenSet, key: str) -> Scores | Problem:
    """The scores of one of a run's sets, or the problem with them."""
    wanted, folder = score_index(run, tokens, ""), folder_of(tokens, kind_of(run))

    def wrong(reason: str) -> Problem:
        return Problem(f"{reason}; `shardwise data score` of this run writes it", key, str(folder))

    try:
        content = json.loads((folder / INDEX).read_bytes())
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            return wrong("is of another format or version")
        found = ScoreIndex(**{each.name: content[each.name] for each in fields(ScoreIndex)})
        sizes = {name: found.tokens * found.count * dtype.itemsize for name, dtype in _files(found).items()}
    except (FileNotFoundError, NotADirectoryError):
        return wrong(f"there are no scores of a {wanted.kind} for this set")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        return wrong(f"its index cannot be read: {e}")
    if any(not (folder / name).is_file() or (folder / name).stat().st_size != size for name, size in sizes.items()):
        return wrong("is incomplete")
    if found.fingerprint != wanted.fingerprint:
        return wrong("was made from other tokens than the set has now")
    for name, least in (("vocab", wanted.vocab), ("temperature", wanted.temperature)):
        if getattr(found, name) != least:
            return wrong(f"was made with {name} = {getattr(found, name)}, and the run has {least}")
    if found.count < wanted.count:
        return wrong(f"has the {found.count} likeliest tokens, and objective.teacher_tokens = {wanted.count}")
    text = not tokens.index.marked
    if text and (found.seq_len, found.separate_documents) != (wanted.seq_len, wanted.separate_documents):
        return wrong(
            f"was made in windows of {found.seq_len} tokens, and train.seq_len = {wanted.seq_len}, or of documents apart"
        )
    if found.seq_len < wanted.seq_len:
        return wrong(f"was made with train.seq_len = {found.seq_len}, and the run has {wanted.seq_len}")
    return Scores(folder, found)


def opened(run: Run, sets: Sequence[TokenSet], key: str, problems: list[Problem]) -> list[Scores]:
    """The scores of several sets; problems with them are appended to `problems`."""
    found = [open_scores(run, each, key) for each in sets] if run.objective.stored else []
    problems += [each for each in found if isinstance(each, Problem)]
    return [each for each in found if isinstance(each, Scores)]
