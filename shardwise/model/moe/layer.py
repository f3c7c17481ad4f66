"""Mixture of experts (MoE): a router sends each token to its top-k feed-forward layers. No token is dropped, unless a capacity is
set; then a choice whose expert is full has weight zero.

Dispatch orders tokens by expert, each expert works on contiguous rows, and combine applies the inverse permutation. Only
permutations are used, so sums have a fixed order and two runs are identical to the bit. On a GPU, kernels dispatch and combine
(`ops.py`) and one grouped GEMM computes all experts, so the choices need no host sync.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.layers import FeedForward, at_least_float32, gated
from shardwise.model.moe.ops import combine_weighted, dispatch, has_fused_kernels, sort_by_expert, topk_experts
from shardwise.model.moe.router_gemm import multiplies, router_gemm
from shardwise.run import ModelConfig
from shardwise.run.derive import expert_capacity


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens [batch, sequence, hidden] times the router's matrix [experts, hidden], in float32 or higher."""
    if multiplies(x):
        return router_gemm(x.flatten(0, 1), weight.mT).unflatten(0, x.shape[:2])
    upcast = at_least_float32(x)
    return F.linear(upcast, weight.to(upcast.dtype))


class Router(nn.Module):
    """Scores every expert for every token and picks the best k. The functions `multiply`, `scores` and `total` compute it and may
    be replaced.

    Softmax as in Mixtral, or sigmoid with a selection bias as in DeepSeek-V3 (2024, section 2.1.2): the bias decides which experts
    are chosen but not their weights. It is moved after each step towards even load, outside of the gradient.
    """

    bias: Tensor
    load: Tensor
    multiply: Callable[[Tensor, Tensor], Tensor] = staticmethod(router_logits)
    scores: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = staticmethod(
        lambda function, logits: function(logits)
    )
    """Softmax or sigmoid of logits."""
    total: Callable[[Tensor], Tensor] = staticmethod(lambda x: x.sum(-1, keepdim=True))
    """The sum over the last dimension, which is kept."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        if config.router == "sigmoid":
            self.register_buffer("bias", torch.zeros(config.experts))
        # Tokens routed to each expert since the last `rebalance`; not counted while a forward pass is recomputed.
        self.register_buffer("load", torch.zeros(config.experts), persistent=False)
        self.counting = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [batch, sequence, hidden] to weights and experts [batch, sequence, k], and the two auxiliary losses.

        The auxiliary losses are sums over tokens: the sequence-wise balance loss (DeepSeek-V3, eq. 17 to 20) and the
        squared log-partition of the logits (Zoph et al. 2022, eq. 5).
        """
        c = self.config
        logits = self.multiply(x, self.weight)
        if c.router == "sigmoid":
            scores = self.scores(torch.sigmoid, logits)
            choice = scores + self.bias.to(scores.dtype)
            probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        else:
            scores = choice = probabilities = self.scores(partial(torch.softmax, dim=-1), logits)
        if c.router_groups > 1:
            choice = self._within_best_groups(choice)
        if has_fused_kernels(choice):
            chosen = topk_experts(choice.detach(), c.experts_per_token)
        else:
            chosen = choice.topk(c.experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(-1, chosen)
        if c.router_normalize:
            weights = weights / (self.total(weights) + 1e-20)
        if c.expert_capacity:
            weights = weights * self.within_capacity(chosen)
        # In float32, whatever the scores are: PyTorch 2.11 compiles this for a GPU as a comparison that gives float32.
        counts = torch.zeros_like(scores, dtype=torch.float32).scatter_(-1, chosen, 1.0).sum(dim=1).to(scores.dtype)
        if self.counting and self.training:
            self.load += counts.sum(dim=0).to(self.load.dtype)
        counts, probabilities, length = self.over_sequence(counts, probabilities.sum(dim=1), x.shape[1])
        balance = (counts * probabilities).sum() * (c.experts / (c.experts_per_token * length))
        z = logits.logsumexp(dim=-1).square().sum()
        return weights * c.router_scale, chosen, torch.stack((balance, z))

    def over_sequence(self, counts: Tensor, probabilities: Tensor, length: int) -> tuple[Tensor, Tensor, int]:
        """Sums over whole sequences from sums over this rank's tokens [batch, experts], and the sequences' length."""
        return counts, probabilities, length

    def within_capacity(self, chosen: Tensor) -> Tensor:
        """Which choices [batch, sequence, k] are within their expert's capacity, the earliest tokens of a sequence first."""
        c = self.config
        capacity = expert_capacity(c, chosen.shape[1])
        taken = F.one_hot(chosen.flatten(1), c.experts).cumsum(dim=1)
        place = taken.gather(-1, chosen.flatten(1)[..., None])[..., 0]
        return (place <= capacity).view_as(chosen)

    def _within_best_groups(self, choice: Tensor) -> Tensor:
        """Only experts in the groups whose two best scores add up highest stay eligible (DeepSeek-V3's node limit)."""
        c = self.config
        by_group = choice.unflatten(-1, (c.router_groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        chosen = best.topk(c.router_top_groups, dim=-1).indices
        eligible = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
        return by_group.masked_fill(~eligible[..., None], float("-inf")).flatten(-2)

    @torch.no_grad()
    def rebalance(self, rate: float) -> None:
        """Move the selection bias by `rate` in favour of experts below the mean load, and reset the counts."""
        if self.config.router == "sigmoid" and rate:
            self.bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


ReadCounts = Callable[[Tensor, int], list[list[int]]]


def read_counts(counts: Tensor, total: int) -> list[list[int]]:
    """Rows of counts that each add up to `total`, as host integers to split tensors and messages by; this is a host sync."""
    return counts.tolist()


def uses_grouped_gemm(x: Tensor, weight: Tensor) -> bool:
    """Whether one kernel multiplies the rows of all experts; it needs matrices whose rows are multiples of 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


def grouped_gemm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of `x` times their experts' matrices [out, in]; `ends` (int32) says where each expert's rows end. Rows beyond the last
    end are not computed. Neither the GEMM nor its gradients copy the matrices: all of them accept either memory order."""
    return F.grouped_mm(x, weight.to(x.dtype).transpose(-2, -1), offs=ends)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, read: ReadCounts = read_counts) -> Tensor:
    """Rows of `x`, `counts[e]` of them for each expert in turn, times that expert's matrix [out, in]."""
    if uses_grouped_gemm(x, weight):
        return grouped_gemm(x, weight, counts.cumsum(0, dtype=torch.int32))
    sizes = read(counts[None], len(x))[0]
    if sum(sizes) < len(x):  # the rest belongs to no expert
        x = x[: sum(sizes)]
    by_expert = zip(x.split(sizes), weight.to(x.dtype).unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in by_expert])


class RowsOfExperts(NamedTuple):
    """Metadata of rows ordered by expert: how many each expert has and, with dropout, the random numbers of their tokens."""

    counts: Tensor
    keys: Tensor | None = None


def experts_of(counts: Tensor, rows: int) -> Tensor:
    """The expert of each row; rows beyond those counted are assigned to the last."""
    places = torch.arange(rows, device=counts.device)
    return torch.searchsorted(counts.cumsum(0), places, right=True).clamp_(max=len(counts) - 1)


class ScaledRows(torch.autograd.Function):
    """Rows ordered by expert, each times its expert's vector, [expert, width]. The gradient of the vectors sums the rows of each
    expert in order, so that two runs are identical to the bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, factors, counts)
        return x * factors[experts_of(counts, len(x))]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, factors, counts = ctx.saved_tensors
        expert = experts_of(counts, len(x))
        sums = torch.segment_reduce(at_least_float32(grads[0]) * x, "sum", lengths=counts, unsafe=True)
        return grads[0] * factors[expert], sums.to(factors.dtype), None


class Experts(nn.Module):
    """The routed experts' matrices, stacked [expert, out, in]. `read_counts` copies counts to the host; a dry run, which has no
    data to read, replaces it. `multiply`, if set, replaces `grouped_linear`; `gated` may be replaced too."""

    read_counts: ReadCounts = staticmethod(read_counts)
    multiply: Callable[[Tensor, Tensor, Tensor, ReadCounts], Tensor] | None = None
    gated: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor] = staticmethod(gated)
    frozen_multiply: Callable[[str, Tensor, Tensor], Tensor] | None = None
    """Set where the matrices are stored in another form (`quantized/nf4.py`): takes a part's name, rows and counts, and
    multiplies."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.experts, config.expert_ffn, config.hidden)
        self.gate = nn.Parameter(torch.empty(shape))
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_ffn))
        self.lora: Any = None
        """Adapters of these matrices; their output is added."""

    def forward(self, x: Tensor, counts: Tensor, keys: Tensor | None = None) -> Tensor:
        """Rows ordered by expert, `counts` of them for each; `keys` are their tokens' random numbers, for dropout."""
        plain = self.lora is None and self.multiply is None and self.frozen_multiply is None
        if plain and uses_grouped_gemm(x, self.gate):
            return self._grouped(x, counts.cumsum(0, dtype=torch.int32))
        rows = RowsOfExperts(counts, keys)
        inner = self.gated(F.silu, self._product("gate", x, rows), self._product("up", x, rows))
        return self._product("down", inner, rows)

    def _product(self, part: str, x: Tensor, rows: RowsOfExperts) -> Tensor:
        """Rows times one of each expert's matrices, with its adapter."""
        read, multiply = self.read_counts, self.multiply or grouped_linear
        low_rank = None
        if self.lora is not None:
            low_rank = self.lora(part, x, lambda these, stack: multiply(these, stack, rows.counts, read), rows)
        if self.frozen_multiply is not None:
            out = self.frozen_multiply(part, x, rows.counts)
        else:
            out = multiply(x, getattr(self, part), rows.counts, read)
        return out if low_rank is None else self.lora.join(part, out, low_rank, getattr(self, part), rows)

    def _grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.gate.dtype == x.dtype:
            gate, up = grouped_gemm(x, self.gate, ends), grouped_gemm(x, self.up, ends)
        else:
            # Concatenated, gate and up are one GEMM, and so is the gradient of `x`, which would otherwise be a sum of
            # two.
            both = torch.cat((self.gate.to(x.dtype), self.up.to(x.dtype)), dim=1)
            gate, up = grouped_gemm(x, both, ends).chunk(2, dim=-1)
        return grouped_gemm(F.silu(gate) * up, self.down, ends)


