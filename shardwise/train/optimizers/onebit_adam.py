"""AdamW whose second moment is frozen after a warm-up, as 1-bit Adam requires (Tang et al. 2021, algorithm 1).

If the second moment of an element is 0, it never had a gradient, and the 1-bit momentum there is only rounding: such elements are
not updated. Where it is small, as in embeddings of tokens that were rare at the end of the warm-up, rounding divided by it could be
anything, so no element moves further than Adam can move one. The first moment's bias correction is the usual one; the second's uses
the number of warm-up steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OneBitAdamW(torch.optim.AdamW):
    """AdamW that freezes its second moment after `warmup` steps."""

    def __init__(self, groups: list[dict[str, object]], defaults: dict[str, Any], warmup: int) -> None:
        super().__init__(groups, **defaults, fused=True)
        self.warmup = warmup

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "this optimizer does not evaluate the loss again"
        learned = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.warmup:  # a dry run has no warm-up, and its tensors have no step to read
            steps = next((int(self.state[p]["step"]) for p in learned if self.state[p]), 0)
            if steps < self.warmup:
                super().step()
                return
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:  # no warm-up at all
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                momentum = state["exp_avg"].lerp_(p.grad, 1 - beta1)
                by = (state["exp_avg_sq"] / (1 - beta2 ** max(1, self.warmup))).sqrt_().add_(group["eps"])
                by.mul_(1 - beta1 ** state["step"].to(p)).masked_fill_(state["exp_avg_sq"] == 0, torch.inf)
                most = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
                update = torch.div(momentum, by, out=by).clamp_(-most, most)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
