"""Compute copies: 16-bit copies of float32 matrices that stay from step to step.

GEMMs take 16 bits, so every step casts every matrix, and its gradient back. Where one GPU trains with one microbatch a step, both
casts can be skipped: the optimizer's kernel writes the copy as it updates the parameter, and the gradient keeps the GEMM's dtype,
since nothing is accumulated. Results are the same except for the last digits: a norm is summed in another order, and the
optimizer's kernel is compiled for another gradient dtype. Peak memory is the same too: without copies all casts would be held
until the backward pass, and 16-bit gradients free as much as the copies take.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.model.layers import Linear
from shardwise.torch_private import version


class ComputeCopy:
    """A parameter's copy in the dtype of its GEMMs: they use it, and the gradient arrives in it."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter = parameter
        self.tensor: Tensor = parameter.detach().to(dtype, copy=True).requires_grad_()
        self.copied = version(parameter)

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the parameter's values."""
        self.tensor.copy_(self.parameter)
        self.copied = version(self.parameter)

    def refresh(self) -> None:
        """Copy them if the parameter has been changed elsewhere, for example by loading a checkpoint. An optimizer's update does
        not show here: optimizers write the copy as well, or call `copy`."""
        if version(self.parameter) != self.copied:
            self.copy()


def keep_compute_copies(
    layers: nn.Module, dtype: torch.dtype, to_host: bool = False
) -> dict[nn.Parameter, ComputeCopy]:
    """Give the matrices inside `layers` copies that their GEMMs use; returns them by parameter. With `to_host` the parameters move
    to the CPU, one by one, so that the device never holds all of both."""
    found = {}
    for module in layers.modules():
        if isinstance(module, Linear):
            assert isinstance(module.weight, nn.Parameter)
            found[module.weight] = ComputeCopy(module.weight, dtype)
            module.compute_copy = found[module.weight].tensor
            if to_host:
                module.weight.data = module.weight.data.to("cpu")
    return found
