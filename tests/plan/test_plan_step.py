"""A step: the pipeline's time against a list played to its end, parts that add up, and what more of something must do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import EXPERTS, GPT, LLAMA, make_job

from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.memory import layer_saved, memory
from shardwise.plan.cost.operations import layer
from shardwise.plan.cost.passes import RECOMPUTE, recomputed_layers
from shardwise.plan.figures import figures
from shardwise.plan.plan import Plan, plan
from shardwise.plan.time.goodput import job_cost
from shardwise.plan.time.step import makespans, prepare, step_time
from shardwise.plan.time.timeline import timeline
from shardwise.plan.trainer.budgeted import compare_with_greedy
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.saved import saved as saved_of_stage
from shardwise.run import Run, run_from_dict
from shardwise.run.axes import ASYNCHRONOUS
from shardwise.schedules import SCHEDULES, Cost, make_schedule, peak_activations, time

LAYOUTS: list[dict[str, Any]] = [
    dict(),
    dict(replicate=8),
    dict(shard=8, zero=1),
    dict(shard=8, zero=3, recompute="full"),
    dict(tensor=4, pipeline=2, shard=2),
    dict(pipeline=4, schedule="interleaved", chunks=2, replicate=2),
    dict(pipeline=2, schedule="zb-v", context=2),
    dict(shard=8, expert=4),
]


@pytest.mark.parametrize(("batch", "bound"), [(1, True), (64, False)])
def test_a_replayed_step_does_not_wait_for_its_host(batch: int, bound: bool) -> None:
    """Launching a small model's kernels takes the host longer than the GPU; replayed, there is nothing to launch."""

    def host(**train: Any) -> float:
        shape = dict(layers=16, hidden=1024, heads=16, vocab=32000)
        settings = dict(dtype="bfloat16", seq_len=1024, global_batch=batch) | train
        run = run_from_dict(dict(model=shape, train=settings, cluster=dict(chip="h200")))
        return plan(run).account.breakdown["host"]

    launched = host(cuda_graph=False)
    assert launched > 2e-3 if bound else 0 <= launched < 1e-3
    assert host() == (0 if bound else launched)


def on_an_h200(model: dict[str, Any], layout: dict[str, Any], **train: Any) -> Run:
    shape = dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000) | model
    settings = dict(dtype="bfloat16", seq_len=8192, global_batch=8) | train
    return run_from_dict(dict(model=shape, layout=layout, train=settings, cluster=dict(chip="h200")))


@pytest.mark.parametrize(
    ("train", "waits"), [({}, False), (dict(dtype="float16"), True), (dict(guard="skip"), True)], ids=str
)
def test_a_host_that_runs_ahead_costs_nothing(train: dict[str, Any], waits: bool) -> None:
    assert (constants_of(job_of(on_an_h200({}, {}, **train)))["overhead"] > 0) is waits


def test_attention_takes_the_kernel_that_the_trainer_takes() -> None:
    def seconds(context_method: str = "ring", chip: str = "h200", **model: Any) -> float:
        run = on_an_h200(model, dict(context=2, context_method=context_method))
        run = replace(run, cluster=replace(run.cluster, chip=chip))
        return sum(float(sum(op.seconds)) for op in layer(job_of(run), routed=False) if op.core)

    # Blocks are merged in float32; their kernel is slower than cuDNN's, which is for Hopper and later.
    ampere, hopper = (seconds(chip=chip) / seconds("ulysses", chip=chip) for chip in ("a100-sxm-80g", "h200"))
    assert 1.1 < ampere < hopper < 1.4
    # A window that hides one position costs what a causal mask does, but for the kernel.
    assert seconds("ulysses", sliding_window=8191) > 1.2 * seconds("ulysses")


def test_layers_kept_behind_are_gone_when_one_before_them_is_computed_again() -> None:
    """A budget keeps the last layers: when the one before them is computed again, which takes 8 GiB here, they are done."""

    def moving(**layout: Any) -> float:
        run = on_an_h200({}, layout, seq_len=65536, global_batch=1, compile=False)
        owners = plan(run).account.memory.ranks[0]
        return (owners["activations"] + owners["logits"]) / 2**30

    at_loss = moving(recompute="none")
    for gib in (20.0, 40.0, 60.0):
        assert moving(recompute="full") < moving(recompute="budget", recompute_budget=gib) < gib + 4
        assert moving(recompute="budget", recompute_budget=gib) < at_loss


