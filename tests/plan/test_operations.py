"""The operations of a layer: their number against the model's own count, what they keep against Korthikanti et al. (2022)
equations 1 to 6, and arrays against numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import EXPERTS, GPT, LLAMA, make_job

from shardwise.plan.cost import passes
from shardwise.plan.cost.flops import forward_flops
from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.memory import layer_activations
from shardwise.plan.cost.operations import embedding, head, layer
from shardwise.plan.cost.ops import FORWARD, Op
from shardwise.plan.cost.parameters import LocalNumel
from shardwise.plan.cost.passes import recomputed_share
from shardwise.plan.time.data import data_seconds
from shardwise.plan.trainer.work import work
from shardwise.run import run_from_dict

LATENT = LLAMA | dict(attention="latent", q_rank=384, kv_rank=256, nope_dim=64, rope_dim=32, v_dim=64, kv_heads=0)


@pytest.mark.parametrize("model", [GPT, LLAMA, EXPERTS], ids=["gpt", "llama", "experts"])
@pytest.mark.parametrize("layout", [{}, dict(tensor=4), dict(context=2), dict(tensor=2, context=4)], ids=str)
def test_operations_of_all_ranks_are_those_of_the_model(model: dict[str, Any], layout: dict[str, Any]) -> None:
    job = make_job(model, **layout)
    m = job.model
    routed = m.layers - m.dense_layers if m.experts else 0
    modules = [(m.layers - routed, layer(job, routed=False)), (1, head(job)), (1, embedding(job))]
    if routed:
        modules.append((routed, layer(job, routed=True)))
    done = sum(times * sum(e.flops[FORWARD] for e in ops) for times, ops in modules)
    ranks = job.layout.tensor * job.layout.context
    assert done * ranks == pytest.approx(forward_flops(m, job.seq_len) * job.microbatch * job.seq_len, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    model=st.sampled_from([GPT, LLAMA, LATENT, EXPERTS]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    context=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    expert=st.sampled_from([1, 2]),
    expert_tensor=st.booleans(),
    window=st.sampled_from([0, 100]),
    recompute=st.sampled_from(["none", "full"]),
    adapter=st.sampled_from([{}, dict(kind="lora", rank=8), dict(kind="lora", rank=4, targets=["q", "kv", "down"])]),
)
def test_flops_of_this_trainer_are_those_its_own_account_counts(
    model: dict[str, Any], tensor: int, context: int, pipeline: int, expert: int, expert_tensor: bool, window: int,
    recompute: str, adapter: dict[str, Any],
) -> None:  # fmt: skip
    """By design the two differ in three things. An op is the mean over the context ranks, which under a window do not have the same
    work. Fused attention's backward pass computes the scores again, which takes 2.5 forward passes; the account counts 2.
    Recomputing a MoE layer stops early in this trainer, before the last GEMM of the shared experts; the ops repeat all of it."""
    layout = dict(
        tensor=tensor, context=context, pipeline=pipeline, shard=2, expert=expert if "experts" in model else 1
    )
    layout |= dict(expert_tensor=expert_tensor and "experts" in model, recompute=recompute, context_method="gather")
    train = dict(global_batch=8, microbatch=2, seq_len=256)
    run = run_from_dict(dict(model=model | dict(sliding_window=window), layout=layout, train=train, adapter=adapter))
    job = replace(job_of(run), imbalance=1.0)

    def factor(op: Op, n: int) -> float:
        return 0.8 if op.core and n else 1.0

    done, recomputed = np.zeros(3), 0.0
    layers = [(d, layer(job, routed=False)) for d, _ in job.stage_layers if d]
    layers += [(r, layer(job, routed=True)) for _, r in job.stage_layers if r]
    for times, ops in [*layers, (1, head(job))]:
        done += [times * sum(op.flops[n] * factor(op, n) for op in ops) for n in range(3)]
    for times, ops in layers:
        recomputed += times * sum(op.flops[FORWARD] * recomputed_share(job, op) * factor(op, 0) for op in ops)
    stages = range(0, run.layout.world, run.layout.world // pipeline)
    ranks = [work(run, stage + tensor * n) for stage in stages for n in range(context)]

    def counted(name: str) -> float:
        return sum(passes.get(name, 0.0) for one in ranks for passes in one.flops.values()) / context

    names = ("forward", "backward_input", "backward_weight")
    assert (done * job.microbatches).tolist() == pytest.approx([counted(name) for name in names], rel=1e-12)
    if "experts" not in model:
        assert recomputed * job.microbatches == pytest.approx(counted("recompute"), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    heads=st.sampled_from([8, 16, 32]),
    hidden=st.sampled_from([512, 1024, 4096]),
    seq_len=st.sampled_from([512, 2048, 8192]),
    microbatch=st.integers(1, 8),
    sequence=st.booleans(),
)
def test_activations_of_a_gpt_layer(
    tensor: int, heads: int, hidden: int, seq_len: int, microbatch: int, sequence: bool
) -> None:
    """34 + 5 a s/h bytes for each of s b h numbers, divided as the equations say."""
    model = GPT | dict(hidden=hidden, heads=heads, ffn=4 * hidden)
    job = make_job(model, "megatron", tensor=tensor, seq_len=seq_len, microbatch=microbatch)
    job = replace(job, framework=replace(job.framework, sequence_parallel=sequence))
    sbh, square = seq_len * microbatch * hidden, 5 * heads * seq_len / hidden
    whole = sbh / tensor * (34 + square) if sequence else sbh * (10 + (24 + square) / tensor)
    assert float(layer_activations(job, routed=False)[0]) == pytest.approx(whole, rel=1e-12)
    selective = replace(job, layout=replace(job.layout, recompute="attention"))
    rest = sbh / tensor * 34 if sequence else sbh * (10 + 24 / tensor)
    assert float(layer_activations(selective, routed=False)[0]) == pytest.approx(rest, rel=1e-12)
    full = replace(job, layout=replace(job.layout, recompute="full"))
    assert float(layer_activations(full, routed=False)[0]) == pytest.approx(
        2 * sbh / (tensor if sequence else 1), rel=1e-12
    )


@pytest.mark.parametrize("model", [GPT, LLAMA, LATENT, EXPERTS], ids=["gpt", "llama", "latent", "experts"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_arrays_give_what_numbers_give(model: dict[str, Any], method: str) -> None:
    sizes = [(1, 1, 1), (2, 1, 2), (4, 2, 1), (8, 4, 4), (16, 1, 2)]
    tensor, context, microbatch = map(np.array, zip(*sizes, strict=True))
    many = make_job(model, tensor=tensor, context=context, microbatch=microbatch, context_method=method)
    routed = bool(model.get("experts"))
    table = layer(many, routed=routed)
    for n, (t, c, b) in enumerate(sizes):
        one = layer(make_job(model, tensor=t, context=c, microbatch=b, context_method=method), routed=routed)
        assert len(one) == len(table)
        for single, several in zip(one, table, strict=True):
            for mine, theirs in zip(single.seconds, several.seconds, strict=True):
                assert float(mine) == pytest.approx(float(np.broadcast_to(theirs, len(sizes))[n]), rel=1e-9, abs=1e-15)
            assert float(single.saved) == pytest.approx(float(np.broadcast_to(several.saved, len(sizes))[n]), rel=1e-12)


def test_recomputation_repeats_the_forward_pass() -> None:
    from shardwise.plan.cost.passes import FORWARDS, RECOMPUTE, ModuleCost

    def recomputed(framework: str) -> float:
        cost = ModuleCost.of(layer(make_job(LLAMA, framework, recompute="full"), routed=False))
        return sum(cost.seconds[RECOMPUTE]) / sum(cost.seconds[FORWARDS])

    assert recomputed("megatron") == pytest.approx(1.0)
    assert 0.6 < recomputed("shardwise") < 0.9  # ends before the last product, whose result nothing needs


def test_casts_are_left_out_of_matrices_that_are_kept() -> None:
    """Those of attention and dense layers; experts lie together in one tensor, which is cast every time."""
    model = dict(layers=2, hidden=256, heads=4, ffn=512, vocab=1000, experts=4, experts_per_token=2, dense_layers=1)
    train = dict(dtype="bfloat16", global_batch=4, seq_len=128)
    job = job_of(run_from_dict(dict(model=model, train=train, cluster=dict(chip="h200"))))
    assert job.framework.keeps_compute_copies
    cast = {e.name for routed in (False, True) for e in layer(job, routed=routed) if e.name.endswith(" cast")}
    every = replace(job, framework=replace(job.framework, keeps_compute_copies=False))
    before = {e.name for routed in (False, True) for e in layer(every, routed=routed) if e.name.endswith(" cast")}
    assert cast
    assert all("expert" in name or "router" in name for name in cast)
    assert {name for name in before if "expert" in name or "router" in name} == cast


@pytest.mark.parametrize(("dispatcher", "passes"), [("alltoall", 2.0), ("deepep", 1.0), ("hybridep", 0.0)])
def test_rows_are_sorted_as_their_dispatcher_does(dispatcher: str, passes: float) -> None:
    job = make_job(EXPERTS, "nemo", shard=2, expert=2)
    job = replace(job, framework=replace(job.framework, dispatcher=dispatcher))
    rows = job.rows * job.model.experts_per_token
    for name in ("to experts", "from experts"):
        (moved,) = (op.bytes[FORWARD] for op in layer(job, routed=True) if op.name == name)
        assert moved == passes * 2 * rows * job.model.hidden * job.width


@pytest.mark.parametrize(("budget", "share"), [(1e-9, 1.0), (1e6, 0.0)])
def test_a_budget_of_layers_that_spare_nothing(monkeypatch: pytest.MonkeyPatch, budget: float, share: float) -> None:
    """Adapters on long sequences over many ranks can leave a layer with nothing but what enters it."""
    layout = dict(recompute="budget", recompute_budget=budget)
    job = job_of(run_from_dict(dict(model=LLAMA, layout=layout, cluster=dict(chip="h200"))))
    ops = layer(job, routed=False)
    monkeypatch.setattr(passes, "residual_bytes", lambda job: float(passes._saved(job, ops)))
    assert passes.recomputed_layers(job, ops) == share


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_recomputed_logits_are_one_gemm_more_whatever_is_trained(adapter: str) -> None:
    """A chunked loss has its gradients in the forward pass, one of log-probabilities in the backward pass."""
    keys = dict(
        model=dict(layers=2, hidden=256, heads=4, vocab=1000), cluster=dict(chip="h100"), adapter=dict(kind=adapter),
        train=dict(seq_len=128, microbatch=1, global_batch=2),
    )  # fmt: skip
    gemm, trained = 2.0 * 128 * 256 * 1000, int(adapter == "none")
    for kind, gemms in (("pretrain", (2 + trained, 0, 0)), ("dpo", (1, 2, trained))):
        job = job_of(run_from_dict(keys | dict(objective=dict(kind=kind))))
        found = head(replace(job, framework=replace(job.framework, chunked_loss=True)))
        assert [op.flops for op in found if op.part == "head" and any(op.flops)] == [tuple(gemm * n for n in gemms)]


def test_frozen_matrices_of_4_bits_are_gathered_as_they_are_held() -> None:
    model = dict(layers=2, hidden=256, heads=4, vocab=1000)
    seconds = {}
    for kind in ("lora", "qlora"):
        keys = dict(model=model, adapter=dict(kind=kind), layout=dict(shard=8), cluster=dict(chip="h100"))
        job = job_of(run_from_dict(keys | dict(train=dict(dtype="bfloat16", seq_len=128))))
        seconds[kind] = data_seconds(job, LocalNumel(1e9, 0.0), (2.0, 0.0)).forward
    assert seconds["qlora"] < 0.5 * seconds["lora"]


def weight_passes(ending: str, model: dict[str, Any], layout: dict[str, Any], microbatches: int = 1) -> float:
    """Bytes moved for gradients of weights in a layer, in the ops whose names end so."""
    train = dict(
        global_batch=microbatches * layout.get("replicate", 1),
        microbatch=1,
        seq_len=64,
        device="cuda",
        dtype="bfloat16",
    )
    run = run_from_dict(dict(model=model, train=train, layout=layout, cluster=dict(chip="h200")))
    ops = layer(job_of(run), routed="experts" in model)
    return sum(float(op.bytes[2]) for op in ops if op.name.endswith(ending))


def test_replicas_add_every_gradient_to_a_bucket_of_zeros() -> None:
    """DistributedDataParallel: zeroed and divided once a step, added once a microbatch, all in float32."""
    numel = weight_passes("added", LLAMA, {}, 2) / 6  # 12 bytes for one of two microbatches
    for microbatches, each in ((1, 8), (2, 12 + 12 / 2), (4, 12 + 12 / 4)):
        assert weight_passes("added", LLAMA, dict(replicate=2), microbatches) == pytest.approx(numel * each)
    for apart in (dict(sync_every=4), dict(compress="powersgd")):  # these exchange gradients by themselves
        assert weight_passes("added", LLAMA, dict(replicate=2) | apart, 2) == pytest.approx(numel * 6)
    mixed = EXPERTS | dict(experts=4)  # whole experts, which nothing shards, are in no bucket either
    fourth = weight_passes("expert up added", mixed, dict(shard=4, expert=4), 8)
    assert weight_passes("expert up added", mixed, {}, 2) == pytest.approx(4 * fourth)
    assert fourth > 0


def test_gradients_of_biases_read_those_of_outputs() -> None:
    m = run_from_dict(dict(model=GPT)).model
    for bias, columns in (("none", 0), ("qkv", 3 * m.hidden), ("all", 3 * m.hidden + m.hidden + m.ffn + m.hidden)):
        assert weight_passes("bias", GPT | dict(bias=bias), {}) == 64 * columns * 2
