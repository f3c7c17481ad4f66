"""Adapters and their base weights. A checkpoint of adapters names its base and does not contain it. Reading its weights returns
the base's with the adapters merged into them, box by box as they are read, in float32 or higher and rounded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.format import MANIFEST, RUN_FILE, read_manifest
from shardwise.checkpoint.reader import Reader
from shardwise.model.adapters import row_lengths
from shardwise.model.quantized.nf4 import dequantize_reference, quantize
from shardwise.run import Problem, Run, UserError, read_run
from shardwise.run.parameters import HEAD, factors_of, find_parameter, last_parameters, layer_parameters, magnitude_of
from shardwise.run.sections.adapter import NF4_BLOCK

BASE = "base"
"""The key in a checkpoint's counters for the base: its folder and its fingerprint."""


def fingerprint(folder: Path) -> str:
    """Identifies a folder of weights: a hash of its manifest, or of the names, sizes and headers of its files."""
    digest = hashlib.blake2b(digest_size=16)
    if (folder / MANIFEST).exists():
        digest.update((folder / MANIFEST).read_bytes())
        return digest.hexdigest()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + content.read(min(length, 1 << 26)))
    return digest.hexdigest()


def describe_base(run: Run) -> dict[str, Any]:
    """The entry on the base in a checkpoint of adapters; empty without adapters or without a base."""
    if not run.adapter.used or not run.train.weights:
        return {}
    folder = checkpoint_folder(run.train.weights).resolve()
    return {BASE: dict(folder=str(folder), fingerprint=fingerprint(folder))}


def check_same_base(checkpoint: Path, run: Run) -> None:
    """Refuse to resume adapters with other base weights than those they were trained on."""
    before = read_manifest(checkpoint).state.get(BASE, {})
    now = describe_base(run).get(BASE, {})
    if before.get("fingerprint") != now.get("fingerprint"):
        theirs, ours = (each.get("folder", "random weights") for each in (before, now))
        reason = f"holds adapters of {theirs}, and train.weights is {ours}, which holds other weights"
        raise UserError(Problem(reason, "train.weights", str(checkpoint)))


def base_of(folder: Path, run: Run) -> Path:
    """The folder of the base weights of a checkpoint's adapters."""
    known = read_manifest(folder).state.get(BASE, {}) if (folder / MANIFEST).exists() else {}
    if not run.train.weights:
        raise UserError(Problem("holds adapters of random weights, for train.weights was empty", where=str(folder)))
    for path in (known.get("folder", ""), run.train.weights):
        if path and Path(path).exists():
            found = checkpoint_folder(path)
            if known and fingerprint(found) != known["fingerprint"]:
                raise UserError(
                    Problem(f"are other weights now than those that {folder} was trained beside", where=path)
                )
            return found
    reason = f"holds adapters, and their base weights are not at {known.get('folder') or run.train.weights}"
    raise UserError(Problem(reason, where=str(folder)))


class MergedReader(Reader):
    """Reads the tensors of a base with adapters merged into them."""

    def __init__(self, base: Reader, adapters: Reader, run: Run) -> None:
        learned = {HEAD: adapters.shards[HEAD]} if HEAD in adapters else {}  # a reward model learns it too
        super().__init__(base.folder, base.shards | learned, base.progress)
        self.base, self.adapters, self.run, self.adapter = base, adapters, run, run.adapter
        self.made = "", torch.empty(0)  # the last matrix that was rounded to 4 bits

    def read_into(self, values: Tensor, name: str, offset: Sequence[int]) -> None:
        """Fill `values` with a box of a tensor, merged."""
        if name in self.adapters:
            self.adapters.read_into(values, name, offset)
            return
        found = factors_of(name)
        if found[0] not in self.adapters:
            self._read_base(values, name, offset)
            return
        dtype = torch.promote_types(self.dtype(name), torch.float32)
        *stack, row, column = offset
        *count, rows, columns = values.shape
        box = slice(column, column + columns)
        if self.adapter.kind == "dora":  # the length of a row needs the whole row
            column, columns = 0, self.shape(name)[-1]
        merged = torch.empty((*count, rows, columns), dtype=dtype)
        self._read_base(merged, name, (*stack, row, column))
        rank = self.adapter.rank
        a = self.adapters.read(found[0], (*stack, 0, column), (*count, rank, columns)).to(dtype)
        b = self.adapters.read(found[1], (*stack, row, 0), (*count, rows, rank)).to(dtype)
        merged.add_(b @ a, alpha=self.adapter.scale)
        if self.adapter.kind == "dora":
            magnitude = self.adapters.read(magnitude_of(name), (*stack, row), (*count, rows)).to(dtype)
            merged = merged.mul_((magnitude / row_lengths(merged))[..., None])[..., box]
        values.copy_(merged)

    def _read_base(self, values: Tensor, name: str, offset: Sequence[int]) -> None:
        """A box of the base as the adapters were trained on it: a matrix that was held in 4 bits is quantized and dequantized."""
        known = name.endswith(".weight") or ".experts." in name  # not a buffer
        entry = find_parameter(self.run.model, name, self.adapter) if known else None
        if entry is None or not entry.dtype:
            self.base.read_into(values, name, offset)
            return
        if name != self.made[0]:
            matrix = self.base.get(name).to(getattr(torch, self.run.train.dtype))
            whole = dequantize_reference(
                *quantize(matrix, self.adapter.double_quantization), 0, matrix.shape[-1] // NF4_BLOCK, matrix.dtype
            )
            self.made = name, whole
        box = tuple(slice(start, start + size) for start, size in zip(offset, values.shape, strict=True))
        values.copy_(self.made[1][box])


def is_adapter(folder: Path) -> bool:
    """Whether a checkpoint holds only adapters."""
    return read_run(folder / RUN_FILE).adapter.used


def adapter_shapes(run: Run) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a run's adapters, and of the head that a reward model learns beside them."""
    model = run.model
    tables = {n: layer_parameters(model, model.is_moe(n), run.adapter) for n in range(model.layers)}
    head = {e.name: e.shape for e in last_parameters(model, run.adapter) if not e.frozen}
    return {f"layers.{n}.{e.name}": e.shape for n, table in tables.items() for e in table if not e.frozen} | head
