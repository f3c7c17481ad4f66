"""16-bit copies of matrices that are held in float32, kept from step to step.

Products take 16 bits, so every step casts every matrix, and its gradient back. Where one GPU trains with one microbatch a step,
both can be left out: the optimizer, which has each number in hand, writes the copy as well, and the gradient stays as the product
gave it, since nothing is added to it. Numbers are the same but for last digits: a norm is added up in another order, and the
optimizer's kernel compiled for other gradients. So is the most memory: the casts would all stand until the backward pass, and
gradients of 16 bits leave the room that the copies then take.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.model.layers import Linear
from shardwise.torch_private import version


class ComputeCopy:
    """A parameter's copy in the dtype of its products: what they use, and where the gradient arrives."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter = parameter
        self.tensor: Tensor = parameter.detach().to(dtype).requires_grad_()
        self.copied = version(parameter)

    @torch.no_grad()
    def copy(self) -> None:
        """Take the parameter's values."""
        self.tensor.copy_(self.parameter)
        self.copied = version(self.parameter)

    def refresh(self) -> None:
        """Take them if somebody has changed the parameter, as loading a checkpoint does. Optimizers leave no such trace: they
        write the copy as well, or have it taken."""
        if version(self.parameter) != self.copied:
            self.copy()


def keep_compute_copies(layers: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, ComputeCopy]:
    """Give the matrices inside of layers copies that their products use; by parameter."""
    found = {}
    for module in layers.modules():
        if isinstance(module, Linear):
            assert isinstance(module.weight, nn.Parameter)
            found[module.weight] = ComputeCopy(module.weight, dtype)
            module.compute_copy = found[module.weight].tensor
    return found