def test_a_budget_keeps_as_much_compiled_as_not() -> None:
    """Compiled layers keep less, so more of them are within the budget: the plan counts the layers that the trainer keeps."""

    def kept(compile: bool) -> tuple[float, int]:
        layout = dict(recompute="budget", recompute_budget=8.0)
        run = on_an_h200({}, layout, seq_len=8192, global_batch=1, compile=compile)
        repeated = sum(bool(again) for again in PlannedRank(run, 0).recomputed.values())
        return plan(run).account.memory.ranks[0]["activations"] / 2**30, repeated

    (compiled, fewer), (eager, more) = kept(True), kept(False)
    assert fewer < more
    assert compiled == pytest.approx(eager, rel=0.06)


@pytest.mark.parametrize("gib", [1.0, 3.0, 5.0, 8.0, 100.0])
@pytest.mark.parametrize(
    "layout", [dict(schedule="1f1b"), dict(schedule="interleaved", chunks=5), dict(schedule="zb-v")]
)
def test_a_budget_is_a_ranks_of_all_its_stages(layout: dict[str, Any], gib: float) -> None:
    """Time, memory and FLOPs recompute the same layers, however many stages a rank has."""
    layout |= dict(tensor=8, pipeline=4, shard=2, recompute="budget", recompute_budget=gib)
    cluster = dict(chip="h100", nodes=8, devices_per_node=8)
    train = dict(dtype="bfloat16", seq_len=8192, global_batch=32, microbatch=1)
    run = run_from_dict(
        dict(model=dict(preset="llama3-70b", vocab=128256), layout=layout, cluster=cluster, train=train)
    )
    job = job_of(run)
    share = float(recomputed_layers(job, layer(job, routed=False)))
    assert 20 * share == pytest.approx(
        round(20 * share)
    )  # whole layers: what keeps none takes the time of full recomputation
    saved = layer_saved(job_of(replace(run, layout=replace(run.layout, recompute="none"))), routed=False)
    for rank in range(0, run.layout.world, 16):
        layers = list(PlannedRank(run, rank).recomputed.items())
        kept = sum(not parts for _, parts in layers)
        assert abs(kept - (1 - share) * 20) <= 2  # a rank has 20 layers, or one more or less
        assert kept * saved <= gib * 2**30


