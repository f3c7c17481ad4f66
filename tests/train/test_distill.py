"""Distillation against the divergences of whole distributions, written down here; and what is stored beside the data against a
second network in memory. That it is the same on every layout is in tests/parallel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool

from shardwise.cli.main import main
from shardwise.data.build import build
from shardwise.data.chat.job import ChatOptions
from shardwise.data.open import open_data
from shardwise.measure.verify import TOLERANCE, Verdict, counted, planned, random_batch
from shardwise.model.loss import ChunkedCrossEntropy, LinearCrossEntropy
from shardwise.plan.plan import plan
from shardwise.run import Run, UserError, read_run, run_from_dict
from shardwise.run.write import to_toml
from shardwise.train import loop
from shardwise.train.batches.reference import Reference
from shardwise.train.batches.score import score
from shardwise.train.objectives.distill import divergences
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.step import TrainState


def whole_divergence(student: torch.Tensor, teacher: torch.Tensor, reverse: bool) -> torch.Tensor:
    """KL of two sets of logits, by the definition."""
    p, q = (each.softmax(-1) for each in ((student, teacher) if reverse else (teacher, student)))
    return (p * torch.log(p / q)).sum(-1)


def coarse_divergence(student: torch.Tensor, teacher: torch.Tensor, count: int, reverse: bool) -> torch.Tensor:
    """The same where all but the teacher's likeliest tokens are one outcome."""
    best = teacher.topk(count).indices
    grouped = []
    for logits in (student, teacher):
        p = logits.softmax(-1)
        kept = p.gather(-1, best)
        grouped.append(torch.cat((kept, 1 - kept.sum(-1, keepdim=True)), -1).log())
    return whole_divergence(*grouped, reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("head", [LinearCrossEntropy(), ChunkedCrossEntropy(chunk_bytes=4000)])
def test_loss_and_gradients_are_those_of_the_definition(head: Any, count: int, reverse: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    matrix = torch.randn(40, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    teacher = torch.randn(2, 6, 40, dtype=torch.float64, generator=generator)
    said = teacher.log_softmax(-1).topk(count)
    logits = x @ matrix.mT
    want = (
        whole_divergence(logits, teacher, reverse)
        if count == 40
        else coarse_divergence(logits, teacher, count, reverse)
    )
    gradients = torch.autograd.grad(want.sum(), (x, matrix))
    got = head(x, matrix, said.indices, make=lambda own: divergences(own, said.values, count == 40, reverse).sum())
    torch.testing.assert_close(got, want.sum(), rtol=1e-11, atol=0)
    for mine, theirs in zip(torch.autograd.grad(got, (x, matrix)), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    if count < 40:
        assert (want < whole_divergence(logits, teacher, reverse)).all()


def test_the_likeliest_tokens_are_those_of_all_logits() -> None:
    x, matrix = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(33, 8, dtype=torch.float64)
    tokens, logprobs = ChunkedCrossEntropy(chunk_bytes=700).top(x, matrix, 7)
    want = (x @ matrix.mT).log_softmax(-1).topk(7)
    assert torch.equal(tokens, want.indices)
    torch.testing.assert_close(logprobs, want.values)


@pytest.mark.parametrize("kind", [name for name in cases.OBJECTIVES if name.startswith("distill")])
def test_a_step_is_the_mean_over_tokens_of_what_both_models_say(kind: str) -> None:
    run = cases.make_run("dense", {}, layers=2, objective=kind, global_batch=4, microbatch=2)
    state, batch, asked = TrainState(run), cases.batch(0, True, 4), run.objective
    assert state.reference is not None
    inputs = [torch.from_numpy(each) for each in (batch.tokens, batch.positions, batch.documents)]  # type: ignore[arg-type]
    with torch.no_grad():
        student, teacher = (
            model(inputs[0], positions=inputs[1], documents=inputs[2]).result / asked.temperature
            for model in (state.model, state.reference.models[0])
        )
    assert batch.labels is not None
    counted_here = torch.from_numpy((batch.targets >= 0) & (batch.labels > 0))  # of preferences, what is wanted
    reverse = asked.divergence == "reverse"
    found = (
        coarse_divergence(student, teacher, asked.teacher_tokens, reverse)
        if asked.teacher_tokens
        else whole_divergence(student, teacher, reverse)
    )[counted_here].mean()
    own = student.log_softmax(-1).gather(-1, torch.from_numpy(batch.targets.clip(0))[..., None])[..., 0]
    nll = -own[counted_here].mean()
    result = state.train_step(batch)
    want = asked.temperature**2 * found + asked.cross_entropy * nll
    assert result.loss.item() == pytest.approx(want.item(), rel=1e-10)
    assert result.read_measured() == pytest.approx([found.item(), nll.item()], rel=1e-10)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Pairs, and a text."""
    pairs = [{"prompt": f"{n}?", "chosen": "yes" * n, "rejected": "no" + "o" * n} for n in range(1, 12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    build([tmp_path / "pairs.jsonl"], tmp_path / "pairs", workers=1, chat=ChatOptions())
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    build([tmp_path / "text.txt"], tmp_path / "text", workers=1)
    return tmp_path


MODEL = dict(layers=2, hidden=16, heads=2, kv_heads=2, ffn=32)


def tuned(folder: Path, name: str, kind: str, **objective: Any) -> Run:
    train = dict(steps=2, global_batch=2, microbatch=1, seq_len=32, eval_every=2, eval_sequences=2, warmup=0, lr=0.01)
    return run_from_dict(
        dict(
            model=MODEL, objective=dict(kind=kind) | objective, data=dict(sets=[str(folder / name)], holdout=0.2),
            train=train | dict(dtype="float64", device="cpu", weights=str(folder / "begin")),
        )
    )  # fmt: skip


def trained(run: Run, out: Path) -> list[dict[str, Any]]:
    loop.train(run, out)
    kept = ("loss", "kl", "nll", "reward_margin", "eval_loss", "grad_norm")
    return [{key: record[key] for key in kept if key in record} for record in read_metrics(out)]


def pretrained(folder: Path, name: str, **more: Any) -> Path:
    train = dict(steps=1, global_batch=2, seq_len=32, eval_every=0, dtype="float64", device="cpu", seed=len(name))
    loop.train(run_from_dict(dict(model=MODEL | more, train=train)), folder / name)
    return folder / name


@pytest.mark.drawn(group="whole runs")
def test_what_is_stored_teaches_as_the_network_does(sets: Path, ranks: RankPool, capsys: Any) -> None:
    """Also what two ranks of another layout wrote, and of a reference as of a teacher."""
    pretrained(sets, "begin")
    teacher = pretrained(sets, "teacher", hidden=24, layers=3)
    for name, kind, more in (
        ("text", "distill", dict(teacher=str(teacher), teacher_tokens=9)),
        ("pairs", "dpo", {}),
    ):
        run = tuned(sets, name, kind, **more)
        want = trained(run, sets / f"{name} {kind}")
        stored = replace(run, objective=replace(run.objective, stored=True))
        with pytest.raises(UserError, match=r"data score.*of this run writes it"):
            open_data(stored)
        file = sets / "run.toml"
        file.write_text(to_toml(stored))
        if kind == "dpo":
            assert main(["data", "score", str(file)]) == 0
            assert "log-probabilities each" in capsys.readouterr().out
        else:
            laid_out = replace(read_run(file), layout=replace(run.layout, context=2))
            ranks.run(2, scored, laid_out)
        got = trained(stored, sets / f"{name} {kind} stored")
        assert len(got) == len(want) > 2
        for one, other in zip(got, want, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-12)
        assert want[0] != pytest.approx(want[1], rel=1e-3)
        state = TrainState(stored)
        assert state.reference is None
        batch = random_batch(stored)
        account, same, actions = counted(state, batch)
        assert not Verdict(0, planned(stored, 0), account, same, actions).beyond(TOLERANCE | dict(memory=0.0))


def scored(rank: int, run: Run) -> None:
    score(run, lambda text: None)


def test_what_is_stored_must_fit_the_run(sets: Path) -> None:
    pretrained(sets, "begin")
    teacher = str(pretrained(sets, "teacher"))
    run = tuned(sets, "text", "distill", teacher=teacher, teacher_tokens=5, stored=True)
    score(run, lambda text: None)
    few = open_data(replace(run, objective=replace(run.objective, teacher_tokens=3))).train.take([0, 5])
    assert few.teacher_tokens is not None
    assert few.teacher_tokens.shape == (2, 32, 3)
    best = open_data(run).train.take([0, 5]).teacher_tokens
    assert best is not None
    assert np.array_equal(few.teacher_tokens, best[..., :3])
    for section, key, value, phrase in (
        ("objective", "teacher_tokens", 6, "has the 5 likeliest tokens"),
        ("objective", "temperature", 2.0, "was made with temperature = 1.0"),
        ("train", "seq_len", 16, "windows of 32 tokens"),
    ):
        other = replace(run, **{section: replace(getattr(run, section), **{key: value})})
        with pytest.raises(UserError, match=phrase):
            open_data(other)
    (sets / "text" / "scores-teacher" / "logprobs.bin").write_bytes(b"")
    with pytest.raises(UserError, match="is incomplete"):
        open_data(run)


def test_mistakes_of_a_teacher_are_sentences(tmp_path: Path) -> None:
    base = dict(model=dict(preset="llama3-1b"), cluster=dict(chip="h200"))
    for objective, phrase in (
        ({}, r"objective\.teacher: is empty"),
        (dict(teacher="nowhere/x"), "is no checkpoint, run folder or preset"),
        (dict(teacher="gpt2-124m"), "vocabulary of"),
        (dict(teacher="llama3-8b", cross_entropy=0.5, temperature=2.0), "use one of the two"),
        (dict(stored=True, teacher_tokens=0), "would store the whole vocabulary"),
    ):
        with pytest.raises(UserError, match=phrase):
            run_from_dict(base | dict(objective=dict(kind="distill") | objective))
    with pytest.raises(UserError, match=r"does not fit layout\.tensor"):
        run_from_dict(
            base
            | dict(objective=dict(kind="distill", teacher="llama3-8b"), layout=dict(tensor=3), train=dict(seq_len=3072))
        )
    with pytest.raises(UserError, match="learns nothing from numbers beside the data"):
        run_from_dict(dict(objective=dict(kind="sft", stored=True)))


def test_a_teacher_that_is_drawn_names_likeliest_tokens() -> None:
    run = cases.make_run("dense", {}, objective="distill", parametrization="mup", base_width=8, base_layers=1)
    train_state = TrainState(run)
    assert isinstance(train_state.reference, Reference)
    (teacher,) = train_state.reference.models
    (student,) = train_state.parallel.models
    assert teacher.head is not None
    assert student.head is not None
    assert teacher.head.weight.std() > 0
    assert not student.head.weight.any()


def test_the_plan_of_a_larger_teacher_takes_longer_and_holds_more() -> None:
    def planned_with(**objective: Any) -> tuple[float, float]:
        run = run_from_dict(
            dict(
                model=dict(preset="llama3-1b"), cluster=dict(chip="h200"), objective=dict(kind="distill") | objective,
                train=dict(seq_len=4096, global_batch=4, microbatch=1),
            )
        )  # fmt: skip
        found = plan(run)
        return found.account.step_seconds, found.account.memory.peak

    stored, small, large = (
        planned_with(**each) for each in (dict(stored=True), dict(teacher="llama3-3b"), dict(teacher="llama3-8b"))
    )
    assert stored[0] < small[0] < large[0]
    assert stored[1] + 6e9 < small[1]
    assert small[1] + 9e9 < large[1]
