"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022): matrices are cut into columns, then
rows, over ranks with a fast network. Between such pairs each rank holds a shard of the sequence, so norms and the residual stream
are split too. Embedding, head and cross-entropy are cut by vocabulary: logits are never gathered.

Parameters and activations shrink by t. Traffic per rank, layer and microbatch, forward: two all-gathers and two reduce-scatters,
each (t-1)/t of batch x sequence x hidden elements. Backward: the same, and when the block is recomputed, both all-gathers and the
first reduce-scatter once more (the second ends the block, and nothing needs its result). Embedding and head together: an all-gather
and a reduce-scatter forward, and the same backward. Loss: 2(t-1)/t of 3 x batch x sequence elements, all-reduced in two messages,
or in two for each chunk of logits.
Once a step: the gradients of uncut parameters (`gradients.py`).
Parameters are plain tensors holding this rank's shard (`run/parameters.py`), not DTensors: DTensor has no layout for a vocabulary
that does not divide evenly and is sharded again by `fully_shard`, and activations need no dispatch through it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.adapters import LowRank
from shardwise.model.alibi import alibi_of_rank
from shardwise.model.attention import GroupedAttention, LatentAttention
from shardwise.model.layers import FeedForward, Linear, at_least_float32
from shardwise.model.logprobs import IGNORE_INDEX, LogProbHead, local_places
from shardwise.model.loss import ChunkedCrossEntropy, ScoreHead
from shardwise.model.moe.layer import MoE
from shardwise.model.transformer import Block, Transformer
from shardwise.parallel.collectives import Group, all_gather, all_gather_sequence, all_reduced, reduce_scatter_sequence
from shardwise.parallel.inference import VocabParallelEmbedding
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.overlap import GatheredLinear, all_gather_into_gemm, first_matrix, gemm_reduce_scatter
from shardwise.run.parameters import shard_bounds


class RowParallelLinear(Linear):
    """A matrix cut by rows: its results are partial sums, reduce-scattered along the sequence."""

    group: Group = None

    @classmethod
    def from_linear(cls, linear: Linear, group: Group) -> Self:
        """Replaces an uncut matrix."""
        made = cls.taking_over(linear)
        made.group = group
        if isinstance(made.lora, LowRank):
            made.lora.over_columns = partial(all_reduced, group=group)
        return made

    def forward(self, x: Tensor) -> Tensor:
        low_rank = self.low_rank(x)  # partial sums as well
        out = reduce_scatter_sequence(self.joined(self.gemm(x, self.weight, None), low_rank), self.group)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class OverlappedRowParallelLinear(RowParallelLinear):
    """The same, with the reduce-scatter overlapping the GEMM."""

    def forward(self, x: Tensor) -> Tensor:
        low_rank = self.low_rank(x)
        out = gemm_reduce_scatter(x, self.weight.to(x.dtype), self.group, low_rank)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class ReplicatedKVLinear(Linear):
    """Keys or values when there are fewer heads than ranks: the whole matrix is replicated and one head's rows are used."""

    rows: slice = slice(None)

    @classmethod
    def from_linear(cls, linear: Linear, rows: slice) -> Self:
        """Replaces the matrix of all heads; `rows` are those of the head that this rank uses."""
        made = cls.taking_over(linear)
        made.rows = rows
        if isinstance(made.lora, LowRank):
            made.lora.B = cls.from_linear(made.lora.B, rows)
        return made

    def forward(self, x: Tensor) -> Tensor:
        low_rank = self.low_rank(x)
        out = self.gemm(x, self.weight[self.rows], self.bias[self.rows] if self.bias is not None else None)
        return out if low_rank is None else out + low_rank


