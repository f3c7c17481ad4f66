"""AdamW (Loshchilov & Hutter 2019) and Muon (Jordan et al. 2024) over a model's parameters, by the kind of each.

Decay is decoupled and spares norms and biases. Muon orthogonalises the momentum of the matrices inside the blocks and
leaves embeddings, head, norms and biases to AdamW. `torch.optim.Muon` is not used: it takes single matrices only, not
stacked experts, and always iterates in bfloat16, where here the dtype of the parameters decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.run import TrainConfig
from shardwise.train.schedule import learning_rate_factor

# Quintic that pushes singular values towards 1 fastest, and how often it is applied (Jordan et al. 2024).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: all singular values brought near 1. Leading dimensions are a batch."""
    a, b, c = _NEWTON_SCHULZ
    x = matrix.bfloat16() if matrix.is_cuda and matrix.dtype == torch.float32 else matrix
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled decay; for matrices and stacks of matrices."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "this optimizer does not evaluate the loss again"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]))
                # A tall matrix gets a larger step, so that its outputs move as much as a wide one's.
                stretch = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * stretch)


class Optimizer:
    """The optimizers of a run as one: step, learning rate by step, and state by parameter name."""

    def __init__(self, model: nn.Module, train: TrainConfig) -> None:
        self.train = train
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and name.startswith("layers.")]
        chosen = set(matrices) if train.optimizer == "muon" else set()
        rest = [p for p in self.names if p not in chosen]
        groups = [
            dict(params=[p for p in rest if p.ndim > 1], weight_decay=train.weight_decay),
            dict(params=[p for p in rest if p.ndim == 1], weight_decay=0.0),
        ]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [g for g in groups if g["params"]],
                lr=train.lr,
                betas=(train.beta1, train.beta2),
                eps=train.eps,
                fused=True,
            )
        ]
        if chosen:
            group = dict(params=matrices)
            self.parts.append(Muon([group], train.muon_lr, train.muon_momentum, train.weight_decay))
        self.peaks = [part.defaults["lr"] for part in self.parts]

    def learning_rate(self, step: int) -> float:
        """AdamW's learning rate in a step, the one that metrics show."""
        return self.train.lr * learning_rate_factor(self.train, step)

    def step(self, step: int) -> None:
        """Update the parameters from their gradients; `step` counts from 1."""
        factor = learning_rate_factor(self.train, step)
        for part, peak in zip(self.parts, self.peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * factor
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state as `parameter/what`."""
        return {
            f"{self.names[p]}/{what}": value
            for part in self.parts
            for p, values in part.state.items()
            for what, value in values.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a state that `state()` gave."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, what = key.rpartition("/")
            by_name.setdefault(name, {})[what] = value
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    for what, value in by_name.get(self.names[p], {}).items():
                        # The step counter of AdamW is a scalar on the CPU unless fused on the parameter's device.
                        part.state[p][what] = value.to(p.device) if value.ndim or p.is_cuda else value
