"""The parallel axes of a served model: each step is a forward pass of a few tokens, which no axis can cut along the sequence.

Tensor parallelism has its original form (Shoeybi et al. 2019): matrices are cut into columns, then rows, and the ranks' partial
results are all-reduced, two times tokens x hidden elements per layer, and once for the embedding. The head is cut by vocabulary,
and its logits are gathered, rows x vocabulary elements, so that every rank samples the same tokens. `run/ranks/served.py` places
the experts, whole or cut into columns. Each rank routes all tokens and computes the experts or columns it holds, and one all-reduce
sums these and the shared experts. Stages send the residual stream on, tokens x hidden elements per step.

A ring all-reduce sums elements in an order that depends on their position in the message, so a token's sum depends on the batch.
Where that must not be (`serve.invariant`), each tensor rank gathers the others' partial results and sums them in rank order: t - 1
times tokens x hidden elements instead of less than two. Whole experts are exact: the result of the rank that computes a choice is
all-reduced with zeros from the others, k times the elements, and weighted afterwards as on one device.

A rank's pages hold only its own kv heads, so the KV cache shrinks by t, down to one head. The modules have the shapes of a rank's
weights, so everything else is the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.alibi import alibi_of_rank
from shardwise.model.invariant.network import in_order
from shardwise.model.layers import FeedForward, Linear
from shardwise.model.moe.layer import MoE
from shardwise.model.moe.ops import combine, combine_weighted, dispatch, has_fused_kernels, sort_by_expert
from shardwise.model.transformer import Block, Transformer, make_stage
from shardwise.parallel.collectives import all_gather_single
from shardwise.parallel.local_parameter import allocate_buffers, leaves
from shardwise.parallel.p2p import irecv, isend
from shardwise.run import LayoutConfig, ModelConfig
from shardwise.run.parameters import find_parameter
from shardwise.run.ranks.served import ServingRank

Read = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Returns the box of a named tensor of the full model, given its offset and size."""
AddUp = Callable[[Tensor], Tensor]
"""Sums the ranks' partial results."""