class _VocabParallelCrossEntropyFunction(torch.autograd.Function):
    """Summed cross-entropy of logits cut by vocabulary, without gathering them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor | None, start: int, group: Group) -> Tensor:
        if logits.shape[-1]:
            highest = logits.amax(dim=-1)
        else:
            highest = logits.new_full(logits.shape[:-1], float("-inf"))
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        local = targets - start
        mine = (local >= 0) & (local < logits.shape[-1])
        exponentials = (logits - highest[..., None]).exp()
        total = exponentials.sum(dim=-1)
        target = torch.zeros_like(total)
        if logits.shape[-1]:
            picked = (logits - highest[..., None]).gather(-1, (local * mine)[..., None])[..., 0]
            target = torch.where(mine, picked, 0)
        both = torch.stack((total, target))
        dist.all_reduce(both, group=group)
        total, target = both
        counted = targets >= 0
        losses = torch.where(counted, total.log() - target, 0)
        if weights is not None:
            losses, counted = losses * weights, counted * weights
        ctx.save_for_backward(exponentials / total[..., None], local, mine, counted)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, local, mine, counted = ctx.saved_tensors
        grad = softmax.clone()
        if grad.shape[-1]:
            index = (local * mine)[..., None]
            grad.scatter_add_(-1, index, -mine[..., None].to(grad.dtype))
        return grad * (counted[..., None] * grads[0]), None, None, None, None


class _VocabParallelHead(LogProbHead):
    """Common base of the heads whose vocabulary is cut over ranks."""

    def __init__(self, head: LogProbHead, mesh: Mesh, vocab: int) -> None:
        """Replaces a head with the full vocabulary."""
        LogProbHead.__init__(self, head.chunk_bytes, head.gemm)
        self.group = mesh.group("tensor")
        self.start, _ = shard_bounds(vocab, mesh.size("tensor"), mesh.index("tensor"))
        self.most = shard_bounds(vocab, mesh.size("tensor"), 0)[1]

    def most_rows(self, matrix: Tensor) -> int:
        return self.most

    def over_vocabulary(self, total: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        highest = total.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        both = torch.cat(((total - highest).exp()[:, None], picked), dim=1)
        dist.all_reduce(both, group=self.group)
        return highest + both[:, 0].log(), both[:, 1:]

    def gathered(self, x: Tensor) -> Tensor:
        return all_gather_sequence(x, self.group)

    def likeliest(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # Each rank's largest logits are gathered: no other logit can be among the largest of all.
        found, place = all_gather(logits, self.group, 1).topk(logits.shape[1], dim=-1)
        return found, all_gather(tokens, self.group, 1).gather(-1, place)


class VocabParallelCrossEntropy(_VocabParallelHead):
    """The loss head of a vocabulary cut over ranks; the input is this rank's shard of the sequence, targets and weights are those
    of the full sequence."""

    def cross_entropy(self, x: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        logits = at_least_float32(F.linear(x, matrix.to(x.dtype)))
        return _VocabParallelCrossEntropyFunction.apply(logits, targets, weights, self.start, self.group)


class ChunkedVocabParallelCrossEntropy(_VocabParallelHead, ChunkedCrossEntropy):
    """The same in chunks: the ranks communicate for each chunk, and none holds the logits of more than one chunk."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        counted = targets != IGNORE_INDEX
        if logits.is_cuda and logits.dtype != torch.float64 and logits.shape[1]:
            from shardwise.model.kernels.cross_entropy import local_gradients_, local_sums

            total, own = local_sums(logits, targets, self.start)
            total, picked = self.over_vocabulary(total, own[:, None])
            local_gradients_(logits, targets, total, self.start, IGNORE_INDEX)
            return torch.where(counted, total - picked[:, 0], 0)
        upcast = at_least_float32(logits)
        mine, place = local_places(targets[:, None], self.start, logits.shape[1])
        picked = upcast.gather(-1, place) if logits.shape[1] else upcast.new_zeros(place.shape)
        total, picked = self.over_vocabulary(upcast.logsumexp(dim=-1), torch.where(mine, picked, 0))
        gradient = (upcast - total[:, None]).exp_()
        if logits.shape[1]:
            gradient.scatter_add_(-1, place, -mine.to(gradient.dtype))
        logits.copy_(torch.where(counted[:, None], gradient, 0))
        return torch.where(counted, total - picked[:, 0], 0)