@pytest.mark.parametrize("gib", [0.1, 0.3, 0.5, 0.7])
@pytest.mark.parametrize(
    ("recompute", "pipeline"),
    [
        ("budget", dict(pipeline=2)),
        ("budget", dict(pipeline=2, schedule="interleaved", chunks=2)),
        ("budget", dict(pipeline=4, schedule="zb-v")),
        ("optimal", dict(pipeline=2)),
        ("optimal", dict(pipeline=4, schedule="interleaved", chunks=2)),
    ],
    ids=str,
)
def test_ranks_with_more_layers_recompute_more_of_them(recompute: str, pipeline: dict[str, Any], gib: float) -> None:
    """Nine layers on two or four ranks: the time has as many layers recomputed on each rank as the trainer recomputes there."""
    cluster = dict(chip="h100", nodes=1, devices_per_node=4)
    train = dict(seq_len=2048, global_batch=8, microbatch=1, dtype="bfloat16", compile=False)
    shape = dict(layers=9, hidden=1024, heads=8, ffn=4096, vocab=32000)
    layout = dict(shard=4 // pipeline["pipeline"]) | pipeline | dict(recompute=recompute, recompute_budget=gib)
    run = run_from_dict(dict(model=shape, layout=layout, cluster=cluster, train=train))
    made = prepare(job_of(run))
    full = prepare(job_of(replace(run, layout=replace(run.layout, recompute="full", recompute_budget=0.0))))
    layers, placement = made.job.stage_layers, made.job.layout.placement
    one = max(
        sum(full.stages[kind].seconds[RECOMPUTE]) / count[0]
        for kind, count in zip(full.kinds, layers, strict=True)
        if count[0]
    )
    seen = []
    for rank in range(run.layout.pipeline):
        mine = [made.stages[kind] for kind, home in zip(made.kinds, placement, strict=True) if home == rank]
        time = sum(sum(stage.seconds[RECOMPUTE]) for stage in mine)
        place = PlannedRank(run, rank * run.layout.shard)
        if recompute == "budget":
            assert time / one == pytest.approx(sum(bool(parts) for parts in place.recomputed.values()))
        else:
            assert time == pytest.approx(compare_with_greedy(*place.of_budget).seconds)
        seen.append(time)
    assert len({round(time / one, 6) for time in seen}) > 1 or min(seen) == max(seen) == 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", [LLAMA, EXPERTS], ids=["llama", "experts"])
def test_where_the_time_goes_adds_up(model: dict[str, Any], layout: dict[str, Any]) -> None:
    if "expert" in layout and "experts" not in model:
        pytest.skip("a dense model has no experts")
    job = make_job(model, **layout)
    step = step_time(prepare(job))
    assert sum(step.breakdown.values()) == pytest.approx(step.seconds, rel=1e-9)
    assert min(step.breakdown.values()) >= -1e-12
    drawn = timeline(job)
    assert drawn.seconds == pytest.approx(step.seconds, rel=0.02)
    assert drawn.left_out == 0
    some = timeline(job, 1)
    assert some.left_out == job.accumulation - 1
    assert (some.seconds < drawn.seconds) is (job.accumulation > 1)


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_an_asynchronous_pipeline_has_a_timeline(schedule: str) -> None:
    drawn = timeline(make_job(LLAMA, pipeline=4, schedule=schedule, batch=8))
    for rank in range(4):
        names = [span.name for span in drawn.spans if (span.rank, span.stream) == (rank, "compute")]
        assert (names.count("forward"), names.count("backward"), names.count("optimizer")) == (8, 8, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [7, 33, 64])
def test_a_pipeline_cut_short_takes_as_long_as_one_played_to_its_end(schedule: str, microbatches: int) -> None:
    layers = dict(pipeline=4, schedule=schedule, chunks=2 if schedule in ("interleaved", "breadth-first") else 1)
    job = make_job(GPT, "megatron", **layers)
    chunks = job.layout.stages_per_rank
    stages = 4 * chunks
    cost = Cost([1.0 + 0.1 * (s == stages - 1) for s in range(stages)], [1.3] * stages, [0.9] * stages)
    (cut,) = makespans(job.layout, [microbatches], [cost], [0.05])
    whole = make_schedule(schedule, 4, microbatches, chunks)
    if schedule in ASYNCHRONOUS:  # steps overlap, and the busiest rank sets the pace
        assert cut == pytest.approx(microbatches * (1.1 + 1.3 + 0.9), rel=0.01)
        return
    assert cut == pytest.approx(time(whole, cost, 0.05).makespan, rel=0.01)


def test_a_pipeline_of_one_stage_has_no_bubble() -> None:
    step = step_time(prepare(make_job(LLAMA, shard=4)))
    assert step.breakdown["bubble"] == 0.0
    assert step.breakdown["pipeline"] == 0.0


@settings(max_examples=25, deadline=None)
@given(tensor=st.sampled_from([1, 2, 4]), shard=st.sampled_from([1, 2, 8]), zero=st.sampled_from([1, 2, 3]))
def test_a_longer_sequence_and_a_larger_batch_take_longer(tensor: int, shard: int, zero: int) -> None:
    small = step_time(prepare(make_job(LLAMA, tensor=tensor, shard=shard, zero=zero))).seconds
    longer = step_time(prepare(make_job(LLAMA, tensor=tensor, shard=shard, zero=zero, seq_len=4096))).seconds
    larger = step_time(prepare(make_job(LLAMA, tensor=tensor, shard=shard, zero=zero, batch=128))).seconds
    assert longer > 1.1 * small  # not twice: on a small model the host sets the pace
    assert larger > 1.5 * small


@pytest.mark.parametrize(("zero", "states"), [(1, (2, 4, 12 / 8)), (3, (2 / 8, 4 / 8, 12 / 8))])
def test_states_of_zero_in_bytes_a_parameter(zero: int, states: tuple[float, ...]) -> None:
    from shardwise.plan.cost.flops import parameters

    job = make_job(GPT, "nemo", shard=8, zero=zero)
    owners = memory(job).ranks[0]
    total = parameters(job.model).total
    for owner, expected in zip(("parameters", "gradients", "optimizer"), states, strict=True):
        assert owners[owner] / total == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_in_flight_are_those_of_the_schedule(schedule: str) -> None:
    layout: dict[str, Any] = dict(pipeline=4, schedule=schedule, chunks=2, microbatch=2, recompute="full")
    shape = make_job(GPT, **layout).layout
    chunks, parts = shape.stages_per_rank, shape.distinct_stages
    job = make_job(GPT, "megatron", **layout, stages=(8 // parts,) * parts)
    one = job.rows * job.model.hidden * job.width * job.model.layers / parts
    got = memory(job)
    listed = make_schedule(schedule, 4, 32, chunks)
    mask = job.rows * job.model.hidden  # of the embedding's dropout
    whole = [one + mask * listed.is_first(s) for s in range(4 * chunks)]
    again = got.ranks[3]["activations"] - peak_activations(listed, whole)[3]
    for rank, held in enumerate(peak_activations(listed, whole)):
        assert got.ranks[rank]["activations"] - again == pytest.approx(held, rel=1e-9)


def test_the_checkpoint_interval_is_the_best_one() -> None:
    run = run_from_dict(
        dict(
            model=dict(preset="llama3-8b"), train=dict(steps=100_000), cluster=dict(mtbf_hours=5000.0, storage_gbs=20.0)
        )
    )
    cluster = make_job(LLAMA).cluster
    cost = job_cost(run, cluster, 0.1, 4096, 96e12)
    between = 5000 * 3600 / 4096

    def lost(interval: float) -> float:
        once = interval / 2 + cost.checkpoint_write_s + run.cluster.restart_seconds
        return cost.checkpoint_stall_s / interval + once / between

    best = cost.checkpoint_every_s
    assert best > cost.checkpoint_write_s > cost.checkpoint_stall_s
    assert lost(best) <= min(lost(best * 1.05), lost(best * 0.95))
    assert cost.goodput == pytest.approx(1 / (1 + lost(best)), rel=0.01)  # two failures in an interval are rare


def test_a_step_waits_for_data_only_when_reading_is_slower() -> None:
    def planned(storage: float) -> Plan:
        return plan(
            run_from_dict(
                dict(
                    model=dict(preset="llama3-8b"),
                    layout=dict(shard=8),
                    train=dict(global_batch=8, seq_len=8192, dtype="bfloat16"),
                    cluster=dict(chip="h100", storage_gbs=storage),
                )
            )
        )

    quick, slow = planned(1.0), planned(1e-5)
    assert quick.account.breakdown["data"] == 0.0
    # 8 ranks of a machine read 8192 tokens of 4 bytes each.
    assert slow.account.step_seconds == pytest.approx(8 * 8192 * 4 / 1e4)
    assert slow.account.breakdown["data"] == pytest.approx(slow.account.step_seconds - quick.account.step_seconds)
    assert sum(slow.account.breakdown.values()) == pytest.approx(slow.account.step_seconds)


def test_checkpoints_are_no_denser_than_they_are_written() -> None:
    run = run_from_dict(dict(model=dict(preset="llama3-8b"), train=dict(steps=10_000), cluster=dict(storage_gbs=0.01)))
    cost = job_cost(run, make_job(LLAMA).cluster, 1.0, 4096, 96e9)
    assert cost.checkpoint_every_s == cost.checkpoint_write_s > 10 * cost.checkpoint_stall_s


def test_an_expert_takes_no_more_than_its_room() -> None:
    def experts(imbalance: float, capacity: float) -> float:
        model = dict(preset="mixtral-8x7b", expert_capacity=capacity)
        train = dict(global_batch=64, seq_len=4096, dtype="bfloat16", expert_imbalance=imbalance)
        cluster = dict(chip="h100", nodes=8)
        run = run_from_dict(dict(model=model, layout=dict(shard=64, expert=8), train=train, cluster=cluster))
        return plan(run).account.breakdown["matmul"]

    assert experts(3.0, 0.0) > experts(1.5, 0.0) > experts(1.0, 0.0)
    assert experts(3.0, 1.5) == experts(1.5, 1.5) < experts(3.0, 0.0)


def test_one_rank_alone_has_all_rows_and_half_a_tile_more_of_each_expert() -> None:
    def matmul(imbalance: float, **layout: int) -> float:
        model = dict(layers=2, hidden=1024, heads=8, experts=16, experts_per_token=2, expert_ffn=2048, vocab=256)
        train = dict(global_batch=8, seq_len=4096, dtype="bfloat16", expert_imbalance=imbalance)
        run = run_from_dict(dict(model=model, layout=layout, train=train, cluster=dict(chip="h100")))
        return plan(run).account.breakdown["matmul"]

    assert matmul(1.1) == matmul(1.5) > matmul(1.0)
    assert matmul(1.1) < 1.02 * matmul(1.0)  # 64 of 4096 rows, of the experts' GEMMs along the rows
    assert matmul(1.5, shard=8, expert=8) > 1.1 * matmul(1.0, shard=8, expert=8)


def test_experts_that_get_every_token_have_equal_shares() -> None:
    def matmul(imbalance: float, chosen: int, capacity: float = 0.0, **layout: int) -> float:
        model = dict(layers=2, hidden=1024, heads=8, vocab=256)
        model |= dict(experts=16, experts_per_token=chosen, expert_ffn=2048, expert_capacity=capacity)
        train = dict(global_batch=8, seq_len=4096, dtype="bfloat16", expert_imbalance=imbalance)
        run = run_from_dict(dict(model=model, layout=layout, train=train, cluster=dict(chip="h100")))
        return plan(run).account.breakdown["matmul"]

    ranks = dict(shard=8, expert=8)
    assert matmul(1.5, 16, **ranks) == matmul(1.0, 16, **ranks)
    assert matmul(1.5, 16) == matmul(1.0, 16)
    # An expert gets each token once.
    assert matmul(3.0, 8, **ranks) == matmul(2.0, 8, **ranks) > matmul(1.5, 8, **ranks)
    assert matmul(3.0, 2, shard=2, expert=2) == matmul(2.0, 2, shard=2, expert=2)  # all rows on one of two ranks
    assert matmul(1.1, 2, 0.5) < 0.8 * matmul(1.0, 2)  # experts with room for half of their rows, on one rank


def test_a_slower_link_never_helps() -> None:
    fast = make_job(LLAMA, tensor=4, shard=8, pipeline=2)
    slow = replace(fast, cluster=replace(fast.cluster, intra=fast.cluster.intra / 4, inter=fast.cluster.inter / 4))
    assert step_time(prepare(slow)).seconds > step_time(prepare(fast)).seconds


def test_few_stages_are_asked_for_once() -> None:
    prepared = prepare(make_job(LLAMA, pipeline=8, microbatch=1))
    assert len(prepared.kinds) == 8
    assert len(prepared.stages) <= 4
    assert prepared.job.stage_layers == [(1, 0)] * 8


def test_pipelines_that_trade_say_what_for() -> None:
    def planned(schedule: str, chip: str = "h100", each: int = 8) -> tuple[float, float, float]:
        layout = dict(pipeline=8, tensor=2, schedule=schedule)
        train = dict(global_batch=16, microbatch=1, seq_len=4096, dtype="bfloat16", clip=0.0)
        cluster = dict(chip=chip, nodes=16 // each, devices_per_node=each)
        run = run_from_dict(dict(model=dict(preset="llama3-8b"), layout=layout, train=train, cluster=cluster))
        account = plan(run).account
        assert account.memory is not None
        return account.step_seconds, account.breakdown["bubble"], max(sum(r.values()) for r in account.memory.ranks)

    plain, even, apart = planned("1f1b"), planned("bpipe"), planned("bpipe", each=2)
    assert even[2] < 0.85 * plain[2]  # no rank holds more than 5 of 8 microbatches
    assert apart[0] > even[0] >= plain[0]  # between machines partners wait for what they hand over
    late, stashed = planned("pipedream-2bw"), planned("pipedream")
    assert late[1] < 0.04 * plain[1]  # what is left are transfers between stages
    assert late[0] < plain[0]
    assert late[2] > plain[2]  # two versions of the weights
    assert stashed[0] == pytest.approx(late[0])


@pytest.mark.parametrize(
    ("recompute", "sizes", "gib", "over"),
    [
        ("budget", dict(shard=8), 10.0, False),
        ("budget", dict(shard=2, pipeline=4), 10.0, False),
        ("budget", dict(shard=8), 1.0, True),  # what enters 32 layers is more
        ("optimal", dict(shard=8), 10.0, False),
        ("optimal", dict(shard=4, tensor=2), 5.0, True),  # on tensor ranks few tensors can be recomputed
    ],
)
def test_a_plan_says_what_layers_save_of_their_budget(
    recompute: str, sizes: dict[str, int], gib: float, over: bool
) -> None:
    def made(**layout: Any) -> Run:
        train = dict(seq_len=8192, global_batch=64, microbatch=2, dtype="bfloat16", compile=False)
        cluster = dict(chip="h100", nodes=1)
        return run_from_dict(dict(model=dict(preset="llama3-8b"), layout=sizes | layout, train=train, cluster=cluster))

    run = made(recompute=recompute, recompute_budget=gib)
    (row,) = [row for row in figures(plan(run)) if row[0] == "budget"]
    saved = float(row[1].split()[0])
    assert (saved > gib) == over == ("more than a budget" in row[2])
    assert ("in flight" in row[2]) == ("pipeline" in sizes)
    # To the byte, by the trainer's own list: what the layers save beyond what enters them is what full recomputation spares.
    places = [PlannedRank(one, 0) for one in (run, made(recompute="full"))]
    exact = [sum(saved_of_stage(place, stage).whole for stage in place.stages) for place in places]
    layers = sum(len(stage.layers) for stage in places[0].stages)
    entering = 2 * 8192 * 4096 * 2 / sizes.get("tensor", 1)
    assert saved == pytest.approx((exact[0] - exact[1] + layers * entering) / 2**30, abs=0.25)
