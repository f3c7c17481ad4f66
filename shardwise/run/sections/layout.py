"""The section of a run that says how it is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from shardwise.run.axes import ASYNCHRONOUS, BIDIRECTIONAL, LOOPED, RANK_AXES, SPLIT_BACKWARD, V_SHAPED
from shardwise.run.sections.declare import key


@dataclass(frozen=True)
class LayoutConfig:
    """How the run is spread over ranks. World size = replicate x shard x context x tensor x pipeline."""

    replicate: int = key(1, "data-parallel replicas; each holds the whole model (DDP)", least=1)
    shard: int = key(
        1, "data-parallel ranks that share parameters, gradients and optimizer state in shards (ZeRO)", least=1
    )
    context: int = key(1, "ranks that split each sequence", least=1)
    tensor: int = key(1, "ranks that split each matrix", least=1)
    pipeline: int = key(1, "ranks that split the layers into stages", least=1)
    expert: int = key(
        1,
        "ranks that split the experts; it regroups shard x context (in serving also tensor) and adds no ranks",
        least=1,
    )
    zero: Literal[1, 2, 3] = key(
        3, "what is sharded over shard x context: 1: optimizer state; 2: also gradients; 3: also parameters"
    )
    prefetch: int = key(1, "ZeRO: how many layers ahead parameters are gathered", least=1)
    secondary_shard: int = key(
        1,
        "ZeRO-3: after the forward pass keep a second copy of the parameters, sharded over this many ranks; the backward pass "
        "gathers from it (hpZ of ZeRO++: the GPUs of a machine); 1: gather from all ranks again",
        least=1,
    )
    offload: bool = key(False, "ZeRO: keep parameters, gradients and optimizer state in CPU memory; GPUs only")
    context_method: Literal["ring", "ulysses", "gather"] = key(
        "ring", "how attention reaches the parts of a sequence on other ranks"
    )
    async_tensor: bool = key(False, "overlap tensor collectives with the GEMMs next to them, in chunks")
    expert_tensor: bool = key(False, "also split each expert over the tensor ranks")
    schedule: Literal[
        "gpipe", "1f1b", "bpipe", "interleaved", "breadth-first", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "dualpipe",
        "pipedream", "pipedream-2bw"
    ] = key("1f1b", "order of the pipeline's forward and backward passes; the pipedream schedules use stale weights")  # fmt: skip
    chunks: int = key(
        2, "interleaved, breadth-first: stages per pipeline rank (V-shaped schedules always have 2)", least=1
    )
    stages: tuple[int, ...] = key(
        (), "layers of each pipeline stage; the first and the last may have 0; empty: balanced by work"
    )
    recompute: Literal["none", "attention", "full", "operations", "budget", "optimal"] = key(
        "none", "what the backward pass recomputes instead of saving it (activation checkpointing)"
    )
    recompute_every: int = key(1, "attention, full, operations: recompute in every n-th layer", least=1)
    recompute_operations: tuple[str, ...] = key(
        (), 'operations: the parts of a layer to recompute: "attention", "norm", "ffn"'
    )
    recompute_budget: float = key(
        0.0, "budget, optimal: GiB that the layers of a rank may save per microbatch", least=0
    )

    compress: Literal["none", "int8", "fp8", "int4", "onebit", "powersgd", "topk"] = key(
        "none",
        "compress gradients between replicas: to 8 or 4 bits, to the signs of Adam's momentum (onebit: 1-bit Adam), to two "
        "low-rank factors (powersgd), or to the largest values (topk: Deep Gradient Compression); the last three feed errors back",
    )
    compress_warmup: int = key(
        0,
        "compress, sync_every: first steps that exchange uncompressed gradients in every step; onebit needs some",
        least=0,
    )
    compress_rank: int = key(4, "powersgd: rank of the factors", least=1)
    compress_density: float = key(0.01, "topk: share of the gradients to send", above=0, most=1)
    compress_momentum: float = key(
        0.0,
        "topk: momentum of the gradients that wait to be sent (momentum correction); 0: plain sums",
        least=0,
        most=0.99,
    )

    compress_weights: Literal["none", "int8", "fp8", "int4"] = key(
        "none", "compress parameters when they are gathered from shards (ZeRO++: int8)"
    )
    compress_shards: Literal["none", "int8", "fp8", "int4"] = key(
        "none", "compress gradients when they are reduced to shards (ZeRO++: int4)"
    )
    sync_every: int = key(
        1,
        "steps that each replica trains alone between two exchanges of weights (local SGD, DiLoCo); 1: exchange gradients in every "
        "step",
        least=1,
    )
    outer_optimizer: Literal["average", "nesterov"] = key(
        "nesterov",
        "sync_every: apply the replicas' mean change as it is (average: local SGD), or with Nesterov momentum (DiLoCo)",
    )
    outer_lr: float = key(0.7, "outer_optimizer = nesterov: its learning rate", above=0)
    outer_momentum: float = key(0.9, "outer_optimizer = nesterov: its momentum", least=0, most=0.99)
    sync_fragments: int = key(
        1,
        "sync_every: parts of the network that are exchanged at different steps (Streaming DiLoCo)",
        least=1,
    )
    sync_overlap: int = key(
        0,
        "sync_every: steps of training that overlap an exchange; its result is mixed into the weights when it arrives",
        least=0,
    )
    sync_mix: float = key(0.5, "sync_overlap: share of the replica's own weights in the mix", least=0, most=1)
    sync_elastic: bool = key(
        False,
        "sync_every: replicas may leave and join; the others go on without a dead replica, which rejoins with another's state",
    )

    auto: bool = key(
        False,
        'search for the best layout on the cluster; `layout = "auto"` does the same with every key of the layout free',
    )
    fixed: tuple[str, ...] = key(
        (), "auto: keys of this section that the search does not change; empty: all keys that are given"
    )

    @property
    def replicas_apart(self) -> bool:
        """Whether replicas exchange gradients by themselves, behind the passes, and not through PyTorch's wrappers."""
        return self.compress != "none" or self.sync_every > 1

    @property
    def sharding_replicas(self) -> int:
        """Replicas over which PyTorch's wrappers sum gradients; 1 where replicas exchange gradients by themselves."""
        return 1 if self.replicas_apart else self.replicate

    @property
    def uses_ddp(self) -> bool:
        """Whether ranks differ only in their samples: then DistributedDataParallel handles the parameters."""
        return self._is_replicated(self.world)

    def is_sharded(self, ranks: int, world: int | None = None) -> bool:
        """Whether `fully_shard` handles parameters that are sharded over this many ranks. All sizes may be arrays, then with the
        `world`, for tables of layouts leave some of them out."""
        several = (ranks > 1) | (self.sharding_replicas > 1) | self.offload
        return several & (self._is_replicated(self.world if world is None else world) ^ True)

    def _is_replicated(self, world: int) -> bool:
        return (self.sharding_replicas == world) & (world > 1) & (not self.offload)

    @property
    def one_replica(self) -> LayoutConfig:
        """What one replica is, where each is a world of its own."""
        alone = dict(replicate=1, sync_every=1, sync_fragments=1, sync_overlap=0, sync_elastic=False, compress="none")
        return replace(self, **alone)  # type: ignore[arg-type]

    @property
    def asynchronous(self) -> bool:
        """Whether passes use weights from before the last updates."""
        return self.schedule in ASYNCHRONOUS and self.pipeline > 1

    @property
    def expert_secondary_shard(self) -> int:
        """Ranks over which experts stay sharded until the next pass: those with the same ones among `secondary_shard`. Of arrays
        too."""
        return 1 + (self.secondary_shard // self.expert - 1) * (self.secondary_shard % self.expert == 0)

    @property
    def gathers_each_pass(self) -> bool:
        """Whether sharded parameters are gathered for every pass: with ZeRO-3, and where passes use different versions of them."""
        return self.zero == 3 or self.asynchronous

    @property
    def world(self) -> int:
        """Ranks in all."""
        return prod(getattr(self, axis) for axis in RANK_AXES)

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages each rank holds."""
        if self.schedule in LOOPED:
            return self.chunks
        return 1 + (self.pipeline > 1) if self.schedule in V_SHAPED else 1

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of every stage: round robin, or down the ranks and up again."""
        if self.schedule in V_SHAPED and self.pipeline > 1:
            return (*range(self.pipeline), *reversed(range(self.pipeline)))
        return tuple(stage % self.pipeline for stage in range(self.pipeline * self.stages_per_rank))

    @property
    def directions(self) -> int:
        """From how many ends of the pipeline microbatches enter. Stages are numbered along one direction, then the other."""
        return 1 + (self.pipeline > 1) if self.schedule in BIDIRECTIONAL else 1

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are deferred to their own actions, which a compiled layer can't do. One rank alone has no bubble
        to fill with them. The size of the pipeline may be an array, one entry per layout."""
        return (self.pipeline > 1) & (self.schedule in SPLIT_BACKWARD)

    @property
    def distinct_stages(self) -> int:
        """Parts that the layers are cut into: stages of one direction."""
        return self.pipeline * self.stages_per_rank // self.directions

    def has_ends(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage has the embedding, and whether it has the head."""
        place = stage % self.distinct_stages
        return place == 0, place == self.distinct_stages - 1

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard
