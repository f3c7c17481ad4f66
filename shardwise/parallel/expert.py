"""Expert parallelism: experts are divided over ranks, and tokens travel to their experts and back by all-to-all.

A rank holds 1/e of the experts. Traffic per rank, MoE layer and microbatch: dispatch sends the rows of its tokens whose experts are
on other ranks, combine sends back the rows it computed for others; backward does the same. With an even load that is four times
(tokens x k x hidden) x (e-1)/e elements, and one all-to-all of counts, (e-1)/e of `experts` int64. No token is dropped unless a
capacity is set: then each sequence sends an expert at most ceil(capacity x sequence x k / experts) tokens, the earliest ones,
whatever the layout.

With expert tensor parallelism the experts' inner width is cut over the tensor ranks too. The sequence is then all-gathered before
and reduce-scattered after, as for dense layers and in addition to the shared experts' own collectives. The k choices (int64) and
weights of each token are all-gathered with it; the weights' gradients are reduce-scattered. Without it, each tensor rank sends the
tokens of its shard of the sequence and holds its experts uncut; their gradients are all-reduced over the tensor ranks once a step
(`gradients.py`).

Where adapters of experts use dropout, each row's token number (int64) travels with the row, in the forward pass. Where the columns
of the experts' last matrix are cut over the tensor ranks, DoRA's norms of its rows are all-reduced over them.

Balance statistics cover whole sequences, so 2 x batch x experts elements are all-reduced over the ranks that share a sequence
(context x tensor), per MoE layer and microbatch; with a capacity the k choices (int64) of its tokens are all-gathered too. Once a
step the loads, MoE layers x experts in float32, are all-reduced over replicate, shard x context, and tensor.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.adapters import LowRankExperts
from shardwise.model.moe.layer import MoE, Router, dispatched_keys
from shardwise.model.moe.ops import combine, dispatch, has_fused_kernels, sort_by_expert
from shardwise.model.transformer import Block, Transformer
from shardwise.parallel.collectives import (
    Group,
    all_gather,
    all_gather_sequence,
    all_reduce_replicated,
    all_reduced,
    all_to_all,
    reduce_scatter_sequence,
)
from shardwise.parallel.context import zigzag_order
from shardwise.parallel.mesh import Mesh


class SequenceParallelRouter(Router):
    """A router that sees one shard of each sequence, and computes balance statistics over the full sequence."""

    def __init__(self, router: Router, sequence: Group, places: Tensor) -> None:
        """Replaces a one-device router. `places` holds the positions in the sequence of all ranks' tokens, rank after rank."""
        with torch.device("meta"):
            super().__init__(router.config)
        self.weight, self.load = router.weight, router.load
        if router.config.router == "sigmoid":
            self.bias = router.bias
        self.sequence = sequence
        self.places = places

    def over_sequence(self, counts: Tensor, probabilities: Tensor, length: int) -> tuple[Tensor, Tensor, int]:
        ranks = dist.get_world_size(self.sequence)
        counts = all_reduce_replicated(counts, self.sequence)
        return counts, all_reduce_replicated(probabilities, self.sequence), length * ranks

    def within_capacity(self, chosen: Tensor) -> Tensor:
        # Which tokens come first depends on the whole sequence: gather the choices, sort them, and take this rank's
        # back.
        everyone = all_gather(chosen, self.sequence, 1)
        order = self.places.to(chosen.device)
        whole = super().within_capacity(everyone.index_select(1, order.argsort()))
        return whole.index_select(1, order).chunk(dist.get_world_size(self.sequence), dim=1)[
            dist.get_rank(self.sequence)
        ]


