"""Adapters of low rank beside frozen matrices: LoRA (Hu et al. 2021), its rank-stabilised form (Kalajdzievski 2023), and DoRA (Liu
et al. 2024).

A matrix W [out, in] gets two small ones, A [rank, in] and B [out, rank]; its output is W x + s B A x. B starts at zero, so that
training begins with the unchanged network. The factor s multiplies the output of A, the smallest tensor, so that the gradient of
the sum is the gradient of both terms. `run/parameters.py` says which parameters there are, which are frozen, and how they are
sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.layers import Linear, at_least_float32
from shardwise.model.moe.layer import Experts, RowsOfExperts, ScaledRows, experts_of
from shardwise.model.normal import key_of, mix64
from shardwise.model.transformer import Transformer
from shardwise.run import AdapterConfig


@dataclass
class TokenKeys:
    """A random number for each token of the current microbatch, [batch, sequence], which keys its dropout. It depends on the seed,
    the step, the sample and the position in it, so every layout drops the same elements, and so does recomputation."""

    keys: Tensor | None = None


def without_a_share(x: Tensor, keys: Tensor, columns: Tensor, share: float) -> Tensor:
    """Dropout of vectors: zero a share of their elements, by each vector's random number and the column indices; scale up the
    rest."""
    drawn = mix64(keys[..., None] ^ mix64(columns))
    kept = drawn >= int((2 * share - 1) * 2**63)  # this share of the signed 64-bit integers lies below
    return _Dropped.apply(x, kept, 1 / (1 - share))


class _Dropped(torch.autograd.Function):
    """Dropout that saves one bit for each element (Gist, Jain et al. 2018), where autograd would save its factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(packed_bits(kept))
        ctx.factor = factor
        return x * (kept * factor).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (bits,) = ctx.saved_tensors
        kept = unpacked_bits(bits, grads[0].numel()).view(grads[0].shape)
        return grads[0] * (kept * ctx.factor).to(grads[0].dtype), None, None


