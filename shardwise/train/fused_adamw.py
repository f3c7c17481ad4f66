"""AdamW (Loshchilov & Hutter 2019) as one pass over parameters, gradients and moments, for float32 parameters on a GPU.

`torch.optim.AdamW`, fused, is the same arithmetic and stands in everywhere else; it wants its gradients scaled beforehand,
which on a GPU costs as much as the norm does. State has the names that PyTorch's has, so that checkpoints are alike; the
count of steps is kept on the host, which computes the corrections of the moments from it without asking the device. Gradients
are taken from where they arrived, which for a parameter with a compute copy is that copy; it is written in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shardwise.parallel.local_parameter import LocalParameter


def fits_fused_adamw(parameters: list[Tensor]) -> bool:
    """Whether these parameters can be updated by the kernel."""
    return all(p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() for p in parameters)


class FusedAdamW(torch.optim.Optimizer):
    """Takes the factor on all gradients as it updates. `factor` is set before each step."""

    factor: Tensor

    def __init__(
        self,
        groups: list[dict[str, object]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        local: Mapping[Tensor, LocalParameter],
    ) -> None:
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.local = local

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        from shardwise.model.kernels.adamw import adamw

        assert closure is None, "this optimizer does not evaluate the loss again"
        for group in self.param_groups:
            for p in group["params"]:
                local = self.local[p]
                if local.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                adamw(
                    p, local.grad.contiguous(), (state["exp_avg"], state["exp_avg_sq"]), self.factor, int(state["step"]),
                    group["lr"], group["betas"], group["eps"], group["weight_decay"],
                    None if local.compute_copy is None else local.compute_copy.tensor.detach(),
                )  # fmt: skip
