"""Quantizes a network layer by layer: calibration data passes through a layer, the inputs of its matrices decide how they are
rounded, and the data passes through the rounded layer into the next. So a layer compensates for the errors of the layers before
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.model import put_matrix, use_quantized_gemms
from shardwise.model.quantized.rounding import round_matrix
from shardwise.model.rope import Rope
from shardwise.model.transformer import Block, Transformer
from shardwise.model.varlen import Mask
from shardwise.quantize.awq import clipped, search_scales
from shardwise.quantize.gptq import gptq
from shardwise.quantize.inputs import Inputs, inputs_of, recorded
from shardwise.quantize.sites import Site, fold, free_scales, sites_of
from shardwise.run.weights import WeightFormat, form_of

Method = Literal["round", "gptq", "awq", "smoothquant"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Settings:
    """How matrices are rounded."""

    form: WeightFormat
    method: Method
    damping: float = 0.01
    """gptq: added to the Hessian's diagonal, as a fraction of its mean."""
    act_order: bool = False
    """gptq: round the columns with the largest inputs first."""
    alpha: float = 0.5
    """smoothquant: how much of the inputs' range moves into the weights."""


@dataclass
class Sample:
    """The hidden states of some sequences, on their way through the layers."""

    x: Tensor
    rope: Rope | None
    mask: Mask


@torch.no_grad()
def quantize_layers(
    model: Transformer,
    batches: Iterable[tuple[Tensor, Tensor | None, Tensor | None]],
    settings: Settings,
    progress: Progress = lambda done, total: None,
) -> None:
    """Quantize the matrices of a model's layers in place. Batches are tokens, positions and documents, as the model takes them."""
    samples = [Sample(*model.begin(*batch)) for batch in batches] if settings.method != "round" else []
    for n, block in enumerate(model.layers.values()):
        assert isinstance(block, Block)
        _quantize_block(block, samples, settings, model.dtype)
        progress(n + 1, len(model.layers))
    use_quantized_gemms(model)


def _quantize_block(block: Block, samples: list[Sample], settings: Settings, dtype: torch.dtype | None) -> None:
    sites = sites_of(block)
    found: dict[str, Inputs] = {}
    if samples:
        device = samples[0].x.device
        with recorded(block, sites, device) as found:
            for sample in samples:
                block(sample.x, sample.rope, sample.mask)
    if settings.method in ("awq", "smoothquant"):
        for site in sites:
            _balance(block, site, found, settings, dtype)
    for site in sites:
        for name in site.matrices:
            given = inputs_of(found, site, name) if found else None
            weight = block.get_parameter(name).detach()
            made = _rounded(name, weight, given, settings, dtype or weight.dtype)
            if made is not None:
                put_matrix(block, name, made)
    use_quantized_gemms(block)
    for sample in samples:
        sample.x, _ = block(sample.x, sample.rope, sample.mask)


def _balance(block: Block, site: Site, found: dict[str, Inputs], settings: Settings, dtype: torch.dtype | None) -> None:
    """Scale the inputs of a site, if their producer can absorb the scales, and scale their statistics, too."""
    if not site.before:
        return
    weights = [block.get_parameter(name).detach() for name in site.matrices]
    if not settings.form.group_of(weights[0].shape[-1]):
        return  # matrices of this width are not rounded
    overall = found[site.source]
    own = overall.sizes.ndim > 1  # each expert has its own inputs
    if settings.method == "smoothquant":
        largest = torch.stack([_largest(weight, own) for weight in weights]).amax(0)
        wanted = overall.largest.clamp(min=1e-5) ** settings.alpha / largest.clamp(min=1e-5) ** (1 - settings.alpha)
        scale = free_scales(block, site, wanted.clamp(min=1e-5))
    else:
        pairs = [
            (weight.float(), inputs_of(found, site, name).products)
            for name, weight in zip(site.matrices, weights, strict=True)
        ]
        kept = dtype or weights[0].dtype
        sizes = free_scales(block, site, overall.mean_size)
        scale = search_scales(pairs, sizes, settings.form, kept, shared=not own)
    fold(block, site, scale)
    scaled = {id(each): each for each in (overall, *(inputs_of(found, site, name) for name in site.matrices))}
    for each in scaled.values():
        each.products /= scale.unsqueeze(-1) * scale.unsqueeze(-2)
        each.sizes /= scale
        each.largest /= scale


def _largest(weight: Tensor, own: bool) -> Tensor:
    """The largest weight of each input channel over all rows; for each expert, or over all experts."""
    found = weight.float().abs().amax(-2)
    return found if own or found.ndim == 1 else found.amax(0)


def _rounded(
    name: str, weight: Tensor, given: Inputs | None, settings: Settings, dtype: torch.dtype
) -> QuantizedMatrix | None:
    form = form_of(name, settings.form)
    if given is None or settings.method in ("round", "smoothquant"):
        return round_matrix(weight, form, dtype)

    def one(matrix: Tensor, products: Tensor) -> QuantizedMatrix | None:
        matrix = matrix.to(products.dtype)
        if settings.method == "gptq":
            return gptq(matrix, products, form, dtype, settings.damping, settings.act_order)
        return clipped(matrix, products, form, dtype)

    if weight.ndim == 2:
        return one(weight, given.products)
    made = [one(matrix, products) for matrix, products in zip(weight, given.products, strict=True)]
    return (
        QuantizedMatrix.joined([each for each in made if each is not None], stack=True) if made[0] is not None else None
    )
