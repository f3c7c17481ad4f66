"""The axes put on a model that is served: a forward pass of a few tokens in each step, which no axis can cut along the sequence.

Tensor parallelism in its first form (Shoeybi et al. 2019): matrices are cut into columns, then rows, and what the ranks have made
is all-reduced, two times tokens x hidden elements for each layer, and once for the embedding. The head is cut by vocabulary, and
its logits are gathered, rows x vocabulary elements, for every rank to pick the same tokens from. Experts, whole or columns of them,
stand where `run/served.py` says. Each rank routes all tokens, computes what it has of their experts, and one all-reduce adds up
those and the shared experts. Stages send the residual stream on, tokens x hidden elements of each step.

A ring adds up the elements of a message in an order that depends on where they stand in it, so a token's sum depends on the batch.
Where that must not be (`serve.invariant`), each tensor rank gathers what the others have made and adds it up in the order of the
ranks: t - 1 times tokens x hidden elements in the place of less than two. Whole experts are exact: what one rank has made of a
choice is all-reduced with the zeros of the others, k times as many elements, and weighed afterwards as on one device.

A rank's kv heads are its own pages, so keys and values fall by t, down to one head. The modules' shapes are those of the weights a
rank holds, so all else is the model's own code.
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
from shardwise.parallel.p2p import irecv, isend
from shardwise.run import LayoutConfig, ModelConfig
from shardwise.run.parameters import Parameter, find_parameter
from shardwise.run.served import ServingRank
from shardwise.torch_private import is_persistent

Read = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Gives the box of a named tensor of the whole model that begins at an offset and has a size."""
AddUp = Callable[[Tensor], Tensor]
"""Adds up what the ranks have each made, in place."""


