"""Folders of packed weights that are also checkpoints: a Hugging Face folder with a `run.toml` beside its `config.json`. Weights
stay in its files as they are, under the names of its family, and are served from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format import read_json
from shardwise.checkpoint.huggingface.packed.decode import PARTS, PackedReader
from shardwise.checkpoint.huggingface.packed.encode import parts_of, quantization_config
from shardwise.checkpoint.huggingface.packed.scheme import Packing, read_packing
from shardwise.checkpoint.huggingface.tensors import (
    Fused,
    FusedHeads,
    Interleaved,
    Link,
    Stacked,
    left_out,
    links,
    links_of_folder,
    sort_out,
)
from shardwise.checkpoint.reader import Reader, compare_shapes, find_weights
from shardwise.checkpoint.writer import Entry
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.transformer import Transformer
from shardwise.run import ModelConfig, Problem, UserError
from shardwise.run.weights import WeightFormat, form_of

CONFIG = "config.json"


def packing_of(folder: Path) -> Packing | None:
    """How the weights of a checkpoint's folder are packed; None if they are not."""
    if not (folder / CONFIG).is_file():
        return None
    return read_packing(read_json(folder / CONFIG), str(folder / CONFIG))


def _turned(link: Interleaved, rows: int, theirs: bool) -> Tensor:
    """For each row of one side (their side if `theirs`), the index of the same row on the other side."""
    numbers = torch.arange(rows)[:, None]
    pairs = (2, link.rotated // 2) if theirs else (link.rotated // 2, 2)
    return link.reordered(numbers, pairs)[:, 0]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def packed_state(
    folder: Path, packing: Packing, config: ModelConfig, dtype: torch.dtype | None, device: torch.device | str
) -> Iterator[tuple[str, Tensor]]:
    """The network's tensors one after the other: packed matrices, and the others unchanged, in `dtype` if one is given."""
    reader = Reader(folder, find_weights(folder))
    packed = PackedReader(reader, packing)
    with torch.device("meta"):
        network = Transformer(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    parameters = {name for name, _ in network.named_parameters()}
    found = links_of_folder(config, shapes, read_json(folder / CONFIG), reader.names)
    check_names(reader, packed, config, found)
    for link in found:
        for name, tensor in _ours(link, packed, dtype or torch.bfloat16):
            if tuple(tensor.shape) != shapes[name]:
                reason = f"{link.theirs[0]} is {list(tensor.shape)} and should be {list(shapes[name])}"
                raise UserError(Problem(reason, where=str(folder)))
            if isinstance(tensor, QuantizedMatrix):
                form = form_of(name, tensor.form)
                matrix = QuantizedMatrix(tensor.packed, tensor.scale, tensor.zero, form, tensor.dtype, tensor.order)
                yield name, nn.Parameter(matrix.moved(device), requires_grad=False)
            else:
                yield name, tensor.to(device, tensor.dtype if dtype is None or name not in parameters else dtype)


def _ours(link: Link, packed: PackedReader, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Our tensors of a link: matrices, computed with in `dtype`, where theirs are packed."""
    if not packed.holds(_module(link.theirs[0])):
        for name in link.ours:
            parts = link.to_ours(name, packed.reader)
            yield name, torch.cat([part[None] if isinstance(link, Stacked) else part for part in parts])
        return
    if isinstance(link, Stacked):
        made = [packed.get(_module(theirs), dtype) for theirs in link.theirs]
        if not all(each.joins(made[0]) for each in made):
            reason = f"the experts of {link.ours[0]} are packed in different ways"
            raise UserError(Problem(reason, where=str(packed.reader.folder)))
        yield link.ours[0], QuantizedMatrix.joined(made, stack=True)
        return
    matrix = packed.get(_module(link.theirs[0]), dtype)
    if isinstance(link, Fused):  # all of them stacked, and not transposed as unpacked weights are
        rows = matrix.shape[0] // len(link.ours)
        for n, name in enumerate(link.ours):
            yield name, matrix.map_rows(lambda part, n=n: part[n * rows : (n + 1) * rows])
    elif isinstance(link, FusedHeads):
        for name, own in zip(link.ours, link.rows(matrix.shape[0]), strict=True):
            yield name, matrix.map_rows(lambda part, own=own: part[own.to(part.device)])
    elif isinstance(link, Interleaved):
        turned = _turned(link, matrix.shape[0], theirs=False)
        yield link.ours[0], matrix.map_rows(lambda part: part[turned])
    else:
        yield link.ours[0], matrix


def check_names(reader: Reader, packed: PackedReader, config: ModelConfig, found: list[Link]) -> list[str]:
    """Notes on tensors that are left out; raises if tensors are missing or unexpected."""
    expected, missing = set[str](), list[str]()
    for link in found:
        for theirs in link.theirs:
            if packed.holds(_module(theirs)):
                expected |= {f"{_module(theirs)}.{part}" for part in (*PARTS, "weight")}
            elif theirs in reader:
                expected.add(theirs)
            else:
                missing.append(theirs)

    def reason_of(name: str) -> str:
        zero = name.endswith(".bias") and not reader.get(name).any()
        return left_out(config, name) or ("biases that are zero" if zero else "")

    unexpected, notes = sort_out((name for name in reader.names if name not in expected), reason_of)
    # By name alone: the shapes of packed parts depend on their format.
    if problems := compare_shapes(reader, dict.fromkeys(missing, ()), unexpected):
        raise UserError(*problems)
    return notes


def copy_packed(source: Path, folder: Path) -> int:
    """Copy a folder's weights and config unchanged; returns the bytes of the weights."""
    reader = Reader(source, find_weights(source))
    files = sorted({shard.file for shards in reader.shards.values() for shard in shards})
    index = source / "model.safetensors.index.json"
    for file in [*files, source / CONFIG, *([index] if index.is_file() else [])]:
        shutil.copyfile(file, folder / file.name)
    return sum(file.stat().st_size for file in files)


class _State:
    """Tensors by name, with the methods of a `Reader` that links use."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def get(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.tensors[name].detach().cpu()

    def row(self, name: str, index: int) -> Tensor:
        """One slice along the first dimension."""
        return self.tensors[name][index].detach().cpu()


def packed_entries(
    model: Transformer, dtypes: dict[str, torch.dtype], form: WeightFormat
) -> tuple[list[Entry], dict[str, Any]]:
    """The tensors to write for a packed model, unpacked ones in their `dtypes`, and its `quantization_config`."""
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    source: Any = _State(state)
    entries: list[Entry] = []
    whole, group = ["lm_head"], 0
    for link in links(model.config, shapes):
        first = state[link.ours[0]]
        if isinstance(first, QuantizedMatrix):
            group = first.group
            for theirs, matrix in _their_matrices(link, state):
                for part, tensor in parts_of(matrix).items():
                    name = f"{_module(theirs)}.{part}"
                    entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), partial(iter, (tensor,))))
            continue
        if link.theirs[0].endswith(".weight") and first.ndim > 1 and link.ours[0].startswith("layers."):
            whole += [_module(theirs) for theirs in link.theirs]
        shape = link.their_shape(shapes[link.ours[0]])
        dtype = dtypes[link.ours[0]]
        entries += [Entry(name, dtype, shape, partial(link.to_theirs, name, source)) for name in link.theirs]
    return entries, quantization_config(form, group, whole)


def _their_matrices(link: Link, state: dict[str, Tensor]) -> Iterator[tuple[str, QuantizedMatrix]]:
    own = [tensor for name in link.ours if isinstance(tensor := state[name], QuantizedMatrix)]
    if isinstance(link, Stacked):
        for n, theirs in enumerate(link.theirs):
            yield theirs, own[0].map_rows(lambda part, n=n: part[n])
    elif isinstance(link, Interleaved):
        turned = _turned(link, own[0].shape[0], theirs=True)
        yield link.theirs[0], own[0].map_rows(lambda part: part[turned.to(part.device)])
    elif isinstance(link, FusedHeads):
        joined = QuantizedMatrix.joined(own)
        back = link.rows_back(joined.shape[0])
        yield link.theirs[0], joined.map_rows(lambda part: part[back.to(part.device)])
    else:
        yield link.theirs[0], QuantizedMatrix.joined(own)
