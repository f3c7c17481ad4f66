"""What must fit together in a run: what divides what, and why. Each rule names the keys it speaks of, so that a rule is
passed over when one of its keys could not even be read, and every broken rule is reported, not just the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.run.config import LayoutConfig, Run
from shardwise.run.derive import REPEATS_PARTS, must_launch, tunes_gemms
from shardwise.run.problems import nearest


class Broken(NamedTuple):
    """A broken rule: the key a user would most likely change, the other keys it speaks of, and the reason."""

    key: str
    others: tuple[str, ...]
    reason: str


def _divisors(n: int, most: int = 8) -> str:
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found[:most])) + (", …" if len(found) > most else "")


def broken_rules(run: Run) -> Iterator[Broken]:
    """Every rule the resolved run breaks."""
    yield from _model_rules(run)
    if run.layout.auto:
        yield from _search_rules(run)
    else:
        yield from _layout_rules(run)
        yield from _batch_rules(run)
    if run.train.warmup > run.train.steps:
        reason = f"{run.train.warmup} is more than train.steps = {run.train.steps}"
        yield Broken("train.warmup", ("train.steps",), reason)
    for name in ("beta1", "beta2", "muon_momentum"):
        if getattr(run.train, name) >= 1:
            yield Broken(f"train.{name}", (), "has to be below 1: at 1 nothing new is ever taken in")
    yield from _fp8_rules(run)
    yield from _data_rules(run)


def _fp8_rules(run: Run) -> Iterator[Broken]:
    if run.train.fp8 == "none":
        return
    if run.train.dtype != "bfloat16":
        reason = f'{run.train.dtype} arithmetic goes with "none" alone: fp8 GEMMs give bfloat16'
        yield Broken("train.fp8", ("train.dtype",), reason)
    if run.layout.async_tensor:
        reason = "multiplies chunks as they arrive, in 16 bits, while an fp8 scale needs the whole; use one of the two"
        yield Broken("layout.async_tensor", ("train.fp8",), reason)


def _search_rules(run: Run) -> Iterator[Broken]:
    known = {name for name in LayoutConfig.__dataclass_fields__ if name not in ("auto", "fixed")}
    for word in run.layout.fixed:
        if word not in known:
            yield Broken("layout.fixed", (), f'"{word}" is not a key of this section{nearest(word, known)}')
    if not run.cluster.chip:
        yield Broken("cluster.chip", ("layout.auto",), "a search needs to know the chip, and how many: cluster.nodes")


def _model_rules(run: Run) -> Iterator[Broken]:
    m = run.model
    if m.attention == "grouped":
        if m.hidden % m.heads and m.head_dim == m.hidden // m.heads:  # a derived width, rounded down
            yield Broken(
                "model.heads",
                ("model.hidden",),
                f"{m.heads} heads do not divide hidden = {m.hidden}; {_divisors(m.hidden)} would do, or give model.head_dim",
            )
        if m.heads % m.kv_heads:
            yield Broken(
                "model.kv_heads",
                ("model.heads",),
                f"{m.kv_heads} does not divide heads = {m.heads}: each key/value head serves the same number of query heads; "
                f"{_divisors(m.heads)} would do",
            )
        if m.position == "rotary" and m.head_dim % 2:
            yield Broken(
                "model.head_dim",
                ("model.hidden", "model.heads"),
                f"rotary positions rotate pairs of features, and a head of {m.head_dim} is odd",
            )
    else:
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            if not getattr(m, name):
                yield Broken(f"model.{name}", ("model.attention",), "latent attention needs this size; it is 0")
        if m.rope_dim % 2:
            yield Broken("model.rope_dim", (), f"rotary positions rotate pairs of features, and {m.rope_dim} is odd")
        if m.position != "rotary" or m.qk_norm or m.bias != "none":
            yield Broken(
                "model.attention",
                ("model.position", "model.qk_norm", "model.bias"),
                'latent attention goes with position = "rotary", bias = "none" and no qk_norm',
            )
    if m.experts:
        if not 1 <= m.experts_per_token <= m.experts:
            yield Broken(
                "model.experts_per_token",
                ("model.experts",),
                f"{m.experts_per_token} is not between 1 and experts = {m.experts}",
            )
        if m.dense_layers > m.layers:
            yield Broken("model.dense_layers", ("model.layers",), f"{m.dense_layers} is more than layers = {m.layers}")
        if m.experts % m.router_groups:
            yield Broken(
                "model.router_groups",
                ("model.experts",),
                f"{m.router_groups} groups do not divide experts = {m.experts}; {_divisors(m.experts)} would do",
            )
        elif m.router_top_groups > m.router_groups:
            yield Broken(
                "model.router_top_groups",
                ("model.router_groups",),
                f"{m.router_top_groups} is more than router_groups = {m.router_groups}",
            )
        elif m.experts_per_token > m.router_top_groups * (m.experts // m.router_groups):
            yield Broken(
                "model.experts_per_token",
                ("model.experts", "model.router_groups", "model.router_top_groups"),
                f"{m.experts_per_token} experts cannot be chosen from {m.router_top_groups} groups of "
                f"{m.experts // m.router_groups}",
            )
        if m.activation != "swiglu" or m.bias == "all":
            yield Broken(
                "model.experts",
                ("model.activation", "model.bias"),
                "experts are swiglu layers without biases",
            )
    else:
        for name in ("experts_per_token", "shared_experts", "dense_layers"):
            if getattr(m, name):
                yield Broken(f"model.{name}", ("model.experts",), "has no meaning while model.experts is 0")
    if m.position == "learned" and run.train.seq_len > m.max_positions:
        yield Broken(
            "train.seq_len",
            ("model.max_positions",),
            f"{run.train.seq_len} is longer than the learned table of model.max_positions = {m.max_positions}",
        )


def _layout_rules(run: Run) -> Iterator[Broken]:
    m, lay, train = run.model, run.layout, run.train
    if m.heads % lay.tensor:
        yield Broken(
            "layout.tensor",
            ("model.heads",),
            f"{lay.tensor} does not divide model.heads = {m.heads}: each rank holds whole heads; {_divisors(m.heads)} would do",
        )
    elif m.attention == "grouped" and m.kv_heads % lay.tensor and lay.tensor % m.kv_heads:
        yield Broken(
            "layout.tensor",
            ("model.kv_heads",),
            f"{lay.tensor} and model.kv_heads = {m.kv_heads} do not divide each other: key/value heads are either split "
            f"evenly or copied evenly over the ranks",
        )
    widths = {"model.ffn": m.ffn} if not m.experts or m.dense_layers else {}
    if m.experts and lay.expert_tensor and m.expert_ffn % lay.tensor:
        yield Broken(
            "layout.expert_tensor",
            ("layout.tensor", "model.expert_ffn"),
            f"layout.tensor = {lay.tensor} does not divide model.expert_ffn = {m.expert_ffn}",
        )
    if m.experts and m.shared_experts:
        widths["model.expert_ffn"] = m.expert_ffn * m.shared_experts
    for name, width in widths.items():
        if width % lay.tensor:
            yield Broken(
                "layout.tensor",
                (name,),
                f"{lay.tensor} does not divide the feed-forward width {width} ({name}): each rank holds equal columns",
            )
    if lay.tensor > 1 and train.seq_len % (lay.tensor * lay.context):
        yield Broken(
            "train.seq_len",
            ("layout.tensor", "layout.context"),
            f"{train.seq_len} is not a multiple of layout.tensor x layout.context = {lay.tensor * lay.context}: between the "
            f"matrices each rank keeps an equal part of the sequence",
        )
    if lay.context > 1 and train.seq_len % (2 * lay.context):
        yield Broken(
            "train.seq_len",
            ("layout.context",),
            f"{train.seq_len} is not a multiple of 2 x layout.context = {2 * lay.context}: each rank takes one chunk from the "
            f"front and one from the back, so that causal work is even",
        )
    stages = lay.pipeline * lay.stages_per_rank
    if stages > m.layers:
        yield Broken(
            "layout.pipeline",
            ("model.layers", "layout.schedule", "layout.chunks"),
            f"{lay.pipeline} ranks with {lay.stages_per_rank} stages each for model.layers = {m.layers}: each stage needs at "
            f"least one layer",
        )
    if lay.stages and (len(lay.stages) != stages or sum(lay.stages) != m.layers or min(lay.stages) < 1):
        yield Broken(
            "layout.stages",
            ("layout.pipeline", "layout.schedule", "layout.chunks", "model.layers"),
            f"{list(lay.stages)} must be {stages} numbers above 0 that add up to model.layers = {m.layers}",
        )
    if lay.context > 1 and lay.context_method == "ulysses" and m.heads % (lay.tensor * lay.context):
        yield Broken(
            "layout.context",
            ("layout.tensor", "model.heads", "layout.context_method"),
            f"model.heads = {m.heads} is not a multiple of layout.tensor x layout.context = {lay.tensor * lay.context}: ulysses "
            f"deals whole heads out; ring and gather do not",
        )
    unknown = [word for word in lay.recompute_operations if word not in ("attention", "norm", "ffn")]
    if unknown or (lay.recompute == "operations") != bool(lay.recompute_operations):
        yield Broken(
            "layout.recompute_operations",
            ("layout.recompute",),
            'names parts of a layer ("attention", "norm", "ffn") when layout.recompute is "operations", and nothing otherwise',
        )
    if lay.async_tensor and lay.recompute == "operations" and "ffn" in lay.recompute_operations:
        yield Broken(
            "layout.async_tensor",
            ("layout.recompute", "layout.recompute_operations"),
            'gathers the sequence outside of the feed-forward layer, which recompute_operations = "ffn" recomputes alone; use '
            'recompute = "full", or leave "ffn" out',
        )
    if train.compile is True and lay.recompute in REPEATS_PARTS:
        yield Broken(
            "train.compile",
            ("layout.recompute",),
            f'compiles whole layers, and layout.recompute = "{lay.recompute}" recomputes a part of one; use "full" or "none"',
        )
    reason = must_launch(run, gpu=train.device != "cpu")
    if train.cuda_graph is True and reason:
        others = ("train.dtype", "train.device", "layout.offload")
        yield Broken("train.cuda_graph", others, f"these steps can't be replayed: {reason}; use auto")
    if train.tune_products is True and not tunes_gemms(run, gpu=train.device != "cpu"):
        why = "finds algorithms for one GPU that computes in 16 bits; use auto"
        yield Broken("train.tune_products", ("train.dtype", "train.device"), why)
    if (lay.recompute == "budget") != (lay.recompute_budget > 0):
        yield Broken(
            "layout.recompute_budget",
            ("layout.recompute",),
            'is above 0 when layout.recompute is "budget", and 0 otherwise',
        )
    if train.loss == "chunked" and lay.tensor > 1:
        reason = f"the vocabulary is cut over layout.tensor = {lay.tensor} ranks already; use auto or plain"
        yield Broken("train.loss", ("layout.tensor",), reason)
    if lay.offload and train.device == "cpu":
        yield Broken(
            "layout.offload", ("train.device",), "moves things from a GPU to the CPU; on a CPU they are there already"
        )
    if lay.expert > 1:
        if not m.experts:
            yield Broken("layout.expert", ("model.experts",), f"{lay.expert} ranks of experts, but the model has none")
        elif m.experts % lay.expert:
            yield Broken(
                "layout.expert",
                ("model.experts",),
                f"{lay.expert} does not divide model.experts = {m.experts}: each rank holds whole experts; "
                f"{_divisors(m.experts)} would do",
            )
        if (lay.shard * lay.context) % lay.expert:
            yield Broken(
                "layout.expert",
                ("layout.shard", "layout.context"),
                f"{lay.expert} does not divide layout.shard x layout.context = {lay.shard * lay.context}: experts regroup "
                f"those ranks and add none",
            )


def _batch_rules(run: Run) -> Iterator[Broken]:
    lay, train, cluster = run.layout, run.train, run.cluster
    share = train.microbatch * lay.data_ranks
    if train.global_batch % share:
        yield Broken(
            "train.global_batch",
            ("train.microbatch", "layout.replicate", "layout.shard"),
            f"{train.global_batch} is not a multiple of train.microbatch x layout.replicate x layout.shard = "
            f"{train.microbatch} x {lay.replicate} x {lay.shard} = {share}: every rank runs the same number of microbatches",
        )
    if cluster.devices_per_node == -(-lay.world // cluster.nodes) and lay.world % cluster.nodes:
        axes = tuple(f"layout.{axis}" for axis in ("replicate", "shard", "context", "tensor", "pipeline"))
        reason = f"the {lay.world} ranks of the layout do not divide over {cluster.nodes} nodes"
        yield Broken("cluster.nodes", ("cluster.devices_per_node", *axes), reason)
    elif cluster.nodes * cluster.devices_per_node != lay.world:
        yield Broken(
            "cluster.devices_per_node",
            (
                "cluster.nodes",
                *(f"layout.{axis}" for axis in ("replicate", "shard", "context", "tensor", "pipeline")),
            ),
            f"{cluster.nodes} nodes x {cluster.devices_per_node} devices are not the {lay.world} ranks of the layout "
            f"(replicate x shard x context x tensor x pipeline)",
        )


def _data_rules(run: Run) -> Iterator[Broken]:
    data = run.data
    if data.weights and len(data.weights) != len(data.sets):
        yield Broken("data.weights", ("data.sets",), f"{len(data.weights)} weights for {len(data.sets)} sets")
    if data.weights and not (min(data.weights) >= 0 and sum(data.weights) > 0):
        yield Broken("data.weights", (), "weights must not be negative, and one must be above 0")