def dispatched_keys(keys: Tensor, places: Tensor, rows: int) -> Tensor:
    """The tokens' random numbers ordered by expert, from the row index of each choice [tokens, k]."""
    spread = keys[:, None].expand_as(places).flatten()
    sent = torch.where(places < 0, rows, places).flatten().long()  # choices without a row go behind all others
    return keys.new_zeros(rows + 1).scatter_(0, sent, spread)[:rows]


def combine_reference(rows: Tensor, weights: Tensor) -> Tensor:
    """The sum of each token's expert outputs [tokens, k, width], weighted by [tokens, k]."""
    return (rows * weights[..., None].to(rows.dtype)).sum(dim=1)


class MoE(nn.Module):
    """Router, routed experts and, where the model has them, shared experts that every token passes. `combine` sums a token's
    expert outputs where no kernel does, and may be replaced by another function."""

    combine: Callable[[Tensor, Tensor], Tensor] = staticmethod(combine_reference)

    accepted: Callable[[Tensor], Tensor] = staticmethod(lambda weights: weights.nonzero()[:, 0])
    """The choices with a nonzero weight; a run without data replaces this function."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        width = config.shared_experts * config.expert_ffn
        self.shared = FeedForward(config, width) if width else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen, auxiliary = self.router(x)
        flat = weights.flatten(0, 1), chosen.flatten(0, 1)
        out = self.forward_routed(x.flatten(0, 1), *flat, self.token_keys()).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        return out, auxiliary

    def token_keys(self) -> Tensor | None:
        """The random numbers of this rank's tokens, [tokens], by which the experts' adapters draw dropout; None without
        dropout."""
        lora = self.experts.lora
        if lora is None or not lora.dropout or not lora.enabled or not self.training:
            return None
        return self.own_tokens(lora.tokens.keys).flatten()

    def own_tokens(self, keys: Tensor) -> Tensor:
        """The random numbers of the tokens that this rank routes, out of those of all [batch, sequence]."""
        return keys

    def forward_routed(self, x: Tensor, weights: Tensor, chosen: Tensor, keys: Tensor | None = None) -> Tensor:
        """The weighted sum of each token's [tokens, hidden] k expert outputs."""
        if not has_fused_kernels(x):
            return self.forward_routed_reference(x, weights, chosen, keys)
        experts = self.router.config.experts
        if self.router.config.expert_capacity:  # choices of weight 0 go to an expert that does not exist: no row
            chosen = chosen.masked_fill(weights.detach() == 0, experts)
        places, counts = sort_by_expert(chosen, experts)
        if keys is not None:
            keys = dispatched_keys(keys, places, chosen.numel())
        done = self.run_experts([dispatch(x, places, chosen.numel())], counts, keys)
        return combine_weighted(done, places, weights)

    def forward_routed_reference(
        self, x: Tensor, weights: Tensor, chosen: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """The same in plain PyTorch operators."""
        (tokens, k), flat = chosen.shape, chosen.flatten()
        # With a capacity, choices of weight 0 are not dispatched at all.
        accepted = self.accepted(weights.detach().flatten()) if self.router.config.expert_capacity else None
        routed = flat if accepted is None else flat[accepted]
        order = routed.argsort(stable=True)
        order = order if accepted is None else accepted[order]
        counts = torch.zeros(self.router.config.experts, dtype=flat.dtype, device=flat.device)
        counts = counts.scatter_add_(0, routed, torch.ones_like(routed))
        # Copy first, then permute: the gradient is a permutation too, and the sum over copies has a fixed order.
        copies = x[:, None].expand(-1, k, -1).reshape(tokens * k, -1)
        keys = None if keys is None else keys[order // k]
        done = self.run_experts([copies.index_select(0, order)], counts, keys)
        if accepted is None:
            back = torch.empty_like(order).scatter_(0, order, torch.arange(tokens * k, device=x.device))
            rows = done.index_select(0, back)
        else:
            rows = torch.zeros_like(copies).index_copy(0, order, done)
        return self.combine(rows.view(tokens, k, -1), weights)

    def run_experts(self, rows: list[Tensor], counts: Tensor, keys: Tensor | None = None) -> Tensor:
        """Rows ordered by expert, `counts` of them for each, through those experts; rows beyond the counts belong to none.
        They come in a list of one tensor, which may be emptied, so that no caller keeps rows alive that another rank has."""
        return self.experts(rows[0], counts, keys)
