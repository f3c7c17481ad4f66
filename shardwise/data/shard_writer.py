"""Writes a token set (`shards.py`). Finished shards are safe on disk; an interrupted shard is written again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.shards import DOCUMENTS, DTYPES, ENDS, SHARD_TOKENS, SKIPPED, Index, dtype_for, mask_of
from shardwise.data.tokenizer import Tokenizer, facts_of


class ShardWriter:
    """Writes tokens, in order, into shards of `shard_tokens`, and a mask beside each shard if the set's `kind` has one. `finished`
    counts the tokens in full shards; a writer opened on a folder with full shards continues after them."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS, kind: str = "text"
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.dtype = dtype_for(tokenizer.vocab)
        self.shard_tokens = shard_tokens
        self.kind = kind
        self.marked = kind != "text"
        self._hash = hashlib.sha256(f"{tokenizer.digest}\n{self.dtype}\n".encode())
        self._mask_hash = hashlib.sha256()
        self._shards: list[tuple[str, int]] = []
        self._file: Any = None
        self._mask_file: Any = None
        self._in_file = 0
        while (folder / self._name()).exists():
            self._adopt(folder / self._name())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        # An interrupted shard keeps its temporary name, and is written again next time.
        for file in (self._file, self._mask_file):
            if file is not None:
                file.close()

    @property
    def finished(self) -> int:
        return sum(tokens for _, tokens in self._shards)

    def _name(self) -> str:
        return f"tokens-{len(self._shards):05d}.bin"

    def _adopt(self, path: Path) -> None:
        _add_file(self._hash, path)
        if self.marked:
            _add_file(self._mask_hash, path.with_name(mask_of(path.name)))
        self._shards.append((path.name, path.stat().st_size // DTYPES[self.dtype].itemsize))

    def append(self, tokens: NDArray[Any], mask: NDArray[Any] | None = None) -> None:
        """Append tokens, with their mask if the set has one."""
        assert self.marked == (mask is not None)
        at = 0
        while at < len(tokens):
            if self._file is None:
                self._open()
            block = np.ascontiguousarray(tokens[at : at + self.shard_tokens - self._in_file], dtype=DTYPES[self.dtype])
            self._file.write(block.data)
            self._hash.update(block.data)
            if mask is not None:
                marks = np.ascontiguousarray(mask[at : at + len(block)], dtype=np.uint8)
                self._mask_file.write(marks.data)
                self._mask_hash.update(marks.data)
            self._in_file += len(block)
            at += len(block)
            if self._in_file == self.shard_tokens:
                self._close()

    def _open(self) -> None:
        self._file = open(self.folder / f"{self._name()}.tmp", "wb")  # noqa: SIM115  closed when the shard is full
        if self.marked:
            self._mask_file = open(self.folder / f"{mask_of(self._name())}.tmp", "wb")  # noqa: SIM115

    def _close(self) -> None:
        if self._file is not None:
            # The tokens are renamed last, so a shard that exists has its mask.
            if self._mask_file is not None:
                self._settle(self._mask_file, mask_of(self._name()))
            self._settle(self._file, self._name())
            self._shards.append((self._name(), self._in_file))
            self._file, self._mask_file, self._in_file = None, None, 0

    def _settle(self, file: Any, name: str) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(self.folder / f"{name}.tmp", self.folder / name)

    def finish(
        self,
        ends: Iterable[NDArray[Any]],
        *,
        skipped: int = 0,
        text_bytes: int = 0,
        source: Iterable[str] = (),
        files: Mapping[str, Iterable[bytes]] | None = None,
        **more: Any,
    ) -> Index:
        """Close the last shard. Then write the ends of documents, the other per-document `files`, the tokenizer and, last, the
        index, which also stores `more`."""
        self._close()
        documents = self._write(DOCUMENTS, (np.ascontiguousarray(some, dtype=ENDS).data for some in ends), self._hash)
        if self.marked:
            self._hash.update(f"{self.kind}\n{self._mask_hash.hexdigest()}\n".encode())
        for name, blocks in (files or {}).items():
            # The list of skipped rows is not content of the set, so the fingerprint leaves it out.
            self._write(name, blocks, self._hash if name != SKIPPED else hashlib.sha256())
        self.tokenizer.save(self.folder)
        index = Index(
            dtype=self.dtype,
            tokens=self.finished,
            documents=documents // ENDS.itemsize,
            skipped=skipped,
            text_bytes=text_bytes,
            shards=tuple(self._shards),
            tokenizer=facts_of(self.tokenizer),
            source=tuple(source),
            fingerprint=self._hash.hexdigest(),
            kind=self.kind,
            **more,
        )
        index.write(self.folder)
        return index

    def _write(self, name: str, blocks: Iterable[Any], digest: Any) -> int:
        """Write a file and rename it into place; returns its size in bytes."""
        written = 0
        with open(self.folder / f"{name}.tmp", "wb") as file:
            for block in blocks:
                written += file.write(block)
                digest.update(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / f"{name}.tmp", self.folder / name)
        return written


def _add_file(digest: Any, path: Path) -> None:
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
