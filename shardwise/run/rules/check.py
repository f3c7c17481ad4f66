"""Consistency rules of a run: which sizes must divide which, and why.

Each rule names the keys it involves, so that it is skipped if one of them could not even be read, and every broken rule is
reported, not just the first. Conditions are arithmetic: sizes of the layout and the microbatch may be arrays, and then a rule
reports for every layout whether it is broken. The search evaluates them this way (`plan/search/space.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

from shardwise.run.axes import ASYNCHRONOUS, RANK_AXES
from shardwise.run.config import Run
from shardwise.run.derive import must_launch, tunes_gemms
from shardwise.run.problems import counted, nearest
from shardwise.run.rules.adapter import adapter_layout_rules, adapter_rules
from shardwise.run.rules.compress import compress_rules
from shardwise.run.rules.memory import memory_rules, recompute_rules
from shardwise.run.rules.objective import grpo_rules, objective_rules, sample_rules
from shardwise.run.rules.rule import Broken, Rule
from shardwise.run.rules.schedule import schedule_rules
from shardwise.run.rules.second_models import speculation_rules, teacher_layout_rules, teacher_rules
from shardwise.run.sections.layout import LayoutConfig
from shardwise.run.weights import head_rule

MOST_ELEMENTS, MOST_TOKENS = 2**58, 2**48
"""Most elements of a tensor, so that its bytes fit in 64 bits; most tokens of a step."""


def broken_rules(run: Run, serves: bool = False) -> Iterator[Broken]:
    """Every rule the resolved run breaks; if it `serves`, its layout has other rules than in training."""
    laid_out = _search_rules(run) if run.layout.auto else chain(layout_rules(run), batch_rules(run))
    if serves and not run.layout.auto:
        laid_out = serving_rules(run)
    own = chain(
        _model_rules(run),
        _size_rules(run),
        _train_rules(run),
        objective_rules(run),
        grpo_rules(run),
        teacher_rules(run),
        fp8_rules(run),
        _data_rules(run),
        _cluster_rules(run),
    )
    for rule in chain(laid_out, own, adapter_rules(run)):
        if rule.broken:
            yield Broken(rule.key, rule.others, rule.reason())


def _divisors(n: int, most: int = 8) -> str:
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found[:most])) + (", …" if len(found) > most else "")


# fmt: off
# A rule is two or three lines: the condition that breaks it and the keys, then the reason.


def _train_rules(run: Run) -> Iterator[Rule]:
    train = run.train
    yield Rule(train.warmup > train.steps, "train.warmup", ("train.steps",),
               lambda: f"{train.warmup} is more than train.steps = {train.steps}")
    for name in ("beta1", "beta2", "muon_momentum"):
        yield Rule(getattr(train, name) >= 1, f"train.{name}", (),
                   lambda: "must be below 1: at 1 it would never change")


def fp8_rules(run: Run) -> Iterator[Rule]:
    """What fp8 GEMMs are compatible with."""
    fp8 = run.train.fp8 != "none"
    yield Rule(fp8 and run.train.dtype != "bfloat16", "train.fp8", ("train.dtype",),
               lambda: f"fp8 GEMMs need train.dtype = bfloat16, not {run.train.dtype}")
    yield Rule(fp8 and run.layout.async_tensor, "layout.async_tensor", ("train.fp8",),
               lambda: "does not go with train.fp8: it multiplies slices, and an fp8 scale needs the tensor; use one of the two")


def invariant_rules(run: Run) -> Iterator[Rule]:
    """What `train.invariant` is compatible with. The sizes of the layout may be arrays."""
    train, lay = run.train, run.layout
    if not train.invariant:
        return
    for name, other in (("tensor", "adds sums over ranks"), ("context", "splits a sequence")):
        yield Rule(getattr(lay, name) > 1, "train.invariant", (f"layout.{name}",), partial(
            "gives the bits of one device, but layout.{} = {} {}; set it to 1".format, name, getattr(lay, name), other
        ))
    yield Rule(train.fp8 != "none", "train.invariant", ("train.fp8",),
               lambda: "does not support fp8: its scales depend on the batch")
    yield Rule(train.compile is True, "train.invariant", ("train.compile",),
               lambda: "cannot be compiled: a compiler may change the order of sums; use auto")
    yield Rule(train.loss == "chunked", "train.invariant", ("train.loss",),
               lambda: "does not support the chunked loss; use auto or plain")
    yield Rule(bool(run.model.expert_capacity), "train.invariant", ("model.expert_capacity",),
               lambda: "does not go with model.expert_capacity: which tokens an expert drops depends on the batch; set it to 0")


def _search_rules(run: Run) -> Iterator[Rule]:
    known = {name for name in LayoutConfig.__dataclass_fields__ if name not in ("auto", "fixed")}
    for word in run.layout.fixed:
        reason = partial('"{}" is not a key of this section{}'.format, word, nearest(word, known))
        yield Rule(word not in known, "layout.fixed", (), reason)
    asynchronous = "schedule" in run.layout.fixed and run.layout.schedule in ASYNCHRONOUS
    yield Rule(asynchronous, "layout.schedule", ("layout.auto",), lambda: (
        f"{run.layout.schedule} trains with stale weights, so the search does not compare it with other schedules; "
        f"give the whole layout"
    ))
    yield Rule(run.layout.recompute == "optimal", "layout.auto", ("layout.recompute",), lambda: (
        'the search does not try layout.recompute = "optimal"; search with "budget", then set "optimal" in the layout it finds'
    ))
    yield Rule(not run.cluster.chip, "cluster.chip", ("layout.auto",),
               lambda: "a search needs the chip, and cluster.nodes for how many")


def _model_rules(run: Run) -> Iterator[Rule]:
    m = run.model
    if m.attention == "grouped":
        derived = m.head_dim == m.hidden // m.heads  # rounded down
        yield Rule(m.hidden % m.heads and derived, "model.heads", ("model.hidden",), lambda: (
            f"{m.heads} heads do not divide hidden = {m.hidden}; {_divisors(m.hidden)} would do, or give model.head_dim"
        ))
        yield Rule(m.heads % m.kv_heads, "model.kv_heads", ("model.heads",), lambda: (
            f"{m.kv_heads} does not divide heads = {m.heads}: each key/value head serves the same number of query heads; "
            f"{_divisors(m.heads)} would do"
        ))
        yield Rule(m.position == "rotary" and m.head_dim % 2, "model.head_dim", ("model.hidden", "model.heads"),
                   lambda: f"RoPE rotates pairs of elements, so it must be even; {m.head_dim} is odd")
        rotated = int(m.rope_share * m.head_dim)
        yield Rule(m.position == "rotary" and (rotated % 2 or not rotated), "model.rope_share", ("model.head_dim",),
                   lambda: f"RoPE rotates pairs of elements; {rotated} of {m.head_dim} elements is not an even number above 0")
    else:
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            yield Rule(not getattr(m, name), f"model.{name}", ("model.attention",),
                       lambda: "latent attention needs this size, and it is 0; set it")
        yield Rule(m.rope_share != 1.0, "model.rope_share", ("model.attention",),
                   lambda: "latent attention rotates all of its rope_dim elements; leave it at 1")
        yield Rule(m.rope_dim % 2, "model.rope_dim", (),
                   lambda: f"RoPE rotates pairs of elements, so it must be even; {m.rope_dim} is odd")
        other = m.position != "rotary" or m.qk_norm or m.bias != "none"
        yield Rule(other, "model.attention", ("model.position", "model.qk_norm", "model.bias"),
                   lambda: 'latent attention needs position = "rotary", bias = "none" and qk_norm = false')
    yield Rule(0 < run.serve.rate < 1e-9, "serve.rate", (), lambda: f"{run.serve.rate} is less than one request in 30 years")
    yield Rule(m.position == "alibi" and run.serve.kv_dtype == "fp8", "serve.kv_dtype", ("model.position",),
               lambda: "fp8 cannot hold the positions that ALiBi stores with the keys; use auto")
    if m.experts:
        yield from _expert_rules(run)
    else:
        for name in ("experts_per_token", "shared_experts", "dense_layers"):
            yield Rule(getattr(m, name), f"model.{name}", ("model.experts",),
                       lambda: "has no meaning while model.experts is 0")
    length = run.train.seq_len
    yield Rule(m.position == "learned" and length > m.max_positions, "train.seq_len", ("model.max_positions",),
               lambda: f"{length} is longer than the learned table of model.max_positions = {m.max_positions}")


def _size_rules(run: Run) -> Iterator[Rule]:
    """Limits on the sizes of tensors and counts."""
    m, train = run.model, run.train
    widths = {
        "model.ffn": m.ffn, "model.vocab": m.vocab, "model.heads": m.heads * max(m.head_dim, m.value_dim),
        "model.experts": m.experts * m.expert_ffn * max(1, m.shared_experts), "model.max_positions": m.max_positions,
    }
    for name, width in widths.items():
        reason = partial("{:,} x {:,} ({}) is more than 2^58 elements, too many for a tensor".format, m.hidden, width, name)
        yield Rule(m.hidden * width > MOST_ELEMENTS, "model.hidden", (name,), reason)
    yield Rule(train.global_batch * train.seq_len > MOST_TOKENS, "train.global_batch", ("train.seq_len",), lambda: (
        f"{train.global_batch:,} x train.seq_len = {train.seq_len:,} is more than 2^48 tokens per step; use fewer"
    ))


def _cluster_rules(run: Run) -> Iterator[Rule]:
    for name in ("hbm_gbs", "intra_gbs", "inter_gbs", "power_w"):
        reason = partial("{:g} is too small; use 0 for the usual value".format, getattr(run.cluster, name))
        yield Rule(0 < getattr(run.cluster, name) < 1e-3, f"cluster.{name}", (), reason)


def _expert_rules(run: Run) -> Iterator[Rule]:
    m, chosen, groups = run.model, run.model.experts_per_token, run.model.router_groups
    yield Rule(not 1 <= chosen <= m.experts, "model.experts_per_token", ("model.experts",),
               lambda: f"{chosen} is not between 1 and experts = {m.experts}")
    yield Rule(m.dense_layers > m.layers, "model.dense_layers", ("model.layers",),
               lambda: f"{m.dense_layers} is more than layers = {m.layers}")
    if m.experts % groups:
        yield Rule(True, "model.router_groups", ("model.experts",),
                   lambda: f"{groups} groups do not divide experts = {m.experts}; {_divisors(m.experts)} would do")
    elif m.router_top_groups > groups:
        yield Rule(True, "model.router_top_groups", ("model.router_groups",),
                   lambda: f"{m.router_top_groups} is more than router_groups = {groups}")
    else:
        others = ("model.experts", "model.router_groups", "model.router_top_groups")
        each = m.experts // groups
        yield Rule(chosen > m.router_top_groups * each, "model.experts_per_token", others,
                   lambda: f"{chosen} is more than the {m.router_top_groups} x {each} experts in model.router_top_groups groups")
    yield Rule(m.activation != "swiglu" or m.bias == "all", "model.experts", ("model.activation", "model.bias"),
               lambda: "experts need activation = swiglu and bias = none or qkv")


def layout_rules(run: Run) -> Iterator[Rule]:
    """Rules between network and layout. The sizes of the layout may be arrays."""
    yield from _tensor_rules(run)
    yield from _pipeline_rules(run)
    yield from schedule_rules(run)
    yield from recompute_rules(run)
    yield from invariant_rules(run)
    yield from memory_rules(run)
    yield from sample_rules(run)
    yield from adapter_layout_rules(run)
    yield from teacher_layout_rules(run, layout_rules)
    yield from compress_rules(run)
    lay, train = run.layout, run.train
    gpu, alone = train.device != "cpu", replace(run, layout=LayoutConfig(offload=lay.offload))
    if train.cuda_graph is True:
        others = ("train.dtype", "train.device", "layout.offload")
        yield Rule((lay.world > 1) | bool(must_launch(alone, gpu=gpu)), "train.cuda_graph", others,
                   lambda: f"these steps cannot be recorded as a CUDA graph: {must_launch(run, gpu=gpu)}; use auto")
    if train.tune_products is True:
        yield Rule((lay.world > 1) | (not tunes_gemms(alone, gpu=gpu)), "train.tune_products", ("train.dtype", "train.device"),
                   lambda: "works only on one GPU in 16 bits; use auto")
    yield Rule(lay.offload and not gpu, "layout.offload", ("train.device",),
               lambda: "keeps a GPU's state in CPU memory; without a GPU turn it off")
    yield _whole_experts(run)
    ranks = lay.shard * lay.context
    yield Rule(ranks % lay.expert > 0, "layout.expert", ("layout.shard", "layout.context"), lambda: (
        f"{lay.expert} does not divide layout.shard x layout.context = {ranks}: experts regroup those ranks and add none"
    ))


def _whole_experts(run: Run) -> Rule:
    m, lay = run.model, run.layout
    if not m.experts:
        return Rule(lay.expert > 1, "layout.expert", ("model.experts",),
                    lambda: f"{lay.expert} ranks of experts, but the model has none")
    return Rule(m.experts % lay.expert > 0, "layout.expert", ("model.experts",), lambda: (
        f"{lay.expert} does not divide model.experts = {m.experts}: each rank holds whole experts; {_divisors(m.experts)} would do"
    ))


def serving_rules(run: Run) -> Iterator[Rule]:
    """Rules between network and layout when the model is served (`served.py`)."""
    m, lay = run.model, run.layout
    yield from _width_rules(run)
    yield from _stage_rules(run)
    yield from speculation_rules(run)
    yield head_rule(run)
    devices = run.cluster.nodes * run.cluster.devices_per_node  # 0: as many as the layout needs
    most = max(RANK_AXES, key=lambda axis: getattr(lay, axis))
    others = ("cluster.nodes", "cluster.devices_per_node", *(f"layout.{axis}" for axis in RANK_AXES))
    yield Rule(0 < devices < lay.world, f"layout.{most}", others, lambda: (
        f"the layout has {counted(lay.world, 'rank')} (replicate x shard x context x tensor x pipeline), and the cluster "
        f"{counted(devices, 'device')}"
    ))
    data, ranks = lay.shard * lay.context, lay.shard * lay.context * lay.tensor
    yield Rule(lay.expert % data > 0, "layout.shard" if lay.shard > 1 else "layout.context", ("layout.expert",), lambda: (
        f"in serving, shard x context ({data}) only splits experts, and layout.expert = {lay.expert} is not a multiple of it; use "
        "layout.tensor to split matrices, layout.replicate for more engines"
    ))
    yield _whole_experts(run)
    if not m.experts:
        return
    uneven = ranks % lay.expert > 0
    yield Rule(uneven, "layout.expert", ("layout.shard", "layout.context", "layout.tensor"), lambda: (
        f"{lay.expert} does not divide layout.shard x layout.context x layout.tensor = {ranks}: experts are split over those "
        f"ranks and add none; layout.tensor = {lay.expert} would do"
    ))
    yield Rule(run.serve.invariant and lay.expert < ranks, "layout.expert", ("serve.invariant",), lambda: (
        f"{lay.expert} splits each expert over several of {ranks} ranks, and serve.invariant needs whole experts; "
        f"layout.expert = {ranks} would do"
    ))
    columns = max(1, ranks // lay.expert)
    yield Rule(not uneven and m.expert_ffn % columns > 0, "layout.expert", ("layout.tensor", "model.expert_ffn"), lambda: (
        f"{columns} ranks per expert do not divide model.expert_ffn = {m.expert_ffn}; layout.expert = {ranks} keeps experts "
        "whole"
    ))


def _tensor_rules(run: Run) -> Iterator[Rule]:
    """Rules on the sizes that tensor and context ranks cut."""
    m, lay, length = run.model, run.layout, run.train.seq_len
    t, c = lay.tensor, lay.context
    yield from _width_rules(run)
    if m.experts and lay.expert_tensor:
        yield Rule(m.expert_ffn % t > 0, "layout.expert_tensor", ("layout.tensor", "model.expert_ffn"),
                   lambda: f"layout.tensor = {t} does not divide model.expert_ffn = {m.expert_ffn}")
    yield Rule((t > 1) & (length % (t * c) > 0), "train.seq_len", ("layout.tensor", "layout.context"), lambda: (
        f"{length} is not a multiple of layout.tensor x layout.context = {t * c}: between the matrices each rank holds an equal "
        f"slice of the sequence"
    ))
    yield Rule((c > 1) & (length % (2 * c) > 0), "train.seq_len", ("layout.context",), lambda: (
        f"{length} is not a multiple of 2 x layout.context = {2 * c}: each rank takes one slice from the front and one from the "
        f"back, to balance causal attention"
    ))


def _width_rules(run: Run) -> Iterator[Rule]:
    """Rules on the widths that tensor ranks cut: full heads, and equal columns."""
    m, t = run.model, run.layout.tensor
    yield Rule(m.heads % t > 0, "layout.tensor", ("model.heads",), lambda: (
        f"{t} does not divide model.heads = {m.heads}: each rank holds whole heads; {_divisors(m.heads)} would do"
    ))
    if m.attention == "grouped":
        uneven = (m.heads % t == 0) & (m.kv_heads % t > 0) & (t % m.kv_heads > 0)
        yield Rule(uneven, "layout.tensor", ("model.kv_heads",), lambda: (
            f"{t} and model.kv_heads = {m.kv_heads} do not divide each other: key/value heads are either split evenly or "
            f"copied evenly over the ranks"
        ))
    widths = {"model.ffn": m.ffn} if not m.experts or m.dense_layers else {}
    if m.experts and m.shared_experts:
        widths["model.expert_ffn"] = m.expert_ffn * m.shared_experts
    for name, width in widths.items():
        reason = partial("{} does not divide the feed-forward width {} ({}): each rank holds equal columns".format, t, width, name)
        yield Rule(width % t > 0, "layout.tensor", (name,), reason)


def _stage_rules(run: Run) -> Iterator[Rule]:
    """Rules on how layers are assigned to stages."""
    m, lay = run.model, run.layout
    stages = lay.distinct_stages
    yield Rule(stages > m.layers + 2, "layout.pipeline", ("model.layers", "layout.schedule", "layout.chunks"), lambda: (
        f"{lay.pipeline} ranks with {stages // lay.pipeline} stages each are too many for model.layers = {m.layers}: each stage "
        f"needs a layer, except the first (embedding) and the last (head)"
    ))
    if lay.stages:
        none = min(lay.stages) < 0 or min(lay.stages[1:-1], default=1) < 1
        wrong = (stages != len(lay.stages)) | (sum(lay.stages) != m.layers) | none
        speaks_of = ("layout.pipeline", "layout.schedule", "layout.chunks", "model.layers")
        yield Rule(wrong, "layout.stages", speaks_of, lambda: (
            f"{list(lay.stages)} must be {stages} numbers above 0 (the first and the last may be 0) that add up to model.layers = "
            f"{m.layers}"
        ))


def _pipeline_rules(run: Run) -> Iterator[Rule]:
    """Rules on how layers are assigned to stages, and full heads to context ranks."""
    m, lay = run.model, run.layout
    t, c = lay.tensor, lay.context
    yield from _stage_rules(run)
    if lay.context_method == "ulysses":
        others = ("layout.tensor", "model.heads", "layout.context_method")
        yield Rule((c > 1) & (m.heads % (t * c) > 0), "layout.context", others, lambda: (
            f"model.heads = {m.heads} is not a multiple of layout.tensor x layout.context = {t * c}: ulysses needs whole "
            f"heads per rank; ring and gather do not"
        ))


def batch_rules(run: Run) -> Iterator[Rule]:
    """Rules between batch, layout and devices. The sizes of the layout and the microbatch may be arrays."""
    lay, train, nodes, each = run.layout, run.train, run.cluster.nodes, run.cluster.devices_per_node
    world, share = lay.world, train.microbatch * lay.data_ranks
    yield Rule(
        train.global_batch % share > 0, "train.global_batch", ("train.microbatch", "layout.replicate", "layout.shard"), lambda: (
            f"{train.global_batch} is not a multiple of train.microbatch x layout.replicate x layout.shard = "
            f"{train.microbatch} x {lay.replicate} x {lay.shard} = {share}: every rank runs the same number of microbatches"
        ))
    axes = tuple(f"layout.{axis}" for axis in RANK_AXES)
    uneven = (each == -(-world // nodes)) & (world % nodes > 0)
    fills = '; layout = "auto" finds a layout that fills the machines'
    yield Rule(uneven, "cluster.nodes", ("cluster.devices_per_node", *axes), lambda: (
        f"{counted(world, 'rank')} of the layout cannot be spread evenly over {counted(nodes, 'node')}{fills}"
    ))
    yield Rule((uneven == 0) & (nodes * each != world), "cluster.devices_per_node", ("cluster.nodes", *axes), lambda: (
        f"{counted(nodes, 'node')} x {counted(each, 'device')} are not the {counted(world, 'rank')} of the layout (replicate x "
        f"shard x context x tensor x pipeline){fills}"
    ))


def _data_rules(run: Run) -> Iterator[Rule]:
    sets, weights = run.data.sets, run.data.weights
    if weights:
        yield Rule(len(weights) != len(sets), "data.weights", ("data.sets",),
                   lambda: f"{counted(len(weights), 'weight')} for {counted(len(sets), 'set')}")
        yield Rule(not (min(weights) >= 0 and sum(weights) > 0), "data.weights", (),
                   lambda: "weights must not be negative, and one must be above 0")
