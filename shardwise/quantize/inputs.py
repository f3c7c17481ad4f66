"""Input statistics of a block's matrices, collected while calibration data passes through it: for each site the sum of outer
products of its inputs (from which GPTQ makes the Hessian), and the mean and the largest magnitude of each input channel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.moe.layer import Experts, MoE, ReadCounts, grouped_linear, read_counts
from shardwise.model.transformer import Block
from shardwise.quantize.sites import Site


@dataclass
class Inputs:
    """Statistics of rows [..., rows, in]; the leading dimension, if there is one, is the expert."""

    products: Tensor
    """[..., in, in]"""
    sizes: Tensor
    """[..., in], summed magnitudes"""
    largest: Tensor
    """[..., in]"""
    rows: Tensor
    """[...]"""

    @staticmethod
    def none(width: int, device: torch.device, experts: int = 0) -> Inputs:
        """Statistics of no rows."""
        lead = (experts,) if experts else ()
        zeros = torch.zeros(*lead, width, device=device)
        return Inputs(
            torch.zeros(*lead, width, width, device=device), zeros, zeros.clone(), torch.zeros(lead, device=device)
        )

    def add(self, rows: Tensor, expert: int | None = None) -> None:
        """Add rows [..., in]."""
        rows = rows.detach().float().flatten(0, -2)
        if not len(rows):
            return
        where: Any = ... if expert is None else expert
        self.products[where] += rows.T @ rows
        self.sizes[where] += rows.abs().sum(0)
        self.largest[where] = torch.maximum(self.largest[where], rows.abs().amax(0))
        self.rows[where] += len(rows)

    @property
    def mean_size(self) -> Tensor:
        """The mean magnitude of each channel; 1 for an expert without rows."""
        count = self.rows.unsqueeze(-1)
        return torch.where(count > 0, self.sizes / count.clamp(min=1), torch.ones_like(self.sizes))


def inputs_of(found: dict[str, Inputs], site: Site, name: str) -> Inputs:
    """The input statistics of one matrix of a site; experts have their own."""
    if ".experts." in name:
        return found["ffn.experts.down" if name.endswith("down") else "ffn.experts.gate"]
    return found[site.source]


@contextlib.contextmanager
def recorded(block: Block, sites: list[Site], device: torch.device) -> Iterator[dict[str, Inputs]]:
    """The input statistics of each site, by its source, and those of experts, over all data that passes through the block
    meanwhile."""
    found: dict[str, Inputs] = {}
    handles = []

    def watch(site: Site, module: nn.Module) -> None:
        found[site.source] = into = Inputs.none(block.get_parameter(site.matrices[-1]).shape[-1], device)
        handles.append(module.register_forward_hook(lambda _, x, out: into.add(out if site.follows_norm else x[0])))

    for site in sites:
        if site.follows_norm:
            watch(site, block.get_submodule(site.before))
        elif ".experts." not in site.matrices[0]:
            watch(site, block.get_submodule(site.matrices[0].removesuffix(".weight")))
    experts = block.ffn.experts if isinstance(block.ffn, MoE) else None
    if experts is not None:
        _record_experts(experts, found, device)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        if experts is not None:
            del experts.multiply


def _record_experts(experts: Experts, found: dict[str, Inputs], device: torch.device) -> None:
    count, _, hidden = experts.gate.shape
    found["ffn.experts.gate"] = Inputs.none(hidden, device, count)
    found["ffn.experts.down"] = Inputs.none(experts.down.shape[-1], device, count)
    multiply = experts.multiply or grouped_linear

    def recording(x: Tensor, weight: Tensor, counts: Tensor, read: ReadCounts = read_counts) -> Tensor:
        if weight is not experts.up:  # up reads the same input as the gate
            into = found["ffn.experts.down" if weight is experts.down else "ffn.experts.gate"]
            for expert, rows in enumerate(x[: int(counts.sum())].split(counts.tolist())):
                into.add(rows, expert)
        return multiply(x, weight, counts, read)

    experts.multiply = recording
