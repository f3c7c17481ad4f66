"""Plan equals run: operations, traffic, memory that stays and the executed schedule agree exactly, saved activations within a
hundredth, on single ranks of dry layouts; and what `shardwise verify` says of it. Real ranks are in
tests/parallel/test_layouts.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from patience import HANG_SECONDS

from shardwise.cli.entry import hide_deprecations
from shardwise.cli.machinery import terminal as progress
from shardwise.cli.main import main
from shardwise.ledger import Work
from shardwise.measure.counts.rounds import microbatches_to_run
from shardwise.measure.verify import TOLERANCE, Verdict, verify_dry
from shardwise.model.moe import layer as moe
from shardwise.model.quantized.nf4 import dequantize, quantize
from shardwise.parallel import expert
from shardwise.plan.trainer.tape import Tape
from shardwise.run import Run, UserError
from shardwise.run.axes import V_SHAPED
from shardwise.run.derive import logit_columns

Layout = dict[str, Any]
DRY: list[tuple[str, Layout]] = [
    ("dense", {}),
    ("dense", dict(shard=8)),
    ("mixture", dict(shard=8, expert=4, zero=1)),
    ("dense", dict(pipeline=4, shard=2, schedule="interleaved", chunks=1)),
    ("mixture", dict(pipeline=2, shard=4, expert=2, schedule="dualpipe-v")),
    ("tied", dict(pipeline=4, tensor=2)),
    ("mixture", dict(replicate=2, shard=12, expert=4, tensor=2, expert_tensor=True)),
    ("capacity", dict(shard=4, expert=2)),
    ("dense", dict(context=4, tensor=2)),
    ("mixture", dict(recompute="full")),
    *[("dense", dict(shard=8, zero=zero)) for zero in (1, 2)],
    *[("mixture", dict(shard=8, expert=4, zero=zero)) for zero in (2, 3)],
    *[("dense", dict(pipeline=4, shard=2, schedule=schedule, chunks=1))
      for schedule in ("gpipe", "1f1b", "breadth-first", "zb-h1")],
    *[("mixture", dict(pipeline=2, shard=4, expert=2, schedule=schedule)) for schedule in ("zb-v", "zb-h1", "1f1b")],
    ("dense", dict(context=4, tensor=2, context_method="gather")),
    ("mixture", dict(context=4, tensor=1, shard=2, expert=4, context_method="ulysses")),
    *[("dense", dict(tensor=4, shard=2, recompute=mode)) for mode in ("none", "attention", "full")],
    ("mixture", dict(tensor=2, shard=4, recompute="operations", recompute_operations=("norm", "ffn"))),
    ("dense", dict(tensor=4, pipeline=2, async_tensor=True)),
    ("latent", dict(tensor=4, shard=2)),
    *[("mixture", dict(shard=32, expert=4, zero=zero)) for zero in (1, 2, 3)],
]  # fmt: skip


def check(verdict: Verdict, run: Run) -> None:
    assert verdict.schedule
    assert verdict.actions >= 2 * run.accumulation
    assert not verdict.beyond(TOLERANCE), (run.layout, verdict.rank, verdict.beyond(TOLERANCE)[:5])


@pytest.mark.parametrize(("model", "layout"), DRY, ids=str)
@pytest.mark.drawn(group="dry ranks")
def test_dry_ranks_are_as_planned(model: str, layout: Layout) -> None:
    batch = (4 if layout.get("pipeline", 1) > 1 else 2) * layout.get("shard", 1)
    run = cases.make_run(model, layout, **cases.layers_for(layout), global_batch=batch, microbatch=1)
    check(verify_dry(run, run.layout.world - 1), run)


@pytest.mark.parametrize(
    "layout", [dict(tensor=2), dict(tensor=2, pipeline=2, schedule="zb-h1"), dict(tensor=2, context=2)], ids=str
)
@pytest.mark.drawn(group="dry ranks")
def test_several_rows_of_tensor_ranks_are_as_planned(layout: Layout) -> None:
    run = cases.make_run("dense", layout, **cases.layers_for(layout), global_batch=8, microbatch=2)
    check(verify_dry(run, run.layout.world - 1), run)


@pytest.mark.parametrize("adapter", [name for name in cases.ADAPTERS if name])
@pytest.mark.parametrize("layout", [dict(shard=4, expert=2, recompute="full"), dict(tensor=2, pipeline=2)], ids=str)
@pytest.mark.drawn(group="dry ranks")
def test_dry_ranks_with_adapters_are_as_planned(layout: Layout, adapter: str) -> None:
    """Matrices of 4 bits have no values there; what is quantized afterwards in this process has."""
    model = "wide mixture" if adapter.startswith("qlora") else "mixture"
    sizes = dict(layers=2, global_batch=2 * layout.get("shard", 1), microbatch=1)
    run = cases.make_run(model, layout, **sizes, adapter=adapter, optimizer="adamw")
    check(verify_dry(run, run.layout.world - 1), run)
    assert dequantize(*quantize(torch.ones(2, 64)), 0, 1, torch.float32).tolist() == [[1.0] * 64] * 2


@pytest.mark.parametrize("layout", [dict(recompute="full", shard=2), dict(tensor=2)], ids=str)
@pytest.mark.drawn(group="dry ranks")
def test_narrow_arithmetic_is_as_planned(layout: Layout) -> None:
    """Matrices are cast where they are used, also by a repeated pass that stops before the product."""
    sizes = dict(layers=2, global_batch=2 * layout.get("shard", 1), microbatch=1)
    run = cases.make_run("dense", layout, **sizes, dtype="bfloat16")
    check(verify_dry(run, run.layout.world - 1), run)


@pytest.mark.parametrize("fp8", ["", "tensorwise"])
@pytest.mark.parametrize("parts", ["", " + no query norm #0", " + alibi #0", " + no query norm #0 + alibi #0"])
@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.drawn(group="dry ranks")
def test_the_deferred_gradients_of_a_ranks_only_head_are_as_planned(method: str, parts: str, fp8: str) -> None:
    """They are views of what attention gave, which may be wider; of several heads they are copies."""
    layout = dict(context=2, tensor=2, pipeline=2, schedule="zb-h1", context_method=method)
    sizes = dict(layers=2, global_batch=3, microbatch=1, dtype="bfloat16", seq_len=32)
    if fp8:
        sizes |= dict(device="cuda", fp8=fp8)
    run = cases.make_run(f"dense{parts}", layout, **sizes)
    assert not verify_dry(run, run.layout.world // 2).beyond(dict(work=0.0, traffic=0.0, memory=0.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["mixture", "neox", "gemma"])
@pytest.mark.drawn(group="dry ranks")
def test_what_nobody_saves_is_not_recomputed(model: str, dtype: str) -> None:
    """An RMSNorm of 16 bits without a kernel saves no input, which then nobody makes again unless the norm is made again."""
    layout = dict(recompute="optimal", recompute_budget=3e-5)
    run = cases.make_run(model, layout, layers=4, global_batch=4, microbatch=4, dtype=dtype, seq_len=32)
    assert not verify_dry(run, 0).beyond(dict(work=0.0, traffic=0.0, memory=0.0))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, dtype) for layout in ({}, dict(pipeline=2), dict(shard=2)) for dtype in ("float64", "bfloat16")],
    ids=str,
)
@pytest.mark.drawn(group="dry ranks")
def test_a_loss_in_chunks_is_as_planned(layout: Layout, dtype: str) -> None:
    """It does the work of its backward pass in the forward pass, and keeps two gradients instead of all scores."""
    sizes = dict(layers=2, global_batch=2 * layout.get("shard", 1), microbatch=1)
    run, plain = (cases.make_run("dense", layout, **sizes, dtype=dtype, loss=loss) for loss in ("chunked", "plain"))
    verdict = verify_dry(run, run.layout.world - 1)
    check(verdict, run)
    at_once = verify_dry(plain, run.layout.world - 1).measured.work.flops["head"]
    vocab = run.model.vocab
    padded = (2 * logit_columns(vocab) + vocab) / vocab  # the matrix's gradient has no columns of padding
    assert verdict.measured.work.flops["head"]["forward"] == pytest.approx(padded * at_once["forward"], rel=1e-12)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", dict(tensor=4, pipeline=2, shard=2)),  # fewer heads of keys than tensor ranks
        ("mixture", dict(tensor=2, shard=4, expert=2, expert_tensor=True)),
        ("dense", dict(shard=8)),
        ("mixture", dict(pipeline=2, shard=4, expert=4, schedule="zb-v")),
        ("softmax", dict(context=2, replicate=2, expert=2)),
        ("latent", dict(tensor=4, shard=2)),
    ],
    ids=str,
)
@pytest.mark.drawn(group="dry ranks")
def test_muon_on_dry_ranks_is_as_planned(model: str, layout: Layout) -> None:
    batch = 2 * layout.get("shard", 1) * layout.get("replicate", 1)
    run = cases.make_run(model, layout, **cases.layers_for(layout), global_batch=batch, microbatch=1, optimizer="muon")
    verdict = verify_dry(run, run.layout.world - 1)
    check(verdict, run)
    assert verdict.measured.work.flops["parameters"]["optimizer"] > 0


def test_the_demo_is_as_planned(capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo.toml"
    assert main(["verify", str(demo), "--dry", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    update = next(d for d in rank["differences"] if d["name"] == "flops parameters optimizer")
    assert update["plan"] == update["run"] == 2_768_240_640


def test_bytes_moved_are_told_by_part_and_pass() -> None:
    moved = verify_dry(
        cases.make_run("mixture", dict(recompute="full"), layers=2, global_batch=1), 0
    ).measured.work.bytes
    for part in ("norm", "ffn", "experts", "router", "attention"):
        assert all(moved[part][each] > 0 for each in ("forward", "recompute", "backward_input")), part
    assert moved["embedding"]["forward"] > 0
    assert moved["parameters"]["optimizer"] > 0


FEWER: list[tuple[str, Layout, int, tuple[int, ...]]] = [
    ("few", dict(shard=4, expert=2, zero=2), 5, (3,)),
    ("dense", dict(pipeline=2, shard=2, zero=3), 8, (3,)),
    ("dense", dict(pipeline=2, shard=2, zero=1, schedule="dualpipe-v"), 7, (0,)),
    ("mixture", dict(shard=4, expert=2, zero=2), 6, (3,)),
    ("dense", dict(pipeline=2, tensor=2, shard=2, zero=1, schedule="interleaved", chunks=2), 12, (0, 7)),
    ("dense", dict(shard=4, zero=3), 9, (0,)),
    ("dense", dict(shard=4, secondary_shard=2), 9, (3,)),
    ("dense", dict(pipeline=2, shard=2, zero=3), 11, (0, 3)),
    ("mixture", dict(pipeline=2, shard=2, zero=1, schedule="dualpipe-v"), 12, (0, 3)),
    ("tied", dict(pipeline=4, tensor=2), 23, (0, 7)),
    ("dense", dict(pipeline=4, shard=2, zero=3, schedule="interleaved", chunks=1), 24, (0, 7)),
    ("dense", dict(pipeline=2, shard=2, zero=3, schedule="zb-h1"), 12, (0, 3)),
    ("mixture", dict(pipeline=2, shard=2, zero=3, schedule="zb-v", recompute="full"), 12, (0, 3)),
    ("dense", dict(pipeline=3, context=2, zero=1, schedule="zb-h1"), 16, (0, 5)),
    ("mixture", dict(pipeline=2, shard=2, zero=1, schedule="dualpipe"), 12, (0, 3)),
    ("dense", dict(pipeline=4, shard=2, zero=3, schedule="dualpipe"), 20, (0, 2, 4)),
]


@pytest.mark.parametrize(
    ("model", "layout", "microbatches", "rank"),
    [(*job, rank) for *job, ranks in FEWER for rank in ranks],
    ids=str,
)
@pytest.mark.drawn(group="dry ranks")
def test_a_few_microbatches_say_what_all_of_them_do(model: str, layout: Layout, microbatches: int, rank: int) -> None:
    """Every number of the verdict is the one of the step that is run whole, at either end of the pipeline."""
    batch = microbatches * layout.get("shard", 1)
    # A layer a stage, of which a rank has two in the shape of a V.
    layers = max(2, layout.get("pipeline", 1) * (2 if layout.get("schedule") in V_SHAPED else layout.get("chunks", 1)))
    run = cases.make_run(model, layout, layers, global_batch=batch, microbatch=1)
    few, whole = verify_dry(run, rank), verify_dry(run, rank, whole=True)
    assert 4 <= few.microbatches < microbatches == run.accumulation
    assert whole.microbatches == 0
    assert few.differences() == whole.differences()
    assert few.measured.work.bytes == whole.measured.work.bytes
    check(whole, run)


@pytest.mark.parametrize(
    ("layout", "microbatches", "run_of_them", "middle"),
    [
        (dict(schedule="gpipe"), 12, 12, range(0)),  # holds every microbatch
        (dict(), 4, 4, range(0)),  # too few
        (dict(), 12, 6, range(2, 4)),  # a round of ZeRO-3
        (dict(schedule="interleaved", zero=1), 12, 4, range(2, 3)),
        (dict(schedule="interleaved", zero=1), 13, 13, range(0)),  # the last round moves every round before it
        (dict(schedule="dualpipe", zero=1), 20, 4, [1, 3]),  # one each way
        (dict(schedule="dualpipe"), 20, 8, [2, 6]),  # four rounds of ZeRO-3
    ],
    ids=str,
)
def test_a_step_without_a_middle_is_run_whole(
    layout: Layout, microbatches: int, run_of_them: int, middle: range
) -> None:
    run = cases.make_run("dense", dict(pipeline=2) | layout, global_batch=microbatches, microbatch=1)
    assert microbatches_to_run(run, 0) == (run_of_them, middle)


def test_a_plan_that_differs_is_told_by_all_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.measure import verify

    run = cases.make_run("dense", dict(pipeline=2), layers=2, global_batch=8, microbatch=1)
    said: list[str] = []
    monkeypatch.setattr(verify, "work", lambda run, rank: Work({"ffn": {"forward": 1.0}}))
    verdict = verify_dry(run, 1, said.append)
    assert not verdict.agrees(TOLERANCE)
    assert verdict.microbatches == 0
    assert any(text.startswith("building rank 1 of 2, to run 6 of 8 microbatches") for text in said)
    assert "plan and run differ; running all microbatches, to be sure" in said
    assert any(text.startswith("counting FLOPs, traffic and memory: action 3 of 12") for text in said)


def test_long_work_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PAUSE", 1e9)
    with progress.progress_line() as say:
        say("short work says nothing")
        monkeypatch.setattr(progress, "PAUSE", 0.0)
        say("counting")
    assert capsys.readouterr().err == "counting\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.progress_line() as say:
        say("counting")
    assert capsys.readouterr().err == "\r\033[Kcounting\r\033[K"


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(UserError, match="not a rank"):
        verify_dry(cases.make_run("dense", dict(shard=2)), 2)


def test_a_plan_that_is_wrong_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from shardwise.ledger import Traffic
    from shardwise.measure import verify

    path = tmp_path / "run.toml"
    sections = "[model]\nlayers = 2\nhidden = 64\nheads = 4\n[layout]\nshard = 2\n"
    path.write_text(sections + "[train]\nglobal_batch = 4\nmicrobatch = 1\nseq_len = 32\n")
    assert main(["verify", str(path), "--dry", "--rank", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agrees"] is True
    monkeypatch.setattr(verify, "traffic", lambda run, rank: Traffic({"shard": {"all_gather": 1.0}}))
    assert main(["verify", str(path), "--dry", "--rank", "1"]) == 1
    assert "all gather" in capsys.readouterr().out


@pytest.mark.drawn(group="commands")
def test_ranks_that_differ_from_the_plan_are_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\nlayers = 1\nhidden = 16\nheads = 2\n[layout]\nshard = 2\n[train]\nglobal_batch = 2\nseq_len = 16\n"
    )
    command = [sys.executable, "-m", "shardwise", "verify", str(path), "--train.device=cpu", "--steps", "1", "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([*sys.path])}
    done = subprocess.run(
        [*command, "--cluster.chip=cpu", "--time", "0.000001"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=HANG_SECONDS,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["agrees"] is False
    assert [each.name for each in tmp_path.iterdir()] == ["run.toml"]


def test_warnings_of_pytorch_s_own_future_reach_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they reach nobody from a real rank is known from the test before this one: nothing is on its stderr."""
    sayings = [
        (FutureWarning, "`torch.distributed.reduce_scatter_tensor` is deprecated", "torch.distributed", True),
        (UserWarning, "The given call is Deprecated", "torch.nn", True),
        (FutureWarning, "torch.cuda.amp is deprecated", "shardwise.train.step", True),
        (UserWarning, "the memory of this GPU is nearly full", "torch.cuda", False),
        (FutureWarning, "something of the user's own is deprecated", "my_program", False),
    ]

    def heard() -> list[bool]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            hide_deprecations()
            for number, (category, text, module, _) in enumerate(sayings):
                warnings.warn_explicit(text, category, "file.py", number, module)
        return [any(str(one.message) == text for one in caught) for _, text, _, _ in sayings]

    monkeypatch.setattr(sys, "warnoptions", [])
    assert heard() == [not hidden for *_, hidden in sayings]
    monkeypatch.setattr(sys, "warnoptions", ["default"])  # who asks for warnings gets them
    assert all(heard())
    # Whoever imports the package decides himself.
    before = list(warnings.filters)
    assert main(["--version"]) == 0
    assert warnings.filters == before


