"""Writes a token set, shard by shard, in order. A shard gets its final name when it is full and safely on
disk, and the index comes last, so that what was interrupted can be told from what is whole and can be
continued behind its finished shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.shards import DOCUMENTS, DTYPES, ENDS, Index, dtype_for
from shardwise.data.tokenizer import Tokenizer

# A gigabyte of uint16.
SHARD_TOKENS = 2**29


class ShardWriter:
    """Writes tokens, in order, into shards of `shard_tokens`; a shard gets its name when it is full.
    `finished` counts the tokens in such shards, and a writer opened on a folder that already has some goes on
    behind them."""

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
        # A shard that was interrupted keeps its draft's name, and is written anew next time.
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
        """Add tokens behind those already written."""
        at = 0
        while at < len(tokens):
            if self._file is None:
                self._file = open(self.folder / f"{self._name()}.tmp", "wb")  # noqa: SIM115  closed when the shard is full
            piece = np.ascontiguousarray(tokens[at : at + self.shard_tokens - self._in_file], dtype=DTYPES[self.dtype])
            self._file.write(piece.data)
            self._hash.update(piece.data)
            self._in_file += len(piece)
            at += len(piece)
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
        """Close the last shard, write where documents end (arrays in order), the tokenizer and, last, the
        index."""
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
