"""Compute copies: 16-bit copies of float32 matrices that stay from step to step.

GEMMs take 16 bits, so every step casts every matrix, and its gradient back. Where one GPU trains with one microbatch a step, both
casts can be left out: the optimizer's kernel writes the copy as it updates the parameter, and the gradient stays as the GEMM gave
it, since nothing is added to it. Results are the same but for last digits: a norm is added up in another order, and the
optimizer's kernel is compiled for other gradients. Peak memory is the same too: the casts would all be held until the backward
pass, and 16-bit gradients free as much as the copies take.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.model.layers import Linear
from shardwise.torch_private import version


class ComputeCopy:
    """A parameter's copy in the dtype of its GEMMs: what they use, and where the gradient arrives."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter = parameter
        self.tensor: Tensor = parameter.detach().to(dtype, copy=True).requires_grad_()
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


def keep_compute_copies(
    layers: nn.Module, dtype: torch.dtype, to_host: bool = False
) -> dict[nn.Parameter, ComputeCopy]:
    """Give the matrices inside of layers copies that their GEMMs use; by parameter. The parameters may go `to_host`, one by one, so
    that the device never holds all of both."""
    found = {}
    for module in layers.modules():
        if isinstance(module, Linear):
            assert isinstance(module.weight, nn.Parameter)
            found[module.weight] = ComputeCopy(module.weight, dtype)
            module.compute_copy = found[module.weight].tensor
            if to_host:
                module.weight.data = module.weight.data.to("cpu")
    return found
