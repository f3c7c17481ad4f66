"""Tensors of a sharded checkpoint, whole or in part, put together from the pieces that overlap what is asked for.

Only the rows of a piece that are needed are read, a block at a time, so loading takes the memory of the result and one block.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.model.saved_files import BLOCK, Piece, checksum, open_plain, read_manifest, read_pieces
from shardwise.model.weight_files import DTYPES
from shardwise.run import Problem, UserError


class SavedReader:
    """The tensors of a checkpoint whose names begin with `kind`, which is left out of the names."""

    def __init__(self, folder: str | Path, kind: str = "model/") -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        pieces = read_pieces(self.folder, self.manifest)
        self.pieces = {name.removeprefix(kind): parts for name, parts in pieces.items() if name.startswith(kind)}

    @property
    def names(self) -> list[str]:
        """Every tensor."""
        return list(self.pieces)

    def __contains__(self, name: str) -> bool:
        return name in self.pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.pieces[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return DTYPES[self.pieces[name][0].dtype]

    def get(self, name: str) -> Tensor:
        """A whole tensor, in memory of its own; its bytes are held against their checksums."""
        return self._paste(name, 0, self.shape(name)[0] if self.shape(name) else 1)

    def part(self, name: str, index: int) -> Tensor:
        """One slice along the first dimension."""
        if not 0 <= index < self.shape(name)[0]:
            raise IndexError(f"{name} has no part {index}; its shape is {self.shape(name)}")
        return self._paste(name, index, index + 1)[0]

    def _paste(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of a tensor."""
        shape = self.shape(name)
        whole = torch.empty((last - first, *shape[1:]) if shape else (), dtype=self.dtype(name))
        for piece in self.pieces[name]:
            if not shape:
                self.read(piece, (), (), whole)
                continue
            begin, end = max(first, piece.offset[0]), min(last, piece.offset[0] + piece.size[0])
            if begin < end:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offset[1:], piece.size[1:], strict=True))
                start = (begin - piece.offset[0], *(0 for _ in box))
                self.read(
                    piece, start, (end - begin, *piece.size[1:]), whole[(slice(begin - first, end - first), *box)]
                )
        return whole

    def read(self, piece: Piece, start: Sequence[int], size: Sequence[int], into: Tensor) -> None:
        """Copy a box of a piece into a tensor of that box's shape. Whole pieces are held against their checksum."""
        if len(size) > 2 and size[1] < piece.size[1]:  # some rows of each matrix of a stack: one matrix after the other
            each = piece.bytes // piece.size[0]
            for n in range(size[0]):
                matrix = replace(piece, size=piece.size[1:], begin=piece.begin + (start[0] + n) * each)
                self.read(matrix, start[1:], size[1:], into[n])
            return
        width = DTYPES[piece.dtype].itemsize
        rows = size[0] if size else 1
        row = piece.bytes // max(1, piece.size[0]) if piece.size else width
        box = tuple(slice(o, o + n) for o, n in zip(start[1:], size[1:], strict=True))
        at_once = max(1, BLOCK // max(1, row))
        crc = 0
        handle = open_plain(self.folder / piece.file)
        try:
            for first in range(0, rows, at_once):
                count = min(at_once, rows - first)
                data = torch.empty(count * row, dtype=torch.uint8)
                where = piece.begin + ((start[0] if start else 0) + first) * row
                self._fill(handle, data, where, piece.file)
                crc = checksum(data.numpy(), crc)
                values = data.view(DTYPES[piece.dtype])
                if size:
                    into[first : first + count].copy_(values.view(count, *piece.size[1:])[(slice(None), *box)])
                else:
                    into.copy_(values.view(()))
        finally:
            os.close(handle)
        if (not size or rows == piece.size[0]) and crc != piece.crc:
            sentence = f"is damaged: the bytes of {piece.name} are not those written"
            raise UserError(Problem(sentence, where=str(self.folder / piece.file)))

    def _fill(self, handle: int, data: Tensor, where: int, file: str) -> None:
        view = data.numpy().data
        done = 0
        try:
            while done < len(view):
                got = os.preadv(handle, [view[done:]], where + done)
                if not got:
                    raise UserError(Problem("is shorter than was written", where=str(self.folder / file)))
                done += got
        except OSError as e:
            raise UserError(Problem(f"cannot be read: {e.strerror}", where=str(self.folder / file))) from None