class Peers:
    """The other ranks of a replica, as a forward pass on this one needs them."""

    def __init__(self, layout: LayoutConfig, invariant: bool = False) -> None:
        """Every rank of the world makes one, at the same time. `invariant`: add up in one order, whatever else is added up."""
        self.invariant = invariant
        self.place = place = ServingRank(layout, dist.get_rank())
        self.stage = _group(place.stage_ranks, "stage")
        alone = place.tensor_ranks == place.stage_ranks
        self.tensor = self.stage if alone else _group(place.tensor_ranks, "tensor")
        self.pipeline = _group(place.pipeline_ranks, "pipeline")
        self._sending: tuple[Any, Tensor] | None = None

    @property
    def first(self) -> bool:
        """Whether it is the first of those that add up: the one to add the residual stream."""
        return self.place.tensor_index == 0

    @property
    def recordable(self) -> bool:
        """Whether its sums may be part of a CUDA graph: those of NCCL are kernels, those of gloo go through the host."""
        return "nccl" in dist.get_backend_config()

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over the tensor ranks."""
        if self.tensor is None or not x.numel():
            return x
        if self.invariant:
            found = x.new_empty(self.place.layout.tensor * len(x), *x.shape[1:])
            dist.all_gather_into_tensor(found, x.contiguous(), group=self.tensor)
            return x.copy_(in_order(list(found.split(len(x)))))
        dist.all_reduce(x, group=self.tensor)
        return x

    def add_up_experts(self, x: Tensor) -> Tensor:
        """The sum over the ranks of the stage."""
        if self.stage is not None and x.numel():
            dist.all_reduce(x, group=self.stage)
        return x

    def gather(self, logits: Tensor, vocab: int) -> Tensor:
        """Logits [rows, vocabulary] from each rank's part of the vocabulary."""
        if self.tensor is None or not len(logits):
            return logits if self.tensor is None else logits.new_empty(0, vocab)
        ranks = self.place.layout.tensor
        each = -(-vocab // ranks)
        if logits.shape[1] < each:
            logits = F.pad(logits, (0, each - logits.shape[1]))
        found = logits.new_empty(ranks, len(logits), each)
        dist.all_gather_into_tensor(found.view(-1, each), logits.contiguous(), group=self.tensor)
        return found.transpose(0, 1).flatten(1)[:, :vocab]

    def receive(self, into: Tensor) -> Tensor:
        """The residual stream [tokens, hidden] of the stage before."""
        irecv(into, self.place.pipeline_ranks[self.place.stage - 1], self.pipeline).wait()
        return into

    def send(self, x: Tensor) -> None:
        """Hand the residual stream [tokens, hidden] to the stage after. It is not to be written to any more."""
        if self._sending is not None:
            self._sending[0].wait()
        x = x.contiguous()
        self._sending = isend(x, self.place.pipeline_ranks[self.place.stage + 1], self.pipeline), x


def _group(members: Sequence[int], name: str) -> dist.ProcessGroup | None:
    """A group that only its members know of; None of one rank."""
    if len(members) == 1:
        return None
    return dist.new_group(list(members), group_desc=name, use_local_synchronization=True)


class AllReduceLinear(Linear):
    """A matrix of which this rank has some columns: what the ranks make of them is added up, and the bias added once."""

    add_up: AddUp

    @classmethod
    def from_linear(cls, linear: Linear, add_up: AddUp) -> Self:
        """In the place of a whole matrix."""
        made = cls.taking_over(linear)
        made.add_up = add_up
        return made

    def forward(self, x: Tensor) -> Tensor:
        out = self.add_up(self.gemm(x, self.weight, None))
        return out if self.bias is None else out + self.bias.to(x.dtype)


class AllReduceEmbedding(nn.Embedding):
    """An embedding of which this rank has some tokens: each looks up what it has."""

    def __init__(self, embedding: nn.Embedding, start: int, add_up: AddUp) -> None:
        """In the place of a whole embedding; `start` is the first token of this rank."""
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight, self.start, self.add_up = embedding.weight, start, add_up

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        known = (local >= 0) & (local < self.weight.shape[0])
        found = F.embedding(local * known, self.weight) if self.weight.shape[0] else self.weight.new_zeros(1)
        return self.add_up(torch.where(known[..., None], found, 0))


class ExpertShareMoE(MoE):
    """An MoE layer of which this rank has some experts, or some columns of each. It is given all tokens."""

    def __init__(self, moe: MoE, start: int, adds_shared: bool, add_up: AddUp) -> None:
        """In the place of a one-device layer, of its modules; `start` is the first expert here. One of the ranks that hold the same
        part of the shared experts `adds_shared`."""
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
        """Choices by the number that an expert has here; those of other ranks as the one after the last."""
        experts, local = self.experts.gate.shape[0], chosen - self.start
        return torch.where((local >= 0) & (local < experts) & (weights != 0), local, experts)

    def forward_routed(self, x: Tensor, weights: Tensor, chosen: Tensor, keys: Tensor | None = None) -> Tensor:
        """Each token [tokens, hidden] through those of its experts that are here, added up by weight."""
        if has_fused_kernels(x):
            places, counts = sort_by_expert(self.local_choices(weights, chosen), self.experts.gate.shape[0])
            return combine_weighted(self.experts(dispatch(x, places, chosen.numel()), counts), places, weights)
        return (self.choices_made(x, weights, chosen) * weights[..., None].to(x.dtype)).sum(dim=1)

    def choices_made(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """What the experts that are here make of each choice, [tokens, k, hidden]; 0 of those that are elsewhere."""
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
    """The same with the bits of one device: ranks exchange the results of single choices, which nobody else adds to. Experts are
    whole, and every rank computes the shared ones, or its columns of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen, auxiliary = self.router(x)
        out = self.forward_routed(x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1)).view_as(x)
        return (out if self.shared is None else out + self.shared(x)), auxiliary

    def forward_routed(self, x: Tensor, weights: Tensor, chosen: Tensor, keys: Tensor | None = None) -> Tensor:
        """Each token [tokens, hidden] through its experts, wherever they are, added up by weight in the order of its choices."""
        made = self.add_up(self.choices_made(x, weights, chosen))
        if has_fused_kernels(x):
            places = torch.arange(chosen.numel(), dtype=torch.int32, device=x.device).view_as(chosen)
            return combine_weighted(made.flatten(0, 1), places, weights)
        return self.combine(made, weights)


def build_share(
    config: ModelConfig, dtype: torch.dtype | None, layers: Sequence[range], peers: Peers, device: torch.device, read: Read
) -> Transformer:  # fmt: skip
    """This rank's part of a model that is served: of the layers of its stage, what its place gives it, filled by `read`."""
    place = peers.place
    stage, stages = place.stage, place.layout.pipeline
    model = make_stage(config, dtype, layers[stage], stage == 0, stage == stages - 1)
    for name, owner, leaf in _leaves(model):
        values = read(name, *place.box(_entry(config, name, owner, leaf)))
        if leaf in owner._parameters:
            owner.register_parameter(leaf, nn.Parameter(values, requires_grad=False))
        else:
            owner.register_buffer(leaf, values)
    for owner in model.modules():
        for leaf, buffer in list(owner.named_buffers(recurse=False)):
            if buffer.is_meta:  # not part of a checkpoint
                owner.register_buffer(leaf, torch.zeros_like(buffer, device=device), persistent=False)
    _put_on(model, peers)
    return model.eval()


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Every parameter and every buffer that is saved: its full name, the module that holds it, its name there."""
    found = []
    for path, owner in model.named_modules():
        saved = [leaf for leaf, _ in owner.named_buffers(recurse=False) if is_persistent(owner, leaf)]
        for leaf in [leaf for leaf, _ in owner.named_parameters(recurse=False)] + saved:
            found.append((f"{path}.{leaf}" if path else leaf, owner, leaf))
    return found


def _entry(config: ModelConfig, name: str, owner: nn.Module, leaf: str) -> Parameter:
    """The entry of a parameter, or of a buffer, which every rank holds whole."""
    if leaf in owner._parameters:
        return find_parameter(config, name)
    return Parameter(name, tuple(owner._buffers[leaf].shape), "router")  # type: ignore[union-attr]


def _put_on(model: Transformer, peers: Peers) -> None:
    """Let the modules that end in a sum over ranks do so."""
    place, config = peers.place, model.config
    if peers.tensor is not None and model.first and model.embed is not None:
        start = place.box(find_parameter(config, "embed.weight"))[0][0]
        model.embed = AllReduceEmbedding(model.embed, start, peers.add_up)
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