def packed_bits(mask: Tensor) -> Tensor:
    """A mask packed into bits, eight to a byte."""
    flat = mask.flatten()
    whole = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
    return (whole << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(dim=1, dtype=torch.uint8)


def unpacked_bits(bits: Tensor, count: int) -> Tensor:
    """The first `count` elements of a packed mask."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).flatten()[:count].bool()


class LowRank(nn.Module):
    """The adapter of one matrix. `first` is this rank's first column of the matrix."""

    enabled = True
    first = 0
    over_columns: Callable[[Tensor], Tensor] = staticmethod(lambda squares: squares)
    """Turns sums over this rank's columns into sums over all columns."""

    def __init__(
        self, columns: int, rows: int, adapter: AdapterConfig, name: str = "", tokens: TokenKeys | None = None
    ) -> None:
        super().__init__()
        self.rescales = adapter.kind == "dora"
        if self.rescales:
            self.magnitude = nn.Parameter(torch.empty(rows))
        self.A = Linear(columns, adapter.rank, bias=False)
        self.B = Linear(adapter.rank, rows, bias=False)
        self.scale, self.dropout = adapter.scale, adapter.dropout
        self.tokens = tokens or TokenKeys()
        self.key = key_of(name)

    def forward(self, x: Tensor) -> Tensor | None:
        """The adapter's term of the output; None when it is disabled."""
        if not self.enabled:
            return None
        return self.B(self.A(self.dropped(x) if self.dropout and self.training else x) * self.scale)

    def join(self, out: Tensor, low_rank: Tensor, weight: Tensor) -> Tensor:
        """The output of the matrix combined with the adapter's. DoRA (Liu et al. 2024, equation 5) rescales each row of the two
        matrices' sum to a trained length; the row's own length is a constant to the gradient (section 4.3)."""
        out = out + low_rank
        if not self.rescales:
            return out
        with torch.no_grad():
            down, up = at_least_float32(self.A.weight), at_least_float32(self.B.weight)
            row = at_least_float32(weight) + (up @ down) * self.scale
            length = self.over_columns(row.square().sum(dim=1)).sqrt()
        return out * (self.magnitude / length).to(out.dtype)

    def dropped(self, x: Tensor) -> Tensor:
        """The input [batch, sequence, columns] after dropout: a share of its elements is zero, the others are scaled up."""
        assert self.tokens.keys is not None
        columns = torch.arange(self.first, self.first + x.shape[-1], device=x.device)
        return without_a_share(x, self.tokens.keys ^ self.key, columns, self.dropout)


class LowRankExperts(nn.Module):
    """The adapters of stacked experts: a stack of A and a stack of B for each adapted matrix. `first` is this rank's first column
    of each matrix, `first_expert` its first expert."""

    enabled = True
    first_expert = 0
    over_columns: Callable[[Tensor], Tensor] = staticmethod(lambda squares: squares)
    """Turns sums over this rank's columns of the last matrix into sums over all columns."""

    def __init__(
        self,
        experts: Experts,
        parts: list[str],
        adapter: AdapterConfig,
        name: str = "",
        tokens: TokenKeys | None = None,
    ) -> None:
        super().__init__()
        self.rescales = adapter.kind == "dora"
        for part in parts:
            count, rows, columns = getattr(experts, part).shape
            if self.rescales:
                self.register_parameter(f"{part}_magnitude", nn.Parameter(torch.empty(count, rows)))
            self.register_parameter(f"{part}_A", nn.Parameter(torch.empty(count, adapter.rank, columns)))
            self.register_parameter(f"{part}_B", nn.Parameter(torch.empty(count, rows, adapter.rank)))
        self.parts = frozenset(parts)
        self.scale, self.dropout = adapter.scale, adapter.dropout
        self.tokens = tokens or TokenKeys()
        self.keys = {part: key_of(f"{name}.{part}") for part in parts}
        self.first = dict.fromkeys(parts, 0)

    def forward(
        self, part: str, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], rows: RowsOfExperts
    ) -> Tensor | None:
        """The adapters' term of the product of one matrix of each expert with its rows; `multiply` takes rows and a stack."""
        if part not in self.parts or not self.enabled:
            return None
        down, up = getattr(self, f"{part}_A"), getattr(self, f"{part}_B")
        x = self.dropped(part, x, rows) if self.dropout and self.training else x
        return multiply(multiply(x, down) * self.scale, up)

    def join(self, part: str, out: Tensor, low_rank: Tensor, weight: Tensor, rows: RowsOfExperts) -> Tensor:
        """The product of the matrices combined with the adapters'; DoRA rescales each row of each expert to a trained length."""
        out = out + low_rank
        if not self.rescales:
            return out
        with torch.no_grad():
            down, up = (at_least_float32(getattr(self, f"{part}_{letter}")) for letter in "AB")
            squares = (at_least_float32(weight) + (up @ down) * self.scale).square().sum(dim=2)
            length = (self.over_columns(squares) if part == "down" else squares).sqrt()
        return ScaledRows.apply(out, (getattr(self, f"{part}_magnitude") / length).to(out.dtype), rows.counts)

    def dropped(self, part: str, x: Tensor, rows: RowsOfExperts) -> Tensor:
        """Rows after dropout, drawn by each row's token and its expert."""
        assert rows.keys is not None
        expert = self.first_expert + experts_of(rows.counts, len(x))
        keys = mix64(rows.keys ^ mix64(expert + self.keys[part]))
        columns = torch.arange(self.first[part], self.first[part] + x.shape[-1], device=x.device)
        return without_a_share(x, keys, columns, self.dropout)


def put_on_adapters(model: Transformer, adapter: AdapterConfig) -> None:
    """Give the matrices that a run names their adapters, still without values."""
    if not adapter.used:
        return
    model.frozen_embedding, tokens = True, TokenKeys()
    for name, module in list(model.layers.named_modules()):
        if isinstance(module, Experts):
            parts = [part for part in ("gate", "up", "down") if adapter.adapts(part)]
            with torch.device(module.gate.device):
                module.lora = LowRankExperts(module, parts, adapter, f"layers.{name}", tokens) if parts else None
        elif isinstance(module, Linear) and adapter.adapts(name):
            with torch.device(module.weight.device):
                module.lora = LowRank(module.in_features, module.out_features, adapter, f"layers.{name}", tokens)


def token_keys(model: nn.Module) -> TokenKeys | None:
    """The token keys that the model's adapters draw dropout by; None without dropout."""
    adapters = (module for module in model.modules() if isinstance(module, LowRank | LowRankExperts))
    return next((module.tokens for module in adapters if module.dropout), None)


@contextlib.contextmanager
def adapters_off(*stages: nn.Module) -> Iterator[None]:
    """Within this context the network computes without its adapters, as before it was tuned."""
    modules = (module for stage in stages for module in stage.modules())
    found = [module for module in modules if isinstance(module, LowRank | LowRankExperts) and module.enabled]
    for each in found:
        each.enabled = False
    try:
        yield
    finally:
        for each in found:
            each.enabled = True


def row_lengths(matrix: Tensor) -> Tensor:
    """The length of each row: the initial value of a magnitude, so that training begins with the unchanged network."""
    return at_least_float32(matrix).square().sum(dim=-1).sqrt()
