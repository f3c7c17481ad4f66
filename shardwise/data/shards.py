"""A token set on disk: shards of raw little-endian token ids, the offsets at which documents end, and an index.

A shard gets its final name when it is full and safely on disk, and the index is written last and in one step. So a folder has
an index only when everything in it is complete, and an interrupted build continues after its finished shards. A folder without
an index, or whose files disagree with it, is refused as half-written.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.files import write_atomically
from shardwise.run.problems import Problem, UserError
from shardwise.run.vocabulary import INDEX

DOCUMENTS = "documents.bin"
FORMAT = "shardwise-tokens"
VERSION = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS: np.dtype[Any] = np.dtype("<u8")

# A gigabyte of uint16.
SHARD_TOKENS = 2**29
# Each mapped file keeps a descriptor open, and a large set has more shards than a process may open files.
_MAPPED_AT_ONCE = 128


def dtype_for(vocab: int) -> str:
    """The smaller of the two dtypes that holds a vocabulary."""
    return "uint16" if vocab <= 2**16 else "uint32"


@dataclass(frozen=True)
class Index:
    """The content of `index.json`."""

    dtype: str
    tokens: int
    documents: int
    skipped: int  # documents left out because they were empty
    text_bytes: int
    shards: tuple[tuple[str, int], ...]  # file and tokens
    tokenizer: dict[str, Any]  # kind, vocab, end, digest
    source: tuple[str, ...]  # the inputs as the user named them
    fingerprint: str

    def write(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_atomically(folder / INDEX, json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8"))


def read_index(folder: str | Path) -> Index:
    """The index of a set, checked."""
    path = Path(folder) / INDEX

    def refuse(message: str, where: Path = path) -> UserError:
        return UserError(Problem(message, where=str(where)))

    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if not Path(folder).is_dir():
            raise refuse("there is no such folder", Path(folder)) from None
        raise refuse(
            f"holds no {INDEX}, so it is not a token set, or half of one: `shardwise data build` finishes it",
            Path(folder),
        ) from None
    except (OSError, ValueError, RecursionError) as e:
        raise refuse(f"cannot be read as the index of a token set: {e}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise refuse(f'is not the index of a token set (its "format" is not "{FORMAT}")')
    if content.get("version") != VERSION:
        raise refuse(
            f"is of version {content.get('version')!r}, and this shardwise reads version {VERSION}; "
            "update shardwise or build the set again"
        )
    try:
        index = Index(
            dtype=str(content["dtype"]),
            tokens=_count(content["tokens"]),
            documents=_count(content["documents"]),
            skipped=_count(content["skipped"]),
            text_bytes=_count(content["text_bytes"]),
            shards=tuple((str(name), _count(tokens)) for name, tokens in content["shards"]),
            tokenizer={
                "kind": str(content["tokenizer"]["kind"]),
                "vocab": _count(content["tokenizer"]["vocab"]),
                "end": _count(content["tokenizer"]["end"]),
                "digest": str(content["tokenizer"]["digest"]),
            },
            source=tuple(map(str, content["source"])),
            fingerprint=str(content["fingerprint"]),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise refuse(f"is damaged: {type(e).__name__} {e}") from None
    if index.dtype not in DTYPES:
        raise refuse(f'is damaged: dtype "{index.dtype}" is not one of {", ".join(DTYPES)}')
    for name, _ in index.shards:
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name:
            raise refuse(f'names the shard "{name}", which would lie outside the folder')
    if sum(tokens for _, tokens in index.shards) != index.tokens:
        raise refuse("is damaged: its shards do not add up to its tokens")
    return index


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


class TokenSet:
    """A token set opened for reading. Nothing is loaded: windows are read from memory-mapped files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = read_index(folder)
        self._dtype = DTYPES[self.index.dtype]
        self._check_sizes()
        self._starts = [0, *accumulate(tokens for _, tokens in self.index.shards)]
        self._maps: dict[int, NDArray[Any]] = {}
        self.ends: NDArray[Any] = _map(self.folder / DOCUMENTS, ENDS, self.index.documents)
        if int(self.ends[-1] if len(self.ends) else 0) != self.tokens:
            raise UserError(
                Problem("the documents do not end where the tokens end: the set is damaged", where=str(folder))
            )

    @classmethod
    def open(cls, folder: str | Path) -> TokenSet:
        return cls(folder)

    def _check_sizes(self) -> None:
        expected = {name: tokens * self._dtype.itemsize for name, tokens in self.index.shards}
        expected[DOCUMENTS] = self.index.documents * ENDS.itemsize
        problems = []
        for name, size in expected.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                problems.append(Problem(f"{state}, and the index says {size}: the set is not whole", where=str(path)))
        if problems:
            raise UserError(*problems)

    @property
    def tokens(self) -> int:
        return self.index.tokens

    @property
    def documents(self) -> int:
        return self.index.documents

    @property
    def fingerprint(self) -> str:
        return self.index.fingerprint

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the set was made with."""
        return load_tokenizer(self.folder)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start to stop of the whole set, also across shards."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"[{start}, {stop}) is not within the {self.tokens} tokens of {self.folder}")
        out = np.empty(stop - start, dtype=self._dtype)
        at = start
        shard = bisect.bisect_right(self._starts, start) - 1
        while at < stop:
            base, edge = self._starts[shard], self._starts[shard + 1]
            end = min(stop, edge)
            out[at - start : end - start] = self._shard(shard)[at - base : end - base]
            at, shard = end, shard + 1
        vocab = self.index.tokenizer["vocab"]
        if len(out) and int(out.max()) >= vocab:
            wrong = start + int(np.argmax(out >= vocab))
            reason = (
                f"token {wrong:,} is {out.max()}, and the vocabulary has {vocab}: the set is damaged; build it again"
            )
            raise UserError(Problem(reason, where=str(self.folder)))
        return out

    def ends_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ends of documents (one past their last token) with start < end <= stop."""
        # With bounds of another dtype NumPy would convert, and so load, the whole array.
        first, last = np.searchsorted(self.ends, np.array([start, stop], dtype=ENDS), side="right")
        return self.ends[first:last].astype(np.int64)

    def _shard(self, number: int) -> NDArray[Any]:
        mapped = self._maps.get(number)
        if mapped is None:
            if len(self._maps) >= _MAPPED_AT_ONCE:
                self._maps.pop(next(iter(self._maps)), None)
            name, tokens = self.index.shards[number]
            mapped = self._maps[number] = _map(self.folder / name, self._dtype, tokens)
        return mapped


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)


