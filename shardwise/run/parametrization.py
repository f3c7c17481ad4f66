"""How initial values and learning rates depend on the width and depth of a model: factors for each entry of the parameter table.

With `train.parametrization = "mup"` they follow the maximal update parametrization (Yang et al. 2022, table 3). It keeps the
output of every layer, and the change a step makes to it, the same at every width, so the best learning rate of a narrow model is
also that of a wide one. With m = hidden / base_width: matrices inside of the layers start smaller by sqrt(m) and learn m times
more slowly. A router, whose output size does not grow with the width, starts smaller by m. The head starts at zero (appendix D.2),
since its initial contribution vanishes with the width anyway. A tied head cannot start at zero, because it is the embedding: the
gain of the norm before it starts smaller by m instead. Nothing in the forward pass changes, so layouts, kernels and exported
checkpoints stay the same.

Muon's update has the same spectral norm at every width (Yang et al. 2023), so only AdamW's learning rates change, and that of a
router. The product of learning rate and weight decay stays constant, since decay would otherwise vanish with width.

With `base_layers` depth is scaled too (Yang et al. 2024, "Tensor Programs VI", table 1): a block's output is scaled by
1/sqrt(layers), as initial values here always are, and the layers' learning rates fall with the square root of the depth. Because
the scale is in the weights, the matrices that write to the residual stream learn more slowly by that root once more.

Heads keep their size at every width, and all widths of a model grow together.
"""

from __future__ import annotations

from shardwise.run.config import ModelConfig, TrainConfig
from shardwise.run.parameters import Parameter

_FINITE = ("head", "router")
"""Owners whose matrices map the width to a size that does not grow with it."""


def initial_factor(entry: Parameter, model: ModelConfig, train: TrainConfig) -> float:
    """The factor on the standard initial value."""
    if train.parametrization != "mup":
        return 1.0
    m = model.hidden / train.base_width
    if entry.owner == "head":
        return 0.0
    if entry.owner == "router" or _before_tied_head(entry, model):
        return 1 / m
    return m**-0.5 if entry.is_layer_matrix else 1.0


def rate_factor(entry: Parameter, model: ModelConfig, train: TrainConfig) -> float:
    """The factor on the learning rate."""
    if train.parametrization != "mup":
        return 1.0
    m, depth = model.hidden / train.base_width, model.layers / (train.base_layers or model.layers)
    in_layer = entry.is_layer_matrix
    deep = 1.0
    if in_layer:
        deep = depth**-1.0 if entry.init == "residual" else depth**-0.5
    if in_layer and train.optimizer == "muon":
        return deep * (m**-0.5 if entry.owner in _FINITE else 1.0)
    return deep / m if in_layer or entry.owner in _FINITE or _before_tied_head(entry, model) else deep


def _before_tied_head(entry: Parameter, model: ModelConfig) -> bool:
    return model.tied_embeddings and entry.name in ("norm.weight", "norm.bias")
