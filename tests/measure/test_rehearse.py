"""One rank of a job is rehearsed with stand-ins for its collectives: its memory is the plan's, and every layout can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.cli.main import main
from shardwise.hardware import load_profile
from shardwise.measure.rehearse import rehearse
from shardwise.measure.stand_in import repeat, stand_in_collectives
from shardwise.plan.plan import plan
from shardwise.run import Run, UserError, read_run

SMALL = ("model.layers=4", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.vocab=64", "train.seq_len=32",
         "train.global_batch=16", "train.microbatch=2", "train.device=cpu")  # fmt: skip


def small(*more: str) -> Run:
    return read_run(None, [*SMALL, *more])


def test_stand_ins_give_tensors_of_the_right_shape() -> None:
    with stand_in_collectives(3, 8):
        mine, whole = torch.arange(4.0), torch.empty(32)
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole, mine.repeat(8))
        pair = dist.new_group([2, 3])
        half = torch.empty(2)
        dist.reduce_scatter_tensor(half, mine, group=pair)
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


@pytest.mark.parametrize(
    "layout",
    [
        ("layout.shard=4",),
        ("layout.tensor=2", "layout.pipeline=2"),
        ("layout.context=2", "layout.context_method=ring", "layout.shard=2"),
        ("layout.shard=4", "layout.expert=2", "model.experts=4", "model.experts_per_token=2"),
        ("layout.replicate=1024", "layout.shard=8", "train.global_batch=16384"),
    ],
)
def test_a_rank_holds_what_the_plan_says(layout: tuple[str, ...]) -> None:
    run = small(*layout)
    found = rehearse(run, run.layout.world - 1, steps=1, warmup=1)
    by_name = {d.name: d for d in found.quantities}
    for owner in ("parameters", "optimizer"):
        assert by_name[f"memory {owner}"].second > 0
    assert by_name["memory parameters"].relative == by_name["memory optimizer"].relative == 0
    assert found.microbatches <= found.of == run.accumulation
    assert not dist.is_initialized()


def test_the_answer_is_for_programs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    options = [f"--{one}" for one in SMALL]
    code = main(
        ["verify", str(path), "--rehearse", "--rank", "1", "--steps", "1", "--json", *options, "--layout.shard=2"]
    )
    answer = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["agrees"] else 1)
    assert {"name", "plan", "run", "relative"} <= set(answer["quantities"][0])
    assert {"time compute", "memory peak", "kernels"} <= {each["name"] for each in answer["quantities"]}


def test_ranks_that_do_not_exist_and_options_that_do_not_fit_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 is not a rank of a layout of 2"):
        rehearse(small("layout.shard=2"), 2)
    path = tmp_path / "run.toml"
    path.write_text("")
    for wrong in (["--rehearse", "--dry"], ["--hold"], ["--rank", "1"]):
        assert main(["verify", str(path), *wrong]) == 2


def test_a_rehearsal_is_a_profile_that_the_planner_takes(tmp_path: Path) -> None:
    run, out = tmp_path / "run.toml", tmp_path / "profile.json"
    run.write_text("")
    options = [f"--{one}" for one in (*SMALL, "layout.shard=4")]
    words = ["bench", "--rehearse", str(run), "--rank", "1", "--out", str(out), "--device", "cpu", "--quiet"]
    assert main([*words, *options]) == 0
    measured = load_profile(out)
    assert {(point["m"], point["k"]) for point in measured.gemm} >= {(2 * 32, 32)}
    assert all(point["seconds"] > 0 for point in measured.gemm)
    planned = [plan(small("layout.shard=4", "cluster.chip=cpu", *more)) for more in ((), (f"cluster.profile={out}",))]
    assert planned[0].account.breakdown["matmul"] != planned[1].account.breakdown["matmul"]
