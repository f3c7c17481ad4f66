"""A token set on disk: shards of raw little-endian token ids, the offsets at which documents end, and an index.

A shard gets its final name when it is full and safely on disk, and the index is written last and in one step. So a folder has an
index only when everything in it is complete, and an interrupted build continues after its finished shards. A folder without an
index, or whose files disagree with it, is refused as half-written.

A set of conversations also has a mask beside each shard, one byte per token, 1 where the token is learned; and for each document
the number of tokens before its first learned one. A set of preferences has one byte per document, 1 where it is wanted. In a
paired set wanted and unwanted documents alternate, and where rows have a margin, each document stores its pair's. A set of prompts
stores the rows they come from.
"""

from __future__ import annotations

import bisect
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
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
MARKED_VERSION = 2
"""The version of sets with a mask, which a reader of version 1 would ignore."""
PROMPTS, LABELS, ROWS, ROW_ENDS = "prompts.bin", "labels.bin", "rows.jsonl", "rows.bin"
MARGINS = "margins.bin"
MASK = "mask-"
"""Begins the names of the files with the masks of shards."""
SKIPPED = "skipped.jsonl"
"""Rows that were left out, with file, line and reason."""
LENGTHS: dict[str, np.dtype[Any]] = {
    PROMPTS: np.dtype("<u4"), LABELS: np.dtype("u1"), ROW_ENDS: np.dtype("<u8"), MARGINS: np.dtype("<f4"),
}  # fmt: skip
"""The dtype of the files with one value per document."""
FILES_OF_KIND = {"chat": (PROMPTS,), "preference": (PROMPTS, LABELS), "prompts": (PROMPTS, ROW_ENDS)}
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS: np.dtype[Any] = np.dtype("<u8")

# A gigabyte of uint16.
SHARD_TOKENS = 2**29
# Each mapped file keeps a descriptor open, and a large set has more shards than a process may open files.
_MAPPED_AT_ONCE = 128


def dtype_for(vocab: int) -> str:
    """The smaller of the two dtypes that holds a vocabulary."""
    return "uint16" if vocab <= 2**16 else "uint32"


_OF_MARKED = ("kind", "paired", "learned", "truncated", "reasons", "margins")


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
    kind: str = "text"  # or "chat", "preference" or "prompts"
    paired: bool = False  # documents come in pairs, wanted before unwanted
    learned: int = 0  # tokens to learn, where there is a mask
    truncated: int = 0  # documents whose end was cut off
    reasons: dict[str, int] = field(default_factory=dict)  # skipped documents by reason
    margins: bool = False  # pairs have margins

    @property
    def marked(self) -> bool:
        """Whether the set has a mask: some tokens are learned, others not."""
        return self.kind != "text"

    def write(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": MARKED_VERSION if self.marked else VERSION, **asdict(self)}
        for name in () if self.marked else _OF_MARKED:
            del content[name]
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
    if content.get("version") not in (VERSION, MARKED_VERSION):
        raise refuse(
            f"is of version {content.get('version')!r}, and this shardwise reads version {VERSION} and {MARKED_VERSION}; "
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
            kind=str(content.get("kind", "text")),
            paired=content.get("paired") is True,
            learned=_count(content.get("learned", 0)),
            truncated=_count(content.get("truncated", 0)),
            reasons={str(name): _count(n) for name, n in dict(content.get("reasons", {})).items()},
            margins=content.get("margins") is True,
        )
    except (KeyError, TypeError, ValueError) as e:
        raise refuse(f"is damaged: {type(e).__name__} {e}") from None
    if index.dtype not in DTYPES:
        raise refuse(f'is damaged: dtype "{index.dtype}" is not one of {", ".join(DTYPES)}')
    if index.kind not in ("text", *FILES_OF_KIND):
        raise refuse(f'is of the kind "{index.kind}", which this shardwise does not know; update it')
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
        self._maps: dict[str, NDArray[Any]] = {}
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
        if self.index.marked:
            expected |= {MASK + name: tokens for name, tokens in self.index.shards}
            own = (*FILES_OF_KIND[self.index.kind], *((MARGINS,) if self.index.margins else ()))
            expected |= {name: self.index.documents * LENGTHS[name].itemsize for name in own}
        problems = []
        for name, size in expected.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                problems.append(Problem(f"{state}, and the index says {size}: the set is incomplete", where=str(path)))
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
        out = self._read(start, stop, self._dtype)
        vocab = self.index.tokenizer["vocab"]
        if len(out) and int(out.max()) >= vocab:
            wrong = start + int(np.argmax(out >= vocab))
            reason = (
                f"token {wrong:,} is {out.max()}, and the vocabulary has {vocab}: the set is damaged; build it again"
            )
            raise UserError(Problem(reason, where=str(self.folder)))
        return out

    def read_mask(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The mask of tokens start to stop, 1 where learned; all tokens of a text are learned."""
        if not self.index.marked:
            return np.ones(stop - start, dtype=np.uint8)
        return self._read(start, stop, LENGTHS[LABELS])

    def _read(self, start: int, stop: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        out = np.empty(stop - start, dtype=dtype)
        at = start
        shard = bisect.bisect_right(self._starts, start) - 1
        while at < stop:
            base, edge = self._starts[shard], self._starts[shard + 1]
            end = min(stop, edge)
            out[at - start : end - start] = self._shard(shard, dtype)[at - base : end - base]
            at, shard = end, shard + 1
        return out

    @cached_property
    def prompt_lengths(self) -> NDArray[Any]:
        """For each document, the number of tokens before the first learned one; for a pair, the number that both share."""
        return _map(self.folder / PROMPTS, LENGTHS[PROMPTS], self.documents)

    @cached_property
    def labels(self) -> NDArray[Any]:
        """For each document of a preference set, whether it is wanted."""
        return _map(self.folder / LABELS, LENGTHS[LABELS], self.documents)

    @cached_property
    def margins(self) -> NDArray[Any]:
        """For each document of a paired set, the margin of its pair, where rows have one."""
        return _map(self.folder / MARGINS, LENGTHS[MARGINS], self.documents)

    @cached_property
    def _row_ends(self) -> NDArray[Any]:
        return _map(self.folder / ROW_ENDS, LENGTHS[ROW_ENDS], self.documents)

    def start(self, document: int) -> int:
        """The first token of a document."""
        return int(self.ends[document - 1]) if document else 0

    def row(self, document: int) -> dict[str, Any]:
        """The row that a prompt comes from."""
        ends = self._row_ends
        start = int(ends[document - 1]) if document else 0
        with open(self.folder / ROWS, "rb") as file:
            file.seek(start)
            return json.loads(file.read(int(ends[document]) - start))

    def ends_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ends of documents (one past their last token) with start < end <= stop."""
        # With bounds of another dtype NumPy would convert, and so load, the whole array.
        first, last = np.searchsorted(self.ends, np.array([start, stop], dtype=ENDS), side="right")
        return self.ends[first:last].astype(np.int64)

    def _shard(self, number: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        name, tokens = self.index.shards[number]
        name = name if dtype == self._dtype else MASK + name
        mapped = self._maps.get(name)
        if mapped is None:
            if len(self._maps) >= _MAPPED_AT_ONCE:
                self._maps.pop(next(iter(self._maps)), None)
            mapped = self._maps[name] = _map(self.folder / name, dtype, tokens)
        return mapped


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)
