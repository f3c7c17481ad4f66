"""AdamW whose second moment stands still behind a warm-up, as 1-bit Adam wants it (Tang et al. 2021, algorithm 1), and as it
helps others that bring gradients late: divided by the same, a sum that comes at once moves a weight as far as its parts would.

Where the second moment is 0, no gradient was ever seen, and what the signs of a momentum bring there is nothing but their rounding:
such elements stay as they are. The first moment's bias is corrected as ever, the second's by the steps of the warm-up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class OneBitAdamW(torch.optim.AdamW):
    """AdamW that is told when its second moment stands still."""

    def __init__(
        self, groups: list[dict[str, object]], lr: float, betas: tuple[float, float], eps: float, warmup: int
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.warmup = warmup

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "this optimizer does not evaluate the loss again"
        learned = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.warmup:  # a dry run has none, and no number to read either
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
                momentum = state["exp_avg"].lerp_(p.grad, 1 - beta1) / (1 - beta1 ** state["step"].to(p))
                second = state["exp_avg_sq"] / (1 - beta2 ** max(1, self.warmup))
                update = torch.where(second > 0, momentum / (second.sqrt() + group["eps"]), 0.0)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
