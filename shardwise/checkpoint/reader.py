"""Reads tensors of a checkpoint or of a folder of safetensors files, whole or one box at a time.

A box is assembled from the shards that overlap it. Only the needed rows of a shard are read, so reading takes the memory of the
result and one block, or one matrix of a stack. Nothing here can load a pickle, which could run any code put in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.format import (
    BLOCK,
    MANIFEST,
    Progress,
    Shard,
    checksum,
    open_plain,
    read_header,
    read_json,
    read_manifest,
    read_shards,
    some,
    unwatched,
)
from shardwise.run import Problem, UserError
from shardwise.run.problems import unreadable

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Reader:
    """The tensors of a folder by name, each read on demand."""

    def __init__(self, folder: Path, tensors: dict[str, list[Shard]], progress: Progress = unwatched) -> None:
        self.folder, self.shards, self.progress = folder, tensors, progress

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.shards)

    def __contains__(self, name: str) -> bool:
        return name in self.shards

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.shards[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self.shards[name][0].dtype

    def get(self, name: str) -> Tensor:
        """A whole tensor, in newly allocated memory."""
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    def row(self, name: str, index: int) -> Tensor:
        """One slice along the first dimension."""
        shape = self.shape(name)
        if not 0 <= index < shape[0]:
            raise IndexError(f"{name} has no row {index}; its shape is {shape}")
        return self.read(name, (index, *(0 for _ in shape[1:])), (1, *shape[1:]))[0]

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """A box of a tensor, in newly allocated memory."""
        self._check_held(name)
        values = torch.empty(tuple(size), dtype=self.shards[name][0].dtype)
        self.read_into(values, name, offset)
        return values

    def read_into(self, values: Tensor, name: str, offset: Sequence[int]) -> None:
        """Fill a tensor of any dtype, on any device, with the box of its shape that begins at `offset`. If the bytes cannot be
        read directly into the tensor, they are copied block by block. Shards read in full are verified by their checksum."""
        self._check_held(name)
        for shard in self.shards[name]:
            spans = [
                (max(o, p), min(o + n, p + m))
                for o, n, p, m in zip(offset, values.shape, shard.offset, shard.size, strict=True)
            ]
            if all(start < stop for start, stop in spans):
                where = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, offset, strict=True))
                begin = tuple(a - p for (a, _), p in zip(spans, shard.offset, strict=True))
                _read(shard, begin, values[where], self.progress)

    def _check_held(self, name: str) -> None:
        if name not in self:
            raise UserError(Problem(f"does not hold {name}", where=str(self.folder)))


def _read(shard: Shard, start: tuple[int, ...], into: Tensor, progress: Progress) -> None:
    """Copy the box of a shard that begins at `start` into a tensor of the box's shape."""
    if into.ndim == 0:
        shard, start, into = replace(shard, size=(1,)), (0,), into[None]
    row = shard.bytes // shard.size[0]
    if (
        into.ndim > 2 and into.shape[1] < shard.size[1]
    ):  # some rows of each matrix of a stack: one matrix after the other
        for n, matrix in enumerate(into):
            inner = replace(shard, size=shard.size[1:], begin=shard.begin + (start[0] + n) * row)
            _read(inner, start[1:], matrix, progress)
        return
    box = (slice(None), *(slice(o, o + n) for o, n in zip(start[1:], into.shape[1:], strict=True)))
    crc = 0
    handle = os.open(shard.file, os.O_RDONLY | os.O_CLOEXEC) if shard.crc is None else open_plain(shard.file)
    try:
        rows_of_block = max(1, BLOCK // row)
        for first in range(0, len(into), rows_of_block):
            target = into[first : first + rows_of_block]
            same = target.dtype == shard.dtype and target.device.type == "cpu"
            straight = same and target.is_contiguous() and target.shape[1:] == shard.size[1:]
            rows = target if straight else torch.empty((len(target), *shard.size[1:]), dtype=shard.dtype)
            data = rows.flatten().view(torch.uint8).numpy()
            _fill(handle, data.data, shard.begin + (start[0] + first) * row, shard.file, progress)
            crc = crc if shard.crc is None else checksum(data, crc)
            if not straight:
                target.copy_(rows[box])
    except OSError as e:
        raise unreadable(e, where=shard.file) from None
    finally:
        os.close(handle)
    if shard.crc is not None and len(into) == shard.size[0] and crc != shard.crc:
        message = f"is damaged: the bytes of {shard.name} are not those written"
        raise UserError(Problem(message, where=str(shard.file)))


def _fill(handle: int, into: memoryview, begin: int, file: Path, progress: Progress) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(handle, [into[done:]], begin + done)
        if not got:
            raise UserError(Problem("is shorter than its header says", where=str(file)))
        done += got
        progress(got)


def open_checkpoint(folder: Path, kind: str = "model/", progress: Progress = unwatched) -> Reader:
    """The tensors of a checkpoint whose names begin with `kind`, without that prefix; or those of a folder of weights."""
    if not (folder / MANIFEST).exists():
        return Reader(folder, find_weights(folder), progress)
    tensors = read_shards(folder, read_manifest(folder), progress)
    found = {name.removeprefix(kind): s for name, s in tensors.items() if name.startswith(kind)}
    return Reader(folder, found, progress)


def find_weights(folder: Path) -> dict[str, list[Shard]]:
    """The location of each tensor in `model.safetensors`, or in the numbered files that an index names. All headers are
    checked."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {tensor.name: [tensor] for tensor in read_header(single)}
    if not index.is_file():
        raise UserError(_nothing_to_read(folder))
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        raise UserError(Problem("must name the file of each tensor", "weight_map", str(index)))
    files = sorted(set(mapping.values()))
    # A name with a folder in it could reach any file of the machine.
    outside = [f for f in files if f in ("", ".", "..") or "/" in f or "\\" in f or not f.endswith(".safetensors")]
    if outside:
        message = f"names {some(outside)}; shards must be .safetensors files in the same folder"
        raise UserError(Problem(message, "weight_map", str(index)))
    tensors: dict[str, list[Shard]] = {}
    problems = []
    for file in files:
        try:
            found = {tensor.name: [tensor] for tensor in read_header(folder / file)}
        except UserError as e:
            problems += e.problems
            continue
        if twice := tensors.keys() & found.keys():
            problems.append(
                Problem(f"holds {some(sorted(twice))}, which another shard holds too", where=str(folder / file))
            )
        tensors |= found
    lost = [n for n, file in mapping.items() if n not in tensors or tensors[n][0].file.name != file]
    if lost and not problems:
        problems.append(Problem(f"names tensors that are not in their files: {some(lost)}", "weight_map", str(index)))
    if problems:
        raise UserError(*problems)
    return tensors


def _nothing_to_read(folder: Path) -> Problem:
    if not folder.is_dir():
        return Problem("there is no such folder", where=str(folder))
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
    if pickles:
        return Problem(
            f"holds only pickled weights ({some(pickles)}), and these are never loaded, because a pickle can run any code; take "
            "the model's safetensors files, or have whoever made the folder save it again with "
            "save_pretrained(..., safe_serialization=True)",
            where=str(folder),
        )
    return Problem("holds no model.safetensors and no model.safetensors.index.json", where=str(folder))


def compare_shapes(reader: Reader, expected: dict[str, tuple[int, ...]], names: Iterable[str]) -> list[Problem]:
    """The problems with a folder's tensors `names`: each should be in `expected`, with that shape."""
    where, names = str(reader.folder), list(names)
    problems = []
    if missing := [name for name in expected if name not in reader]:
        problems.append(Problem(f"tensors are missing: {some(missing)}", where=where))
    if unexpected := [name for name in names if name not in expected]:
        problems.append(Problem(f"holds tensors that this network does not have: {some(unexpected)}", where=where))
    wrong = [
        f"{name} is {list(reader.shape(name))} and should be {list(expected[name])}"
        for name in names
        if name in expected and reader.shape(name) != expected[name]
    ]
    if wrong:
        problems.append(Problem(f"shapes do not fit the network: {some(wrong)}", where=where))
    return problems
