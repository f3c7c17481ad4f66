"""Weights in folders of safetensors files, read a tensor, or a piece of one, at a time.

A folder holds `model.safetensors`, or numbered shards and an index that says which tensor is in which. Only
the bytes asked for are copied into memory. Nothing here can load a pickle, which could run any code put in
it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.run import Problem, UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Stored:
    """Where the bytes of a tensor lie."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightReader:
    """The tensors of a folder by name. Every header is checked at once; a tensor is read when it is asked
    for."""

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self.folder = Path(folder)
        self._stored: dict[str, Stored] = {}
        single = self.folder / f"{stem}.safetensors"
        if single.is_file():
            self._add(single, _read_header(single))
        else:
            self._open_shards(self.folder / f"{stem}.safetensors.index.json", stem)

    @property
    def names(self) -> list[str]:
        """Every tensor, in the order of the files."""
        return list(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header alone."""
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, from the header alone."""
        return self._stored[name].dtype

    def get(self, name: str) -> Tensor:
        """A tensor, read now into memory of its own."""
        stored = self._stored[name]
        return _read(stored, stored.offset, stored.shape)

    def part(self, name: str, index: int) -> Tensor:
        """One slice along the first dimension, without reading the others."""
        stored = self._stored[name]
        if not 0 <= index < stored.shape[0]:
            raise IndexError(f"{name} has no part {index}; its shape is {stored.shape}")
        return self.rows(name, index, index + 1)[0]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Some slices along the first dimension."""
        stored = self._stored[name]
        each = stored.bytes // max(stored.shape[0], 1)
        return _read(stored, stored.offset + first * each, (last - first, *stored.shape[1:]))

    def _add(self, file: Path, header: dict[str, Stored]) -> None:
        twice = self._stored.keys() & header.keys()
        if twice:
            raise UserError(Problem(f"holds {some(sorted(twice))}, which another shard holds too", where=str(file)))
        self._stored.update(header)

    def _open_shards(self, index: Path, stem: str) -> None:
        if not index.is_file():
            raise UserError(_nothing_to_read(self.folder, stem))
        content = read_json(index)
        mapping = content.get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
            raise UserError(Problem("must name the file of each tensor", "weight_map", str(index)))
        files = sorted(set(mapping.values()))
        # A name with a folder in it could reach any file of the machine.
        outside = [f for f in files if f in ("", ".", "..") or "/" in f or "\\" in f or not f.endswith(".safetensors")]
        if outside:
            sentence = f"names {some(outside)}; shards must be .safetensors files in the same folder"
            raise UserError(Problem(sentence, "weight_map", str(index)))
        problems = []
        for file in files:
            try:
                self._add(self.folder / file, _read_header(self.folder / file))
            except UserError as e:
                problems += e.problems
        lost = [n for n, file in mapping.items() if n not in self or self._stored[n].file.name != file]
        if lost and not problems:
            problems.append(
                Problem(f"names tensors that are not in their files: {some(lost)}", "weight_map", str(index))
            )
        if problems:
            raise UserError(*problems)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or a sentence about what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as e:
        raise UserError(Problem(f"cannot be read: {e.strerror}", where=str(path))) from None
    except (ValueError, RecursionError) as e:
        raise UserError(Problem(f"is not valid JSON: {e}", where=str(path))) from None
    if not isinstance(content, dict):
        raise UserError(Problem("must hold a JSON object", where=str(path)))
    return content


def some(names: Iterable[str], most: int = 8) -> str:
    """Names for a sentence; a broken folder may have thousands."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _nothing_to_read(folder: Path, stem: str) -> Problem:
    if not folder.is_dir():
        return Problem("there is no such folder", where=str(folder))
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)
    if pickles:
        return Problem(
            f"holds only pickled weights ({some(pickles)}), and these are never loaded, because a pickle can "
            f"run any code; take the model's safetensors files, or have whoever made the folder save it "
            f"again with save_pretrained(..., safe_serialization=True)",
            where=str(folder),
        )
    return Problem(f"holds no {stem}.safetensors and no {stem}.safetensors.index.json", where=str(folder))


def _read_header(file: Path) -> dict[str, Stored]:
    """Where each tensor of a file lies. The library judges whether the file is sound; its offsets are then
    read here, because the library would map the file, and pages once touched count as memory until it is
    closed."""
    try:
        with safe_open(file, framework="pt"):
            pass
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
    except FileNotFoundError:
        raise UserError(Problem("there is no such file", where=str(file))) from None
    except (SafetensorError, ValueError) as e:
        raise UserError(
            Problem(f"is not a whole safetensors file ({e}); fetch or write it again", where=str(file))
        ) from None
    except OSError as e:
        raise UserError(Problem(f"cannot be read: {e.strerror or e}", where=str(file))) from None
    header.pop("__metadata__", None)
    unknown = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
    if unknown:
        known = ", ".join(DTYPES)
        raise UserError(Problem(f"holds tensors of type {some(unknown)}; known: {known}", where=str(file)))
    return {
        name: Stored(file, 8 + length + entry["data_offsets"][0], DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def _read(stored: Stored, offset: int, shape: tuple[int, ...]) -> Tensor:
    data = torch.empty(math.prod(shape) * stored.dtype.itemsize, dtype=torch.uint8)
    try:
        with open(stored.file, "rb") as f:
            f.seek(offset)
            got = f.readinto(data.numpy().data) if len(data) else 0
    except OSError as e:
        raise UserError(Problem(f"cannot be read: {e.strerror}", where=str(stored.file))) from None
    if got != len(data):
        raise UserError(Problem("became shorter while it was read", where=str(stored.file)))
    return data.view(stored.dtype).view(shape)