class TensorScoreHead(ScoreHead):
    """A score head where each tensor rank has its shard of the sequence: microbatch x sequence scores are all-reduced."""

    def __init__(self, head: ScoreHead, mesh: Mesh) -> None:
        super().__init__(head.gemm)
        self.mesh = mesh

    def whole(self, scores: Tensor) -> Tensor:
        length, index = scores.shape[1], self.mesh.index("tensor")
        whole = F.pad(scores, (index * length, (self.mesh.size("tensor") - 1 - index) * length))
        dist.all_reduce(whole, group=self.mesh.group("tensor"))
        return whole

    def part(self, whole: Tensor) -> Tensor:
        return local_sequence(whole, self.mesh)


def local_sequence(x: Tensor, mesh: Mesh) -> Tensor:
    """This tensor rank's shard of a sequence [batch, sequence, …]."""
    return x.chunk(mesh.size("tensor"), dim=1)[mesh.index("tensor")]


def _cut(module: nn.Module, last: str, group: Group, overlap: bool, gathers: bool = True) -> None:
    """Gather a module's input, unless it is already gathered, and reduce-scatter its output; its matrices in between are cut by
    columns, the last one by rows."""
    first = first_matrix(module) if overlap else None
    if not gathers:
        pass
    elif first is None:
        module.register_forward_pre_hook(lambda _, args: (all_gather_sequence(args[0], group), *args[1:]))
    else:
        gathered = GatheredLinear.taking_over(getattr(module, first))
        setattr(module, first, gathered)
        module.register_forward_pre_hook(all_gather_into_gemm(gathered, group))
    row_parallel = OverlappedRowParallelLinear if overlap else RowParallelLinear
    setattr(module, last, row_parallel.from_linear(getattr(module, last), group))


def _cut_attention(attention: nn.Module, model: Transformer, mesh: Mesh) -> None:
    assert isinstance(attention, GroupedAttention | LatentAttention)
    _cut(attention, "out", mesh.group("tensor"), mesh.layout.async_tensor)
    config, ranks = model.config, mesh.size("tensor")
    if isinstance(attention, GroupedAttention) and config.kv_heads < ranks:
        head = mesh.index("tensor") * config.kv_heads // ranks
        rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
        attention.k = ReplicatedKVLinear.from_linear(attention.k, rows)
        attention.v = ReplicatedKVLinear.from_linear(attention.v, rows)


def apply_tensor(model: Transformer, mesh: Mesh) -> None:
    """Cut the network over the tensor ranks: modules change here, parameters when they are created (`run/parameters.py`)."""
    group = mesh.group("tensor")
    if group is None:
        return
    start, _ = shard_bounds(model.config.vocab, mesh.size("tensor"), mesh.index("tensor"))
    if model.embed is not None:
        # The sum is scattered along the sequence.
        model.embed = VocabParallelEmbedding(model.embed, start, partial(reduce_scatter_sequence, group=group))
    if model.positions is not None:
        model.positions.register_forward_pre_hook(lambda _, args: (local_sequence(args[0], mesh),))
    if isinstance(model.loss, ScoreHead):
        model.loss = TensorScoreHead(model.loss, mesh)
    else:
        assert isinstance(model.loss, LogProbHead)
        chunked = isinstance(model.loss, ChunkedCrossEntropy)
        cut = ChunkedVocabParallelCrossEntropy if chunked else VocabParallelCrossEntropy
        model.loss = cut(model.loss, mesh, model.config.vocab)
    if model.config.position == "alibi":
        model.rope_builder = alibi_of_rank(model.config, mesh.size("tensor"), mesh.index("tensor"))
    for block in model.layers.values():
        assert isinstance(block, Block)
        _cut_attention(block.attention, model, mesh)
        if isinstance(block.ffn, FeedForward):
            _cut(block.ffn, "down", group, mesh.layout.async_tensor)
        elif isinstance(block.ffn, MoE) and block.ffn.shared is not None:
            # With expert tensor parallelism the sequence is already gathered for the routed experts (`expert.py`).
            _cut(block.ffn.shared, "down", group, mesh.layout.async_tensor, gathers=not mesh.layout.expert_tensor)