class Peers:
    """The other ranks of a replica, as needed by a forward pass on this one."""

    def __init__(self, layout: LayoutConfig, invariant: bool = False) -> None:
        """Every rank of the world creates one, at the same time. `invariant`: sum in one order, whatever else is in the message."""
        from shardwise.parallel.mesh import new_group  # device meshes take half a second to import

        self.invariant = invariant
        self.place = place = ServingRank(layout, dist.get_rank())
        self.stage = new_group(place.stage_ranks, "stage")
        alone = place.tensor_ranks == place.stage_ranks
        self.tensor = self.stage if alone else new_group(place.tensor_ranks, "tensor")
        self.pipeline = new_group(place.pipeline_ranks, "pipeline")
        self._sending: tuple[Any, Tensor] | None = None

    @property
    def first(self) -> bool:
        """Whether this is the first of the ranks that sum: the one that adds the residual stream."""
        return self.place.tensor_index == 0

    @property
    def recordable(self) -> bool:
        """Whether its collectives may be captured in a CUDA graph: those of NCCL are kernels, those of gloo go through the host."""
        return "nccl" in dist.get_backend_config()

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over the tensor ranks."""
        if self.tensor is None or not x.numel():
            return x
        if self.invariant:
            found = x.new_empty(self.place.layout.tensor * len(x), *x.shape[1:])
            all_gather_single(found, x.contiguous(), group=self.tensor)
            return x.copy_(in_order(list(found.split(len(x)))))
        dist.all_reduce(x, group=self.tensor)
        return x

    def add_up_experts(self, x: Tensor) -> Tensor:
        """The sum over the ranks of the stage."""
        if self.stage is not None and x.numel():
            dist.all_reduce(x, group=self.stage)
        return x

    def gather(self, logits: Tensor, vocab: int) -> Tensor:
        """Logits [rows, vocabulary] from each rank's slice of the vocabulary."""
        if self.tensor is None or not len(logits):
            return logits if self.tensor is None else logits.new_empty(0, vocab)
        ranks = self.place.layout.tensor
        each = -(-vocab // ranks)
        if logits.shape[1] < each:
            logits = F.pad(logits, (0, each - logits.shape[1]))
        found = logits.new_empty(ranks, len(logits), each)
        all_gather_single(found.view(-1, each), logits.contiguous(), group=self.tensor)
        return found.transpose(0, 1).flatten(1)[:, :vocab]

    def receive(self, into: Tensor) -> Tensor:
        """Receive the residual stream [tokens, hidden] of the previous stage."""
        irecv(into, self.place.pipeline_ranks[self.place.stage - 1], self.pipeline).wait()
        return into

    def send(self, x: Tensor) -> None:
        """Send the residual stream [tokens, hidden] to the next stage. It must not be written to afterwards."""
        if self._sending is not None:
            self._sending[0].wait()
        x = x.contiguous()
        self._sending = isend(x, self.place.pipeline_ranks[self.place.stage + 1], self.pipeline), x


class AllReduceLinear(Linear):
    """A matrix of which this rank has some columns: the ranks' partial results are summed, and the bias is added once."""

    add_up: AddUp

    @classmethod
    def from_linear(cls, linear: Linear, add_up: AddUp) -> Self:
        """Replaces an uncut matrix."""
        made = cls.taking_over(linear)
        made.add_up = add_up
        return made

    def forward(self, x: Tensor) -> Tensor:
        out = self.add_up(self.gemm(x, self.weight, None))
        return out if self.bias is None else out + self.bias.to(x.dtype)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding cut by vocabulary: each rank looks up the tokens it has, and `add_up` sums the results over the ranks."""

    def __init__(self, embedding: nn.Embedding, start: int, add_up: AddUp) -> None:
        """Replaces an uncut embedding; `start` is the first token of this rank."""
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight, self.start, self.add_up = embedding.weight, start, add_up

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        known = (local >= 0) & (local < self.weight.shape[0])
        found = F.embedding(local * known, self.weight) if self.weight.shape[0] else self.weight.new_zeros(1)
        return self.add_up(torch.where(known[..., None], found, 0))


class ExpertShareMoE(MoE):
    """An MoE layer of which this rank has some experts, or some columns of each. Its input is all tokens."""

    def __init__(self, moe: MoE, start: int, adds_shared: bool, add_up: AddUp) -> None:
        """Replaces a one-device layer and reuses its modules; `start` is the first expert here. Of the ranks that hold the same
        slice of the shared experts, one has `adds_shared`."""
        nn.Module.__init__(self)
        self.router, self.experts, self.shared = moe.router, moe.experts, moe.shared
        self.start, self.adds_shared, self.add_up = start, adds_shared, add_up

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen, auxiliary = self.router(x)
        out = self.forward_routed(x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1)).view_as(x)
        if self.shared is not None and self.adds_shared:
            out = out + self.shared(x)
        return self.add_up(out), auxiliary

    def local_choices(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """Choices as local expert indices; experts of other ranks get the index after the last."""
        experts, local = self.experts.gate.shape[0], chosen - self.start
        return torch.where((local >= 0) & (local < experts) & (weights != 0), local, experts)

    def forward_routed(self, x: Tensor, weights: Tensor, chosen: Tensor, keys: Tensor | None = None) -> Tensor:
        """Run each token [tokens, hidden] through its experts on this rank, and sum the results by weight."""
        if has_fused_kernels(x):
            places, counts = sort_by_expert(self.local_choices(weights, chosen), self.experts.gate.shape[0])
            return combine_weighted(self.experts(dispatch(x, places, chosen.numel()), counts), places, weights)
        return (self.choices_made(x, weights, chosen) * weights[..., None].to(x.dtype)).sum(dim=1)

    def choices_made(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The local experts' output for each choice, [tokens, k, hidden]; 0 for experts on other ranks."""
        experts, local = self.experts.gate.shape[0], self.local_choices(weights, chosen)
        if has_fused_kernels(x):
            places, counts = sort_by_expert(local, experts)
            done = self.experts(dispatch(x, places, chosen.numel()), counts)
            return combine(done, places.view(-1, 1)).view(*chosen.shape, -1)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add_(0, local.flatten(), torch.ones_like(local.flatten()))[:experts]
        order = local.flatten().argsort(stable=True)[: int(counts.sum())]
        done = self.experts(x.index_select(0, order // chosen.shape[1]), counts)
        return x.new_zeros(chosen.numel(), x.shape[1]).index_copy_(0, order, done).view(*chosen.shape, -1)


class InvariantExpertShareMoE(ExpertShareMoE):
    """The same with the bits of one device: ranks exchange the results of single choices, to which no other rank adds. Experts are
    uncut, and every rank computes the shared ones, or its columns of them."""

    forward = MoE.forward  # nothing is left to sum

    def forward_routed(self, x: Tensor, weights: Tensor, chosen: Tensor, keys: Tensor | None = None) -> Tensor:
        """Run each token [tokens, hidden] through its experts on any rank, and sum by weight in the order of its choices."""
        made = self.add_up(self.choices_made(x, weights, chosen))
        if has_fused_kernels(x):
            places = torch.arange(chosen.numel(), dtype=torch.int32, device=x.device).view_as(chosen)
            return combine_weighted(made.flatten(0, 1), places, weights)
        return self.combine(made, weights)


def build_share(
    config: ModelConfig, dtype: torch.dtype | None, layers: Sequence[range], peers: Peers, device: torch.device, read: Read
) -> Transformer:  # fmt: skip
    """Build this rank's share of a served model: its slices of its stage's layers, filled by `read`."""
    place = peers.place
    stage, stages = place.stage, place.layout.pipeline
    model = make_stage(config, dtype, layers[stage], stage == 0, stage == stages - 1)
    for name, owner, leaf, tensor in leaves(model):
        if isinstance(tensor, nn.Parameter):
            values = read(name, *place.box(find_parameter(config, name)))
            owner.register_parameter(leaf, nn.Parameter(values, requires_grad=False))
        else:  # every rank holds all of it
            owner.register_buffer(leaf, read(name, (0,) * tensor.ndim, tuple(tensor.shape)))
    allocate_buffers(model, device)  # what is not part of a checkpoint
    _put_on(model, peers)
    return model.eval()


def _put_on(model: Transformer, peers: Peers) -> None:
    """Replace the modules that end in a sum over ranks."""
    place, config = peers.place, model.config
    if peers.tensor is not None and model.first and model.embed is not None:
        start = place.box(find_parameter(config, "embed.weight"))[0][0]
        model.embed = VocabParallelEmbedding(model.embed, start, peers.add_up)
    if peers.tensor is not None and config.position == "alibi":
        model.rope_builder = alibi_of_rank(config, place.layout.tensor, place.tensor_index)
    for block in model.layers.values():
        assert isinstance(block, Block)
        if peers.tensor is not None:
            block.attention.out = AllReduceLinear.from_linear(block.attention.out, peers.add_up)
        if isinstance(block.ffn, FeedForward) and peers.tensor is not None:
            block.ffn.down = AllReduceLinear.from_linear(block.ffn.down, peers.add_up)
        elif isinstance(block.ffn, MoE) and peers.stage is not None:
            start = place.expert_bounds(config.experts)[0]
            kind = InvariantExpertShareMoE if peers.invariant else ExpertShareMoE
            if peers.invariant and block.ffn.shared is not None and peers.tensor is not None:
                block.ffn.shared.down = AllReduceLinear.from_linear(block.ffn.shared.down, peers.add_up)
            block.ffn = kind(block.ffn, start, place.is_first_of_data, peers.add_up_experts)
