"""The section of a run that says how it is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from shardwise.run.axes import ASYNCHRONOUS, BIDIRECTIONAL, LOOPED, RANK_AXES, V_SHAPED
from shardwise.run.sections.declare import key


@dataclass(frozen=True)
class LayoutConfig:
    """How the run is spread over ranks. World size = replicate x shard x context x tensor x pipeline."""

    replicate: int = key(1, "data-parallel replicas that hold everything (DDP)", least=1)
    shard: int = key(1, "data-parallel ranks that parameters, gradients and optimizer are sharded over (ZeRO)", least=1)
    context: int = key(1, "ranks a sequence is cut over", least=1)
    tensor: int = key(1, "ranks each matrix is cut over", least=1)
    pipeline: int = key(1, "stages the layers are cut into", least=1)
    expert: int = key(
        1,
        "ranks the experts are spread over; regroups shard x context (of a server tensor too), adds no ranks",
        least=1,
    )
    zero: Literal[1, 2, 3] = key(
        3, "what is sharded over shard x context ranks: 1 optimizer, 2 and gradients, 3 and parameters"
    )
    prefetch: int = key(1, "ZeRO: layers whose parameters are gathered ahead of their use", least=1)
    secondary_shard: int = key(
        1,
        "ZeRO-3: ranks over which the layers of a forward pass stay sharded until its backward pass, which then gathers from these "
        "alone (ZeRO++'s hpZ: those of a machine); 1: over all",
        least=1,
    )
    offload: bool = key(False, "ZeRO: keep parameters, gradients and optimizer in the CPU's memory; GPUs only")
    context_method: Literal["ring", "ulysses", "gather"] = key(
        "ring", "how attention sees the other ranks' part of a sequence"
    )
    async_tensor: bool = key(False, "overlap tensor collectives with the GEMMs beside them, in chunks")
    expert_tensor: bool = key(False, "cut each expert's width over the tensor ranks too")
    schedule: Literal[
        "gpipe", "1f1b", "bpipe", "interleaved", "breadth-first", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "dualpipe",
        "pipedream", "pipedream-2bw"
    ] = key("1f1b", "order of the pipeline's microbatches; the last two use weights from before the last updates")  # fmt: skip
    chunks: int = key(2, "interleaved, breadth-first: stages on each pipeline rank (the V-shaped ones have 2)", least=1)
    stages: tuple[int, ...] = key(
        (), "layers of each pipeline stage; the first and last may have 0. Empty: balanced by their work"
    )
    recompute: Literal["none", "attention", "full", "operations", "budget", "optimal"] = key(
        "none", "what is recomputed in the backward pass instead of saved (activation checkpointing)"
    )
    recompute_every: int = key(1, "attention, full, operations: every how many layers", least=1)
    recompute_operations: tuple[str, ...] = key(
        (), 'operations: parts of a layer to recompute, of "attention", "norm", "ffn"'
    )
    recompute_budget: float = key(
        0.0, "budget, optimal: GiB that the layers of a rank may save of a microbatch", least=0
    )

    compress: Literal["none", "int8", "fp8", "int4", "onebit", "powersgd", "topk"] = key(
        "none",
        "how gradients travel between replicas: in 8 or 4 bits, as signs of Adam's momentum (1-bit Adam), as two factors of low "
        "rank (PowerSGD), or the largest alone (top-k, as Deep Gradient Compression); the last three keep what was not sent",
    )
    compress_warmup: int = key(
        0,
        "compress, sync_every: first steps in which gradients travel as they are, in every step; onebit needs some",
        least=0,
    )
    compress_rank: int = key(4, "powersgd: rank of the factors", least=1)
    compress_density: float = key(0.01, "topk: share of the gradients that is sent", above=0, most=1)
    compress_momentum: float = key(
        0.0,
        "topk: momentum of what is accumulated before it is sent (momentum correction); 0: plain sums",
        least=0,
        most=0.99,
    )

    compress_frozen: bool = key(
        False,
        "powersgd, topk: behind the warm-up Adam's second moment stands still and nothing is clipped, as onebit has it: what was "
        "kept back then counts as much when it comes late",
    )

    compress_weights: Literal["none", "int8", "fp8", "int4"] = key(
        "none", "how parameters travel between shards as they are gathered (ZeRO++: int8)"
    )
    compress_shards: Literal["none", "int8", "fp8", "int4"] = key(
        "none", "how gradients travel between shards as they are reduced (ZeRO++: int4)"
    )
    sync_every: int = key(
        1,
        "steps that replicas train by themselves between two exchanges of what they learned (local SGD, DiLoCo); 1: gradients in "
        "every step",
        least=1,
    )
    outer_optimizer: Literal["average", "nesterov"] = key(
        "nesterov",
        "sync_every: how the replicas' mean change is applied: as it is (local SGD), or by Nesterov (DiLoCo)",
    )
    outer_lr: float = key(0.7, "outer_optimizer = nesterov: its learning rate", above=0)
    outer_momentum: float = key(0.9, "outer_optimizer = nesterov: its momentum", least=0, most=0.99)
    sync_fragments: int = key(
        1,
        "sync_every: parts of the network, layers in turn, that are exchanged at different steps (Streaming DiLoCo)",
        least=1,
    )
    sync_overlap: int = key(
        0, "sync_every: steps that an exchange may take while training goes on; what arrives is mixed in", least=0
    )
    sync_mix: float = key(0.5, "sync_overlap: share of the replica's own weights in that mixture", least=0, most=1)
    sync_elastic: bool = key(
        False,
        "sync_every: replicas may come and go; one that dies is left out of the exchanges, and rejoins with the state of another",
    )

    auto: bool = key(
        False,
        'search for the best layout on the cluster\'s devices; `layout = "auto"` says the same, nothing else fixed',
    )
    fixed: tuple[str, ...] = key((), "auto: keys of this section that the search leaves alone; empty: those given")

    @property
    def replicas_apart(self) -> bool:
        """Whether replicas exchange gradients by themselves, behind the passes, and not through PyTorch's wrappers."""
        return self.compress != "none" or self.sync_every > 1

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
    def directions(self) -> int:
        """From how many ends of the pipeline microbatches enter. Stages are numbered along one direction, then the other."""
        return 1 + (self.pipeline > 1) if self.schedule in BIDIRECTIONAL else 1

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
