"""AdamW (Loshchilov & Hutter 2019) and Muon (Jordan et al. 2024) over a rank's shards of the parameters; the kind of parameter
decides which one updates it.

Weight decay is decoupled, and norms and biases are not decayed. Muon orthogonalises the momentum of the matrices inside the blocks;
AdamW updates embeddings, head, norms and biases. `torch.optim.Muon` is not used: it takes single matrices only, not stacked experts
or shards, and always iterates in bfloat16. Here only float32 matrices on a GPU do; others keep their dtype.
Optimizers work on this rank's shards as plain tensors: they are elementwise, except for Muon, which gathers the matrix (traffic:
every matrix once a step over the ranks that hold its shards). On a GPU `FusedAdamW` is one pass over float32 parameters, gradients
and moments, which also multiplies the gradients by their factor; elsewhere the fused `torch.optim.AdamW` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.parallel.gradients import scale_gradients, squared_norm
from shardwise.parallel.local_parameter import LocalParameter, gather_matrix, local, scatter_matrix
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.observer import Observers
from shardwise.run import Run, TrainConfig
from shardwise.run.derive import NEWTON_SCHULZ, NEWTON_SCHULZ_ITERATIONS
from shardwise.run.parametrization import rate_factor
from shardwise.train.optimizers.host_adamw import HostAdamW, master_of
from shardwise.train.optimizers.onebit_adam import OneBitAdamW
from shardwise.train.optimizers.schedule import learning_rate_factor


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximately the nearest orthogonal matrix: all singular values are brought near 1. Leading dimensions are a batch."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16() if matrix.is_cuda and matrix.dtype == torch.float32 else matrix
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    # The GEMMs do the additions too, so that no memory traffic is for additions alone.
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay; for matrices, stacks of them, and shards of either."""

    def __init__(
        self, groups: list[dict[str, object]], own: dict[Tensor, LocalParameter], mesh: Mesh, train: TrainConfig
    ) -> None:
        settings = dict(lr=train.muon_lr, momentum=train.muon_momentum, weight_decay=train.weight_decay)
        super().__init__(groups, settings)
        self.local, self.mesh = own, mesh

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
                whole = gather_matrix(p.grad.lerp(buffer, group["momentum"]), self.local[p], self.mesh)
                update = scatter_matrix(orthogonalize(whole), self.local[p], self.mesh)
                # A tall matrix gets a larger step, so that its outputs move as much as a wide one's.
                stretch = max(1.0, whole.shape[-2] / whole.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * stretch)


class Optimizer:
    """The optimizers of a run as one: step, learning rate by step, and state by parameter name."""

    def __init__(self, parameters: Sequence[LocalParameter], mesh: Mesh, run: Run, observers: Observers) -> None:
        self.train, self.mesh, self.observers = run.train, mesh, observers
        self.parameters = list(parameters)
        train, memory, hosted = run.train, run.memory, run.memory.hosts_optimizer
        # The local shards as plain tensors that share the parameters' memory.
        self.shards = [master_of(h) if hosted else local(h.parameter.detach()) for h in self.parameters]
        pairs = [(p, h) for p, h in zip(self.shards, self.parameters, strict=True) if not h.entry.frozen]
        muon = [(p, h) for p, h in pairs if train.optimizer == "muon" and h.entry.is_layer_matrix]
        rest = [(p, h) for p, h in pairs if train.optimizer != "muon" or not h.entry.is_layer_matrix]
        self.parts: list[torch.optim.Optimizer] = []
        if rest:
            groups = _groups(rest, run)
            defaults: dict[str, Any] = dict(lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)
            if hosted:
                folder = memory.folder if memory.on_disk else ""
                self.parts.append(
                    HostAdamW(groups, defaults, dict(rest), run.accumulation, memory.host_threads, folder)
                )
            elif mesh.layout.compress == "onebit":
                self.parts.append(OneBitAdamW(groups, defaults, mesh.layout.compress_warmup))
            elif fits_fused_adamw([p for p, _ in rest]):
                self.parts.append(FusedAdamW(groups, defaults, dict(rest)))
            else:
                self.parts.append(torch.optim.AdamW(groups, **defaults, fused=True))
        if muon:
            self.parts.append(Muon(_groups(muon, run), dict(muon), mesh, train))
        self.in_one_pass = {p for part in self.parts if isinstance(part, FusedAdamW | HostAdamW) for p in part.local}
        self.host = next((part for part in self.parts if isinstance(part, HostAdamW)), None)
        self.peaks = [part.defaults["lr"] for part in self.parts]
        # A gradient made while DistributedDataParallel does not reduce would be a second tensor beside its bucket. A zero that is
        # added to may change its sign, which a step that is computed twice would take for corruption.
        self.keeps_buckets = mesh.layout.uses_ddp and run.accumulation > 1 and not train.recheck_every

    def learning_rate(self, step: int) -> float:
        """AdamW's learning rate in a step, which the metrics show."""
        return self.train.lr * learning_rate_factor(self.train, step)

    @torch.no_grad()
    def step(self, step: int, factor: Tensor) -> None:
        """Update the parameters from their gradients, times `factor`; `step` counts from 1."""
        share = learning_rate_factor(self.train, step)
        for p, h in zip(self.shards, self.parameters, strict=True):
            if p not in self.in_one_pass and not h.entry.frozen:
                p.grad = None if h.grad is None else h.grad.to(p.dtype)
        for part, peak in zip(self.parts, self.peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * share * group["rate"]
            if isinstance(part, FusedAdamW):
                part.factor = factor.float()
            elif isinstance(part, HostAdamW):
                part.factor = factor.to(self.shards[0].dtype)
            else:
                with self.observers.phase("clip"):
                    scale_gradients([p.grad for group in part.param_groups for p in group["params"]], factor)
            part.step()
        for p, h in zip(self.shards, self.parameters, strict=True):
            if h.compute_copy is not None and p not in self.in_one_pass:
                h.compute_copy.copy()

    def squared_norm(self, device: torch.device) -> Tensor:
        """This rank's share of the squared norm of all gradients, on the device or on the host."""
        return squared_norm(self.parameters, self.mesh, device, None if self.host is None else self.host.norms())

    def finish(self) -> None:
        """If the host updates parameters, wait until it has updated all of them."""
        if self.host is not None:
            self.host.finish()

    def zero_grad(self) -> None:
        """Drop the gradients, or set them to zero where they are views of buckets that the next step fills."""
        if self.host is not None:
            self.host.drop()
        for p, h in zip(self.shards, self.parameters, strict=True):
            p.grad = None
            if self.keeps_buckets and h.leaf.grad is not None:
                h.leaf.grad.zero_()
            else:
                h.leaf.grad = None

    def state_of(self, index: int) -> dict[str, Tensor]:
        """This rank's shard of the optimizer state of `parameters[index]`."""
        self.finish()
        p = self.shards[index]
        return next((dict(part.state[p]) for part in self.parts if p in part.state), {})

    def momentum_of(self, index: int) -> Tensor:
        """AdamW's first moment of `parameters[index]`; zeros before the first step."""
        state = self.state_of(index)
        return state["exp_avg"] if state else torch.zeros_like(self.shards[index])

    def set_state(self, index: int, values: dict[str, Tensor]) -> None:
        """Set this rank's shard of the optimizer state of `parameters[index]`."""
        p = self.shards[index]
        for part in self.parts:
            if any(p is q for group in part.param_groups for q in group["params"]):
                # AdamW's step is a scalar: PyTorch's fused one wants it on the parameter's device, ours on the host.
                if isinstance(part, HostAdamW):
                    whole = {key: part.moment(p).copy_(value) for key, value in values.items() if value.ndim}
                    part.state[p] = {key: whole.get(key, value.cpu()) for key, value in values.items()}
                    continue
                at = {"step": "cpu"} if isinstance(part, FusedAdamW) else {}
                part.state[p] = {key: value.to(at.get(key, p.device)) for key, value in values.items()}


def _groups(pairs: Sequence[tuple[Tensor, LocalParameter]], run: Run) -> list[dict[str, object]]:
    """Parameter groups: parameters with the same weight decay and the same learning-rate factor, in order of first appearance.
    Matrices come before vectors, which are not decayed."""
    found: dict[tuple[bool, float], list[Tensor]] = {}

    def decays(h: LocalParameter) -> bool:
        return len(h.whole) > 1 and h.entry.init != "magnitude"  # magnitudes of stacked experts are vectors, stacked

    for p, h in sorted(pairs, key=lambda pair: not decays(pair[1])):
        found.setdefault((decays(h), rate_factor(h.entry, run.model, run.train)), []).append(p)
    return [
        dict(params=shards, weight_decay=run.train.weight_decay / rate if decay else 0.0, rate=rate)
        for (decay, rate), shards in found.items()
    ]


def fits_fused_adamw(parameters: list[Tensor]) -> bool:
    """Whether the fused kernel can update these parameters."""
    return all(p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() for p in parameters)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW that multiplies all gradients by `factor` in the same kernel; `factor` is set before each step."""

    factor: Tensor

    def __init__(
        self, groups: list[dict[str, object]], defaults: dict[str, Any], local: Mapping[Tensor, LocalParameter]
    ) -> None:
        super().__init__(groups, defaults)
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