class ShardWriter:
    """Writes tokens, in order, into shards of `shard_tokens`. `finished` counts the tokens in full shards; a writer opened on a
    folder that has some continues after them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.dtype = dtype_for(tokenizer.vocab)
        self.shard_tokens = shard_tokens
        self._hash = hashlib.sha256(f"{tokenizer.digest}\n{self.dtype}\n".encode())
        self._shards: list[tuple[str, int]] = []
        self._file: Any = None
        self._in_file = 0
        while (folder / self._name()).exists():
            self._adopt(folder / self._name())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        # An interrupted shard keeps its temporary name, and is written again next time.
        if self._file is not None:
            self._file.close()

    @property
    def finished(self) -> int:
        return sum(tokens for _, tokens in self._shards)

    def _name(self) -> str:
        return f"tokens-{len(self._shards):05d}.bin"

    def _adopt(self, path: Path) -> None:
        with open(path, "rb") as file:
            while block := file.read(2**22):
                self._hash.update(block)
        self._shards.append((path.name, path.stat().st_size // DTYPES[self.dtype].itemsize))

    def append(self, tokens: NDArray[Any]) -> None:
        """Append tokens."""
        at = 0
        while at < len(tokens):
            if self._file is None:
                self._file = open(self.folder / f"{self._name()}.tmp", "wb")  # noqa: SIM115  closed when the shard is full
            block = np.ascontiguousarray(tokens[at : at + self.shard_tokens - self._in_file], dtype=DTYPES[self.dtype])
            self._file.write(block.data)
            self._hash.update(block.data)
            self._in_file += len(block)
            at += len(block)
            if self._in_file == self.shard_tokens:
                self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.folder / f"{self._name()}.tmp", self.folder / self._name())
            self._shards.append((self._name(), self._in_file))
            self._file, self._in_file = None, 0

    def finish(
        self,
        ends: Iterable[NDArray[Any]],
        *,
        skipped: int = 0,
        text_bytes: int = 0,
        source: Iterable[str] = (),
    ) -> Index:
        """Close the last shard; write the ends of documents, the tokenizer and, last, the index."""
        self._close()
        documents = 0
        with open(self.folder / f"{DOCUMENTS}.tmp", "wb") as file:
            for some in ends:
                block = np.ascontiguousarray(some, dtype=ENDS)
                file.write(block.data)
                self._hash.update(block.data)
                documents += len(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / f"{DOCUMENTS}.tmp", self.folder / DOCUMENTS)
        self.tokenizer.save(self.folder)
        index = Index(
            dtype=self.dtype,
            tokens=self.finished,
            documents=documents,
            skipped=skipped,
            text_bytes=text_bytes,
            shards=tuple(self._shards),
            tokenizer={
                "kind": self.tokenizer.kind,
                "vocab": self.tokenizer.vocab,
                "end": self.tokenizer.end,
                "digest": self.tokenizer.digest,
            },
            source=tuple(source),
            fingerprint=self._hash.hexdigest(),
        )
        index.write(self.folder)
        return index
