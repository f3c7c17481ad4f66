"""GRPO on one process: the engine draws with the trainer's own weights, a run learns its task, and goes on after a stop as if
there had been none."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from grpo_runs import grpo_run

from shardwise.checkpoint.format import read_manifest
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.state import buffers
from shardwise.cli.main import main
from shardwise.plan.plan import plan
from shardwise.run import Run, UserError, to_toml
from shardwise.train.faults.guard import Guard
from shardwise.train.loop import train
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.step import TrainState
from shardwise.tune.grpo import GrpoSource
from shardwise.tune.rollouts import Rollouts, sampling_of
from shardwise.tune.source import source_of


def records(out: Path, name: str = "loss") -> list[dict[str, Any]]:
    """The steps of a run, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_s", "mfu", "memory_gib", "rollout_seconds", "rollout_tokens_per_s")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines if name in line]


def attached(run: Run) -> GrpoSource:
    source = GrpoSource(run)
    source.attach(TrainState(run), print, lambda _: None)
    return source


def test_the_engine_reads_the_trainers_memory_and_sees_its_steps(task: Path) -> None:
    source = attached(grpo_run(task))
    state, rollouts = source.state, source.rounds.rollouts
    held = {each.name: each.parameter for each in state.parallel.parameters}
    served = dict(rollouts.engine.runner.model.named_parameters())
    assert served.keys() == held.keys()
    assert all(served[name].data_ptr() == held[name].data_ptr() for name in held)
    assert not rollouts.weights.copied
    prompts = [prompt.tokens for prompt in source.prompts.take(np.arange(3))]
    before = rollouts.draw(prompts, [0, 1, 2], 1, sampling_of(source.run), 4)
    again = rollouts.draw(prompts[::-1], [2, 1, 0], 1, sampling_of(source.run), 4)
    assert before.tokens[:4] == again.tokens[8:]  # whatever stands beside them
    batches = source.batches(2)
    for _ in range(2):
        state.train_step(next(batches))
    rollouts.update()
    assert rollouts.engine.pool.cached == 0
    drawn = rollouts.draw(prompts, [0, 1, 2], 1, sampling_of(source.run), 4)
    for n, (tokens, logprobs) in enumerate(zip(drawn.tokens, drawn.logprobs, strict=True)):
        whole = torch.tensor([[*prompts[n // 4].tolist(), *tokens]])
        with torch.no_grad():
            scores = state.model(whole[:, :-1]).result[0].log_softmax(-1)
        expected = scores.gather(1, whole[0, 1:, None])[-len(tokens) :, 0]
        assert torch.allclose(expected, torch.tensor(logprobs, dtype=torch.float64), atol=1e-10, rtol=0)


@pytest.mark.drawn(group="whole runs")
def test_a_run_learns_its_task(task: Path, tmp_path: Path) -> None:
    file = tmp_path / "letters.py"
    file.write_text(
        "def share(prompt, completion, row):\n    return sum(c < 'A' for c in completion) / max(1, len(completion))\n"
    )
    objective = dict(rewards=[f"{file}:share"], group=8)
    run = grpo_run(task, train=dict(steps=15, global_batch=32, lr=3e-2, eval_every=15), objective=objective)
    train(run, tmp_path / "out", open_source=source_of)
    steps = records(tmp_path / "out")
    assert steps[0]["reward"] < 0.3
    assert steps[-1]["reward"] > 0.5
    assert all(step["mismatch"] < 1e-12 and step["clip_fraction"] == 0 for step in steps)
    assert {"reward_std", "reward/share", "completion_tokens", "completion_cut", "filtered_groups", "kl"} <= steps[
        0
    ].keys()
    assert records(tmp_path / "out", "eval_reward")[-1]["eval_reward"] > 0.5
    for step in (each for each in read_metrics(tmp_path / "out") if "loss" in each):  # padding is no token
        assert step["tokens_per_s"] * step["seconds"] == pytest.approx(step["step_tokens"])
        assert 32 * step["completion_tokens"] + 32 <= step["step_tokens"] < 32 * 16
    assert steps[-1]["tokens"] == sum(step["step_tokens"] for step in steps)


def test_a_plan_counts_no_padding(task: Path) -> None:
    prompts = source_of(grpo_run(task)).prompts  # type: ignore[attr-defined]
    lengths = [len(prompt.tokens) for prompt in prompts.take(np.arange(prompts.count))]
    keys = dict(cluster=dict(chip="h200"))
    short, long = (
        plan(grpo_run(task, train=dict(seq_len=n, dtype="bfloat16", device="cuda"), **keys)) for n in (32, 64)
    )
    assert short.account.tokens == long.account.tokens == 8 * (round(np.mean(lengths)) + 6)
    assert short.account.step_seconds < long.account.step_seconds


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "ahead"])
@pytest.mark.drawn(group="whole runs")
def test_a_stopped_run_goes_on_as_if_it_had_not_been(task: Path, tmp_path: Path, kind: str) -> None:
    """Also where the stop falls between the steps of one round of answers."""
    more: dict[str, Any] = dict(minibatches=2, iterations=2) if kind == "dr_grpo" else {}
    if kind == "ahead":
        kind, more = "dapo", dict(asynchronous=True, iterations=2, filter_rounds=2)
    rewards = [f"{task / 'rewards.py'}:letters", f"{task / 'rewards.py'}:short"]
    objective = (
        dict(variant=kind, rewards=rewards, reward_weights=[1.0, 0.5], overlong_tokens=2, temperature=0.9) | more
    )

    def run(steps: int) -> Run:
        return grpo_run(task, train=dict(steps=steps, dtype="float32"), objective=objective)

    train(run(7), tmp_path / "whole", open_source=source_of)
    train(run(3), tmp_path / "parts", open_source=source_of)
    train(run(7), tmp_path / "parts", open_source=source_of)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    last = [read_manifest(tmp_path / name / "checkpoints" / "step-00000007") for name in ("whole", "parts")]
    assert last[0].state["more"] == last[1].state["more"]
    files = [
        sorted((tmp_path / name / "checkpoints/step-00000007").glob("*.safetensors")) for name in ("whole", "parts")
    ]
    assert files[0]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


@pytest.mark.parametrize(
    ("every", "objective"),
    [(2, dict(iterations=2)), (3, dict(minibatches=2)), (1, dict(asynchronous=True)), (1, {})],
    ids=["within a round", "from within a round", "made ahead", "alone"],
)
@pytest.mark.drawn(group="whole runs")
def test_a_rollback_learns_from_other_answers(
    task: Path, tmp_path: Path, every: int, objective: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the checkpoint holds the bad answers, or the round began before the bad step."""
    keys = dict(steps=5, checkpoint_every=every, guard="rollback", guard_limit=3)
    run = grpo_run(task, train=keys, objective=objective)
    train(run, tmp_path / "whole", open_source=source_of)
    losses = [step["loss"] for step in records(tmp_path / "whole")]

    def fault(guard: Guard, loss: float, norm: float) -> str | None:
        return "it is bad" if loss == losses[3] else None

    monkeypatch.setattr(Guard, "fault", fault)
    train(run, tmp_path / "parts", open_source=source_of)
    found = [step["loss"] for step in records(tmp_path / "parts")]
    assert found[:every] == losses[:every]
    assert len(found) == 5
    assert losses[3] not in found
    assert read_manifest(tmp_path / "parts/checkpoints/step-00000005").state["more"]["excluded"] == [4]


@pytest.mark.drawn(group="whole runs")
def test_a_resumed_run_keeps_its_selection_biases_beside_a_reference(task: Path, tmp_path: Path) -> None:
    """Biases are trained too: reading the reference's weights must not put back those that training began with."""
    model = dict(experts=4, experts_per_token=2, router="sigmoid")
    keys: dict[str, Any] = dict(balance_rate=0.05, checkpoint_every=2)
    train(grpo_run(task, model=model, train=keys | dict(steps=1)), tmp_path / "first", open_source=source_of)

    def run(steps: int) -> Run:
        begins = keys | dict(steps=steps, weights=str(tmp_path / "first"))
        return grpo_run(task, model=model, train=begins, objective=dict(kl_beta=0.1))

    train(run(4), tmp_path / "whole", open_source=source_of)
    train(run(2), tmp_path / "parts", open_source=source_of)
    train(run(4), tmp_path / "parts", open_source=source_of)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    # The reference has its own biases, too: at step 1 it is the network itself.
    assert records(tmp_path / "whole")[0]["kl"] == pytest.approx(0, abs=1e-12)
    source, reader = attached(run(4)), open_checkpoint(tmp_path / "whole" / "checkpoints" / "step-00000004", kind="")
    (name, bias), *_ = buffers(source.state.parallel.models)
    began = bias.clone()
    assert source.reference is not None
    bias.copy_(reader.get(f"model/{name}"))
    assert not torch.equal(bias, began)
    with source.reference.in_place():
        assert torch.equal(bias, began)
    assert not torch.equal(bias, began)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.drawn(1)
def test_a_source_releases_its_train_state(task: Path, ahead: bool) -> None:
    """For a rollback: the engine, the reference and the round sampled ahead hold it too."""
    objective = dict(kl_beta=0.1, asynchronous=ahead)
    source = attached(grpo_run(task, objective=objective, train=dict(weights=str(task))))  # which are not read here
    state, batches = weakref.ref(source.state), source.batches(2)
    source.state.train_step(next(batches))
    thread = source.rounds.thread
    assert (thread is not None) == ahead
    del batches
    source.detach()
    gc.collect()
    assert state() is None
    if thread is not None:
        with pytest.raises(RuntimeError, match="shutdown"):
            thread.submit(print)
    source.attach(TrainState(source.run), print, lambda _: None)
    assert len(list(source.batches(1))) == 1


def test_bits_of_engine_and_trainer_are_the_same(task: Path, tmp_path: Path) -> None:
    run = grpo_run(task, train=dict(dtype="float32", invariant=True, steps=3), serve=dict(invariant=True))
    train(run, tmp_path / "out", open_source=source_of)
    assert [step["mismatch"] for step in records(tmp_path / "out")] == [0, 0, 0]


def test_groups_without_a_difference_are_replaced(task: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "def some(prompt, completion, row):\n    return float(row['id'] % 3 == 0 and ord(completion[:1] or 'a') % 2)\n"
    )
    source = attached(grpo_run(task, objective=dict(variant="dapo", rewards=[f"{file}:some"], filter_rounds=8)))
    next(source.batches(1))
    answers = source.answers
    assert answers is not None
    groups = answers.rewards.reshape(-1, 4)
    learned = answers.used.reshape(-1, 4)[:, 0] > 0
    assert learned.any()
    assert (groups[learned].max(1) > groups[learned].min(1)).all()
    assert source.state.history.prompts > 2
    assert source.figures()["filtered_groups"] == source.state.history.prompts - learned.sum()


def test_mistakes_are_sentences(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as error:
        grpo_run(task, objective=dict(rewards=[], group=3, completion_tokens=16))
    assert {problem.key for problem in error.value.problems} == {
        "objective.rewards", "train.global_batch", "objective.completion_tokens",
    }  # fmt: skip
    with pytest.raises(UserError, match="is empty, and answers need prompts"):
        GrpoSource(grpo_run(task, data=dict(sets=[])))
    with pytest.raises(UserError, match="no prompt of at most 1 tokens"):
        GrpoSource(
            grpo_run(
                task,
                objective=dict(completion_tokens=15),
                data=dict(sets=[str(longer(tmp_path))]),
            )
        )
    broken = tmp_path / "broken.py"
    broken.write_text("def broken(prompt, completion, row):\n    return 1 / 0\n")
    (tmp_path / "run.toml").write_text(to_toml(grpo_run(task, objective=dict(rewards=[f"{broken}:broken"]))))
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out")]) == 2
    assert "raised ZeroDivisionError: division by zero (line 2), on the row" in capsys.readouterr().err


def longer(folder: Path) -> Path:
    """A set with one prompt that is too long."""
    (folder / "long.jsonl").write_text('{"prompt": "a long one"}\n')
    assert main(["data", "build", "--chat", str(folder / "long.jsonl"), "--out", str(folder / "long"), "--json"]) == 0
    return folder / "long"


def test_answers_made_ahead_are_of_the_weights_one_round_before(task: Path, tmp_path: Path) -> None:
    """The first two rounds are drawn with the first weights; then there is a mismatch, and it is weighed."""
    run = grpo_run(task, objective=dict(asynchronous=True), train=dict(steps=4))
    train(run, tmp_path / "out", open_source=source_of)
    found = [step["mismatch"] for step in records(tmp_path / "out")]
    assert found[0] < 1e-12
    assert min(found[1:]) > 1e-4
    source = attached(run)
    first, _ = source.rounds.make(1)
    source.state.history.prompts = source.rounds.size
    second, _ = source.rounds.make(2)
    source = attached(run)
    batches = source.batches(4)
    state = source.state
    state.train_step(next(batches))
    assert source.answers is not None
    assert np.array_equal(source.answers.tokens, first.tokens)
    state.train_step(next(batches))
    assert np.array_equal(source.answers.tokens, second.tokens)


def test_rounds_in_the_background_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts: Any = object.__new__(Rollouts)
    rollouts.weights = SimpleNamespace(state=SimpleNamespace(device=torch.device("cuda")))
    rollouts.draw = lambda *_: None
    made, used = mock.Mock(side_effect=lambda: mock.Mock()), list[Any]()
    monkeypatch.setattr("torch.cuda.Stream", made)
    monkeypatch.setattr("torch.cuda.Event", mock.Mock())
    monkeypatch.setattr("torch.cuda.current_stream", mock.Mock())
    monkeypatch.setattr("torch.cuda.stream", lambda stream: used.append(stream) or nullcontext())
    for number in range(3):
        rollouts.in_background([], [], number, None, 1)()
    assert made.call_count == 1
    assert used == [used[0]] * 3