class ExpertParallelMoE(MoE):
    """An MoE layer whose experts live on several ranks."""

    def __init__(self, moe: MoE, group: Group, tensor: Group, sequence: tuple[int, int]) -> None:
        """Replaces a one-device layer and reuses its modules; `group` divides the experts, `tensor` the width of each. This rank
        has one shard of each of its context rank's sequences: `sequence` is (index of the shard, number of shards)."""
        nn.Module.__init__(self)
        self.router, self.experts, self.shared = moe.router, moe.experts, moe.shared
        self.group = group
        self.tensor = tensor
        self.sequence = sequence
        if tensor is not None and isinstance(self.experts.lora, LowRankExperts):
            self.experts.lora.over_columns = partial(all_reduced, group=tensor)

    def own_tokens(self, keys: Tensor) -> Tensor:
        index, ranks = self.sequence
        return keys if self.tensor is not None else keys.chunk(ranks, dim=1)[index]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen, auxiliary = self.router(x)
        routed = all_gather_sequence(x, self.tensor)
        if self.tensor is not None:
            weights, chosen = all_gather_sequence(weights, self.tensor, again=False), all_gather(chosen, self.tensor, 1)
        flat = weights.flatten(0, 1), chosen.flatten(0, 1)
        out = self.forward_routed(routed.flatten(0, 1), *flat, self.token_keys()).view_as(routed)
        out = reduce_scatter_sequence(out, self.tensor)
        if self.shared is not None:
            out = out + self.shared(x if self.tensor is None else routed)
        return out, auxiliary

    def run_experts(self, rows: list[Tensor], counts: Tensor, keys: Tensor | None = None) -> Tensor:
        """Run rows sorted by expert through the experts, whichever rank holds them."""
        return super().run_experts(rows, counts, keys) if self.group is None else self._exchanged(rows, counts, keys)

    @torch.compiler.disable  # host sync: the counts are read here
    def _exchanged(self, given: list[Tensor], counts: Tensor, keys: Tensor | None) -> Tensor:
        # With 8 choices a token these are the largest tensors of a layer: each is freed when the next one is there.
        rows = given.pop()
        ranks = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        # The host must know the message sizes, so it waits for them once.
        both = torch.stack((counts, theirs)).view(2, ranks, -1).sum(dim=2)
        sent, received = self.experts.read_counts(both, len(rows))
        if sum(sent) < len(rows):  # the remaining rows belong to no expert
            rows, keys = rows[: sum(sent)], None if keys is None else keys[: sum(sent)]
        rows = all_to_all(rows, self.group, received, sent)
        if keys is not None:
            keys = all_to_all(keys, self.group, received, sent)
        # Rows arrive by rank and then expert; the experts want them by expert.
        owner = torch.arange(theirs.numel() // ranks, device=rows.device).repeat(ranks)
        owner = owner.repeat_interleave(theirs, output_size=len(rows))
        own = theirs.view(ranks, -1).sum(dim=0)
        if has_fused_kernels(rows):
            places, own = sort_by_expert(owner[:, None], len(own))
            keys = None if keys is None else dispatched_keys(keys, places, len(rows))
            rows = dispatch(rows, places, len(rows))
            rows = self.experts(rows, own, keys)
            rows = combine(rows, places)
        else:
            order = owner.argsort(stable=True)
            back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
            rows = rows.index_select(0, order)
            rows = self.experts(rows, own, None if keys is None else keys[order])
            rows = rows.index_select(0, back)
        return all_to_all(rows, self.group, sent, received)


def apply_expert(model: Transformer, mesh: Mesh, expert_tensor: bool, seq_len: int) -> None:
    """Divide the experts over ranks, and make routers count whole sequences."""
    for block in model.layers.values():
        assert isinstance(block, Block)
        moe = block.ffn
        if not isinstance(moe, MoE):
            continue
        if mesh.group("sequence") is not None:
            places = zigzag_order(seq_len, mesh.size("context"))
            moe.router = SequenceParallelRouter(moe.router, mesh.group("sequence"), places)
        tensor, sequence = mesh.group("tensor") if expert_tensor else None, (mesh.index("tensor"), mesh.size("tensor"))
        block.ffn = ExpertParallelMoE(moe, mesh.group("expert"), tensor, sequence)
