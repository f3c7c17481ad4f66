"""Writes a token set (`shards.py`). Finished shards are safe on disk; an interrupted shard is written again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.shards import DOCUMENTS, DTYPES, ENDS, MASK, SHARD_TOKENS, SKIPPED, Index, dtype_for
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
        # By the beginning of the files' names. The tokens are renamed last, so a shard that exists has its mask.
        self._hashes = {**({MASK: hashlib.sha256()} if self.marked else {}), "": self._hash}
        self._files: dict[str, IO[bytes]] = {}
        self._shards: list[tuple[str, int]] = []
        self._in_file = 0
        while (folder / self._name()).exists():
            self._adopt(folder / self._name())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        # An interrupted shard keeps its temporary name, and is written again next time.
        for file in self._files.values():
            file.close()

    @property
    def finished(self) -> int:
        return sum(tokens for _, tokens in self._shards)

    def _name(self) -> str:
        return f"tokens-{len(self._shards):05d}.bin"

    def _adopt(self, path: Path) -> None:
        for kind, digest in self._hashes.items():
            with open(path.with_name(kind + path.name), "rb") as file:
                while block := file.read(2**22):
                    digest.update(block)
        self._shards.append((path.name, path.stat().st_size // DTYPES[self.dtype].itemsize))

    def append(self, tokens: NDArray[Any], mask: NDArray[Any] | None = None) -> None:
        """Append tokens, with their mask if the set has one."""
        assert self.marked == (mask is not None)
        at = 0
        while at < len(tokens):
            if not self._files:
                for kind in self._hashes:
                    path = self.folder / f"{kind}{self._name()}.tmp"
                    self._files[kind] = open(path, "wb")  # noqa: SIM115  closed when the shard is full
            stop = min(at + self.shard_tokens - self._in_file, len(tokens))
            for kind, values, dtype in (("", tokens, DTYPES[self.dtype]), (MASK, mask, np.dtype(np.uint8))):
                if values is not None:
                    block = np.ascontiguousarray(values[at:stop], dtype=dtype)
                    self._files[kind].write(block.data)
                    self._hashes[kind].update(block.data)
            self._in_file += stop - at
            at = stop
            if self._in_file == self.shard_tokens:
                self._close()

    def _close(self) -> None:
        name = self._name()
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(self.folder / f"{kind}{name}.tmp", self.folder / f"{kind}{name}")
        if self._files:
            self._shards.append((name, self._in_file))
            self._files, self._in_file = {}, 0

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
            self._hash.update(f"{self.kind}\n{self._hashes[MASK].hexdigest()}\n".encode())
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
