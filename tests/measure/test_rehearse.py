"""One rank of a job is rehearsed with stand-ins for its collectives: its memory is the plan's, and every layout can be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardwise.cli.main import main
from shardwise.hardware import Profile, collective_seconds, load_profile
from shardwise.ledger import Difference
from shardwise.measure.bench.machine import empty_profile
from shardwise.measure.rehearse import Rehearsal, kernels_of, planned_seconds, profiled, rehearse
from shardwise.measure.stand_in import repeat, stand_in_collectives
from shardwise.measure.verify import random_batch
from shardwise.parallel.collectives import all_gather_single, reduce_scatter_single
from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.operations import head, layer
from shardwise.plan.plan import plan
from shardwise.plan.time.step import prepare, step_time
from shardwise.report.pick import agreement
from shardwise.run import Run, UserError, read_run
from shardwise.train.step import TrainState

SMALL = ("model.layers=4", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.vocab=64", "train.seq_len=32",
         "train.global_batch=16", "train.microbatch=2", "train.device=cpu")  # fmt: skip


def small(*more: str) -> Run:
    return read_run(None, [*SMALL, *more])


def test_stand_ins_give_tensors_of_the_right_shape() -> None:
    with stand_in_collectives(3, 8):
        mine, whole = torch.arange(4.0), torch.empty(32)
        all_gather_single(whole, mine)
        assert torch.equal(whole, mine.repeat(8))
        pair = dist.new_group([2, 3])
        half = torch.empty(2)
        reduce_scatter_single(half, mine, group=pair)
        assert half.tolist() == [2, 3]  # the second of two ranks keeps its own part
        got = torch.zeros(1000)
        work = dist.irecv(got, 2, group=pair)
        assert work is not None
        assert work.wait()
        assert 0.8 < got.std() < 1.2
        summed = mine.clone()
        dist.all_reduce(summed)
        assert torch.equal(summed, mine)
    assert not dist.is_initialized()


def test_copies_that_double_fill_any_length() -> None:
    for length in (0, 1, 3, 7, 8, 20):
        out = torch.empty(length)
        repeat(torch.arange(3.0), out)
        assert out.tolist() == [float(n % 3) for n in range(length)]


def test_a_rank_is_compared_with_its_own_plan_and_what_differs_is_said() -> None:
    """Of 65 tokens the second of two tensor ranks holds one row less than the first."""
    run = small("model.vocab=65", "layout.tensor=2", "layout.pipeline=2")
    assert rehearse(run, 1, steps=1, warmup=1).agrees
    differs = Difference("memory", "memory parameters", 100.0, 99.0), Difference("time", "time step", 1.0, 3.0)
    judged = dict.fromkeys(("time", "memory"), float("inf")) | {"memory: memory parameters": 0.0}
    assert agreement(differs, judged) == "1 of 2 quantities differs by more than the tolerance."


def test_kernels_that_run_at_once_take_their_time_once() -> None:
    def kernel(name: str, start: float, end: float, device: str = "CUDA") -> SimpleNamespace:
        spans = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=spans, device_time=end - start, is_user_annotation=False,
                               device_type=SimpleNamespace(name=device))  # fmt: skip

    events = [
        kernel("nvjet_sm90_gemm", 0.0, 10.0),
        kernel("_add", 8.0, 14.0),
        kernel("Memcpy DtoD", 20.0, 90.0),
        kernel("aten::mm", 0.0, 50.0, device="CPU"),
        kernel("_adamw", 30.5, 31.0),
    ]
    parts, count, busy = kernels_of(events)
    assert count == 3
    assert parts["matmul"] == pytest.approx(10e-6)
    assert sum(parts.values()) == pytest.approx(16.5e-6)
    assert busy == pytest.approx(14.5e-6)
    assert kernels_of(()) == ({}, 0, 0.0)


def test_a_rehearsal_needs_no_reader_of_profiles() -> None:
    """Machines with GPUs often have PyTorch alone, and the packages for training are enough."""
    words = "import sys; sys.modules['msgspec'] = None; import shardwise.measure.rehearse"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_of_several_steps_only_the_last_is_recorded() -> None:
    with stand_in_collectives(0, 2):
        train_state = TrainState(small("layout.shard=2"))
        batch = random_batch(train_state.run, train_state.mesh.data_index)
        train_state.train_step(batch)
        alone, behind = (
            Counter(event.name for event in profiled(train_state, batch, steps).events() or ()) for steps in (0, 2)
        )
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert alone[name] == behind[name] > 0
    assert alone["c10d::_allgather_base_"] == behind["c10d::_allgather_base_"] > 0


def test_tokens_are_routed_evenly_in_the_plan_too() -> None:
    """A rehearsal routes evenly, so what a run says about uneven experts is not in the time it is compared with."""
    experts = ("model.experts=4", "model.experts_per_token=2", "layout.shard=2", "layout.expert=2")
    planned = set()
    for imbalance in (1.0, 1.5):
        found = rehearse(small(*experts, f"train.expert_imbalance={imbalance}"), 1, steps=1, warmup=1)
        planned |= {d.first for d in found.quantities if d.name == "time step"}
    assert len(planned) == 1


@pytest.mark.parametrize(
    "layout",
    [
        ("layout.tensor=2", "layout.pipeline=2", "train.global_batch=64"),
        ("layout.context=2", "layout.shard=2", "layout.expert=2", "model.experts=4", "model.experts_per_token=2"),
        ("layout.replicate=1024", "layout.shard=8", "train.global_batch=16384"),
    ],
)
def test_a_rank_holds_what_the_plan_says(layout: tuple[str, ...]) -> None:
    run = small(*layout)
    found = rehearse(run, run.layout.world - 1, steps=1, warmup=1)
    by_name = {d.name: d for d in found.quantities}
    # Gradients of a single microbatch come after the peak.
    for owner in ("parameters", "optimizer", *["gradients"] * (run.accumulation > 1)):
        held = by_name[f"memory {owner}"]
        assert held.first == held.second > 0
    assert len(found.step_seconds) == 1
    assert by_name["time step"].second == found.step_seconds[0]
    assert found.of == run.accumulation
    if not found.gpu:  # nothing that was not measured is compared
        assert found.agrees
        assert not {"memory peak", "memory reserved", "kernels", "time compute"} & by_name.keys()
    assert found.microbatches == (6 if run.layout.pipeline > 1 else run.accumulation)  # enough for the peak of memory
    assert not dist.is_initialized()


def test_collectives_are_held_for_as_long_as_the_plan_says() -> None:
    run = small("layout.tensor=8", "layout.shard=2", "model.heads=8", "model.kv_heads=8", "cluster.chip=h100",
                "cluster.nodes=2", "train.device=cuda")  # fmt: skip
    job = job_of(run)
    seconds = planned_seconds(run, job)
    size = 1 << 26
    inside, between = seconds("tensor", "all_reduce", 8, size), seconds("shard", "all_reduce", 2, size)
    assert inside == collective_seconds(job.cluster, "all_reduce", size, 8, 1)
    assert between == collective_seconds(job.cluster, "all_reduce", size, 2, 8) > inside
    # An all-gather is told by what a rank puts in, and takes as long as what comes out of it.
    assert seconds("tensor", "all_gather", 8, size // 8) == collective_seconds(job.cluster, "all_gather", size, 8, 1)
    assert seconds("tied", "all_reduce", 2, size) == seconds("pipeline", "all_reduce", 2, size) > 0
    assert seconds("pipeline", "recv", 2, size) == 0  # the one who sends is held


@pytest.mark.parametrize(
    ("compute", "peak", "code"), [(1.06, 0.98, 0), (1.08, 1.0, 1), (1.0, 1.04, 1)], ids=["agrees", "slower", "larger"]
)
def test_a_rehearsal_agrees_within_what_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compute: float,
    peak: float,
    code: int,
) -> None:
    """Compute time within 7%, peak memory within 3%; other quantities are shown, and not judged."""
    told = (("time", "time compute", compute), ("time", "time step", 9.0), ("memory", "memory peak", peak))
    made = Rehearsal(1, 2, 4, tuple(Difference(account, name, 1.0, value) for account, name, value in told), (9.0,))
    asked: dict[str, object] = {}
    monkeypatch.setattr("shardwise.measure.rehearse.rehearse", lambda run, rank, **how: asked.update(how) or made)
    run = tmp_path / "run.toml"
    run.write_text("")
    words = ["verify", str(run), "--rehearse", "--rank", "1", "--hold", "--steps", "2", *(f"--{one}" for one in SMALL)]
    assert main([*words, "--layout.shard=2", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert (answer["agrees"], answer["microbatches"], answer["of_microbatches"]) == (code == 0, 2, 4)
    assert answer["quantities"][0] == dict(
        name="time compute", plan=1.0, run=compute, relative=pytest.approx(compute - 1)
    )
    assert (asked["hold"], asked["tune"], asked["steps"]) == (True, False, 2)
    assert main([*words, "--layout.shard=2"]) == code
    assert "2 of the step's 4 microbatches were run" in " ".join(capsys.readouterr().out.split())


def test_ranks_that_do_not_exist_and_options_that_do_not_fit_get_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="2 is not a rank of a layout of 2"):
        rehearse(small("layout.shard=2"), 2)
    path = tmp_path / "run.toml"
    path.write_text("")
    for wrong, said in (
        (["--rehearse", "--dry"], "choose one"),
        (["--hold"], "--hold, --tune and --trace belong to --rehearse"),
        (["--rank", "1"], "without them all ranks run"),
    ):
        assert main(["verify", str(path), *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_profile_of_a_rehearsal_makes_the_plan_of_what_was_measured() -> None:
    """GEMMs and attention of an H200 that trains without pause, divided by what the plan multiplies its curves by."""
    words = "model.preset=llama3-8b train.dtype=bfloat16 train.device=cuda cluster.chip=h200 train.seq_len=8192"
    run = read_run(None, [*words.split(), "train.global_batch=32", "train.microbatch=1"])
    job = job_of(run)
    parts = dict(step_time(prepare(job)).breakdown)
    whole = sum(parts[name] for name in ("matmul", "attention", "memory", "optimizer"))
    told = dict(parts, compute=whole, step=whole) | {"memory and optimizer": parts["memory"] + parts["optimizer"]}
    found = Rehearsal(
        0, 1, 1, tuple(Difference("time", f"time {name}", 1.0, took) for name, took in told.items()), (whole,)
    )
    beyond = found.beyond_curves(run)
    for category in ("matmul", "attention"):
        ops = [*layer(job, routed=False), *head(job)]
        curves = sum(
            (job.model.layers if op.part in ("attention", "ffn") else 1) * sum(op.seconds)
            for op in ops
            if op.category == category
        )
        assert parts[category] / beyond[category] == pytest.approx(32 * curves, rel=0.01)


def test_a_rehearsal_is_a_profile_that_the_planner_takes(tmp_path: Path) -> None:
    run, out = tmp_path / "run.toml", tmp_path / "profile.json"
    run.write_text("")
    options = [f"--{one}" for one in (*SMALL, "layout.shard=4")]
    words = ["bench", "--rehearse", str(run), "--rank", "1", "--out", str(out), "--device", "cpu", "--quiet"]
    assert main([*words, *options]) == 0
    measured = load_profile(out)
    assert {(point["m"], point["k"]) for point in measured.gemm} >= {(2 * 32, 32)}
    assert {(point["batch"], point["queries"]) for point in measured.attention} == {(2, 32)}
    assert {point["direction"] for point in measured.attention} == {"forward", "backward"}
    slower = json.loads(out.read_text())
    for point in slower["gemm"]:
        point["seconds"], point["tflops"] = 10 * point["seconds"], point["tflops"] / 10
    (tmp_path / "slower.json").write_text(json.dumps(slower))
    took = [
        plan(small("layout.shard=4", "cluster.chip=cpu", f"cluster.profile={path}")).account.breakdown["matmul"]
        for path in (out, tmp_path / "slower.json")
    ]
    assert took[1] > 5 * took[0]


def test_a_rehearsed_layout_may_be_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Run] = []

    def measured(run: Run, rank: int, say: object) -> Profile:
        asked.append(run)
        return empty_profile(torch.device("cpu"))

    monkeypatch.setattr("shardwise.measure.rehearse.rehearsed_profile", measured)
    run, out = tmp_path / "run.toml", tmp_path / "profile.json"
    run.write_text("")
    words = ["bench", "--rehearse", str(run), "--out", str(out), "--device", "cpu", "--quiet"]
    options = ("layout=auto", "cluster.chip=h100", "cluster.devices_per_node=2")
    assert main([*words, *(f"--{one}" for one in (*SMALL, *options))]) == 0
    assert not asked[0].layout.auto
    assert asked[0].layout.world == 2
