"""Reads and writes adapters of stacked experts in the format of `peft`, which adapts them as parameters (`target_parameters`).

transformers 5 stores experts as two stacks, `gate_up_proj` and `down_proj`. The adapter of a stack is a pair of matrices: A holds
the rows of all experts one after the other [experts x rank, in]; in B [out, rank x experts] the columns of all experts for one
rank index are adjacent. Two adapters, of gate and up, become one of twice the rank: A has the rows of both, B is block-diagonal.
An adapter trained by peft fills all of B; it is then read as one adapter for gate and one for up, both with its full rank and the
same A. Where ranks differ, smaller ones are padded with zeros.

The stacks of one module are wrapped one in the other, gate_up_proj inside, so its tensors are behind `base_layer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.reader import Reader
from shardwise.run import AdapterConfig, ModelConfig
from shardwise.run.parameters import factors_of, layer_parameters

EXPERTS = "mlp.experts"
STACKS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


@dataclass(frozen=True)
class Stack:
    """The adapter of one stack of a layer: the path of its tensors, and our matrices that it adapts, by part (gate, up, down)."""

    path: str
    parameter: str
    matrices: dict[str, str]
    experts: int
    rows: int
    """Rows of one expert's matrix."""
    columns: int

    def names(self) -> tuple[str, str]:
        """The names of A and B."""
        return f"{self.path}.lora_A.weight", f"{self.path}.lora_B.weight"

    def written_rank(self, rank: int) -> int:
        """The rank of the one adapter that the parts' adapters of rank `rank` become."""
        return rank * len(self.matrices)

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of A and B; `rank` is the rank in the file."""
        a, b = self.names()
        return {a: (self.experts * rank, self.columns), b: (self.rows, rank * self.experts)}

    def rank(self, reader: Reader) -> int:
        """The rank in a file."""
        return reader.shape(self.names()[0])[0] // self.experts

    def write_a(self, reader: Reader) -> Iterator[Tensor]:
        """A, with the rows of all parts."""
        parts = [reader.get(factors_of(matrix)[0]) for matrix in self.matrices.values()]
        yield torch.cat(parts, dim=1).flatten(0, 1).contiguous()

    def write_b(self, reader: Reader) -> Iterator[Tensor]:
        """B, with one block for each part."""
        parts = {part: reader.get(factors_of(matrix)[1]) for part, matrix in self.matrices.items()}
        of_stack, rank = STACKS[self.parameter], next(iter(parts.values())).shape[-1]
        made = next(iter(parts.values())).new_zeros(self.experts, self.rows, rank * len(parts))
        height = self.rows // len(of_stack)
        for column, (part, values) in enumerate(parts.items()):
            row = of_stack.index(part) * height
            made[:, row : row + height, column * rank : (column + 1) * rank] = values
        yield made.permute(1, 2, 0).flatten(1).contiguous()

    def read(self, reader: Reader) -> tuple[Tensor, Tensor]:
        """A [experts, rank, columns] and B [experts, rows, rank] from a file."""
        a, b = (reader.get(name) for name in self.names())
        rank = self.rank(reader)
        return a.unflatten(0, (self.experts, rank)), b.unflatten(1, (rank, self.experts)).permute(2, 0, 1)

    def is_two(self, reader: Reader, rank: int) -> bool:
        """Whether the file holds two adapters of this rank side by side."""
        if self.parameter != "gate_up_proj" or self.rank(reader) != 2 * rank:
            return False
        b, height = self.read(reader)[1], self.rows // 2
        return not bool(b[:, :height, rank:].any() or b[:, height:, :rank].any())

    def part(self, reader: Reader, part: str, factor: int, rank: int) -> Iterator[Tensor]:
        """One factor (A or B) of one part, with this rank."""
        a, b = self.read(reader)
        of_stack = STACKS[self.parameter]
        place, height = of_stack.index(part), self.rows // len(of_stack)
        b = b[:, place * height : (place + 1) * height]
        if self.rank(reader) > rank:
            a, b = (x.narrow(dim, place * rank, rank) for x, dim in ((a, 1), (b, 2)))
        yield padded((a, b)[factor], rank, dim=1 + factor)


def padded(x: Tensor, rank: int, dim: int) -> Tensor:
    """`x` padded with zeros up to a rank."""
    missing = rank - x.shape[dim]
    if not missing:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim=dim)


def stacks_of(model: ModelConfig, adapter: AdapterConfig) -> list[Stack]:
    """The stacks of experts that an adapter adapts, layer by layer."""
    found = []
    for layer in range(model.layers):
        table = layer_parameters(model, model.is_moe(layer), adapter)
        entries = {entry.name.rpartition(".")[2]: entry for entry in table if entry.routed and entry.adapted}
        present = {
            name: [part for part in parts if part in entries]
            for name, parts in STACKS.items()
            if set(parts) & set(entries)
        }
        module = f"model.layers.{layer}.{EXPERTS}"
        for number, (name, parts) in enumerate(present.items()):
            path = module + ".base_layer" * (len(present) - 1 - number)
            shape = next(each.shape for each in layer_parameters(model, True) if each.name == entries[parts[0]].name)
            rows = shape[1] * len(STACKS[name])
            names = {part: f"layers.{layer}.{entries[part].name}" for part in parts}
            found.append(Stack(path, name, names, shape[0], rows, shape[2]))
    return found


def config_of(stacks: list[Stack], linear: set[str], adapter: AdapterConfig) -> dict[str, Any]:
    """The entries of peft's config for experts, and for the linear matrices of feed-forward layers beside them: peft takes their
    names for experts', so they are target parameters too. Target parameters have no dropout in peft."""
    if not stacks:
        return {}
    named = {f"{EXPERTS}.{stack.parameter}": stack.written_rank(adapter.rank) for stack in stacks}
    wider = {name: rank for name, rank in named.items() if rank != adapter.rank}
    return dict(
        target_parameters=sorted([*named, *(f"{name}.weight" for name in linear)]),
        rank_pattern=wider,
        alpha_pattern={
            name: adapter.alpha * (sqrt(rank / adapter.rank) if adapter.rank_stabilized else rank / adapter.rank)
            for name, rank in wider.items()
        },
        lora_dropout=0.0,
    )


def scale_of(config: Mapping[str, Any], rank: int, alpha: float) -> float:
    """The factor by which peft scales an adapter."""
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def pattern_of(config: Mapping[str, Any], key: str, parameter: str, otherwise: float) -> float:
    """The value in a config for the stack of this name, by a pattern that ends in it; else `otherwise`."""
    patterns = config.get(key) or {}
    return float(next((value for name, value in patterns.items() if name.endswith(parameter)), otherwise))