@pytest.mark.parametrize("more", [[], ["--dry"]])
def test_a_time_that_nobody_plans_is_not_compared(
    more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("")
    assert main(["verify", str(tmp_path / "run.toml"), "--time", "0.1", *more]) == 2
    assert "there is no time to compare" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--train.dtype=bfloat16"]], ids=str)
@pytest.mark.drawn(1)
def test_a_run_meant_for_a_gpu_is_held_against_what_runs_here(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(
        "[model]\nlayers = 2\nhidden = 32\nheads = 2\n[train]\nglobal_batch = 2\nseq_len = 32\n"
    )
    arguments = ["verify", str(tmp_path / "run.toml"), "--cluster.chip=h100", "--steps", "1", "--json", *more]
    assert main(arguments) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["rank"] == 0


ROUTED: list[tuple[str, dict[str, Any], str]] = [
    ("mixture", dict(), "bfloat16"),
    ("capacity", dict(), "float32"),
    ("softmax", dict(shard=2, expert=2), "bfloat16"),
    ("mixture", dict(tensor=2, expert_tensor=True), "bfloat16"),
]


@pytest.mark.parametrize(("model", "layout", "dtype"), ROUTED, ids=str)
@pytest.mark.drawn(group="dry ranks")
def test_a_mixture_moved_by_kernels_does_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, model: str, layout: dict[str, Any], dtype: str
) -> None:
    """As on a GPU but for the norms and attention: a dry run, which needs the shapes of the kernels' results alone."""
    narrow = dtype == "bfloat16"
    for module in (moe, expert):
        monkeypatch.setattr(module, "has_fused_kernels", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr(moe, "multiplies", lambda x: narrow)
    monkeypatch.setattr(
        moe, "uses_grouped_gemm", lambda x, weight: narrow and not any(size % 8 for size in weight.shape[1:])
    )
    monkeypatch.setattr(Tape, "fused_dispatch", True)
    monkeypatch.setattr(Tape, "fused_gemms", narrow)
    run = cases.make_run(model, layout, dtype=dtype, layers=2)
    differences = verify_dry(run, 0).differences()
    # How many rows a capacity leaves, a run without data cannot tell.
    assert not [
        d for d in differences if d.relative and not (model == "capacity" and d.name.startswith("flops experts"))
    ]
    assert {"work", "memory"} <= {d.account for d in differences}
