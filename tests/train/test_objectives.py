"""Objectives against the formulas of their papers, written down once more here, and what they have in common."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch

from shardwise.checkpoint.resume import load_weights
from shardwise.checkpoint.weights import load_model
from shardwise.data.batches import IGNORE_INDEX, Batch, Samples
from shardwise.data.build import build
from shardwise.data.chat.job import ChatOptions
from shardwise.data.corpus import builtin_corpus
from shardwise.data.mismatch import mismatched
from shardwise.data.open import open_data
from shardwise.data.pack import pack
from shardwise.data.shards import TokenSet
from shardwise.parallel.mesh import Mesh
from shardwise.run import LayoutConfig, Run, UserError, run_from_dict
from shardwise.serve.prepare import check_served
from shardwise.train import loop
from shardwise.train.objectives import OBJECTIVES
from shardwise.train.objectives.dpo import dpo_losses
from shardwise.train.objectives.kto import kto_losses
from shardwise.train.objectives.orpo import odds_ratio_losses
from shardwise.train.objectives.simpo import simpo_losses
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.step import TrainState

TIMES = ("seconds", "tokens_per_s", "mfu", "memory_gib")
"""What differs from run to run."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def logprobs(seed: int) -> tuple[torch.Tensor, ...]:
    """Mean log-probabilities of pairs."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(-3 * torch.rand(2, 7, dtype=torch.float64, generator=generator).sqrt() for _ in range(4))


def test_the_odds_ratio_is_that_of_the_paper() -> None:
    chosen, rejected, *_ = logprobs(0)
    odds = [torch.exp(each) / (1 - torch.exp(each)) for each in (chosen, rejected)]
    torch.testing.assert_close(odds_ratio_losses(chosen, rejected), -torch.log(sigmoid(torch.log(odds[0] / odds[1]))))


@pytest.mark.parametrize("kind", ["sft", "distill"])
def test_a_set_without_verdicts_is_learned_beside_preferences(tmp_path: Path, kind: str) -> None:
    rows = {
        "chat": [dict(prompt=f"{n} ", completion=f"answer {n}") for n in range(9)],
        "preferences": [dict(prompt=f"{n} ", chosen=f"good {n}", rejected=f"bad {n}") for n in range(9)],
    }
    sets = []
    for name, each in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)))
        build([tmp_path / f"{name}.jsonl"], tmp_path / name, workers=1, chat=ChatOptions())
        sets.append(TokenSet.open(tmp_path / name))

    def learned(*some: TokenSet) -> float:
        samples = Samples([pack(tokens, 32) for tokens in some], 32)
        objective = OBJECTIVES[kind](
            cases.make_run("dense", {}, objective=kind), torch.device("cpu"), Mesh(LayoutConfig())
        )
        return objective.count(samples.take(np.arange(samples.count)))

    assert learned(*sets) == learned(sets[0]) + learned(sets[1])
    assert learned(sets[0]) > 0


@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, -1.0), (-1.0, 0.0), (6e-8, -1.0), (0.0, 0.0)])
def test_the_odds_of_a_certain_answer_are_finite(chosen: float, rejected: float) -> None:
    pair = [torch.tensor([each], requires_grad=True) for each in (chosen, rejected)]
    losses = odds_ratio_losses(*pair)
    losses.sum().backward()
    assert all(each is not None and each.isfinite().all() for each in (losses, *(x.grad for x in pair)))
    others = torch.tensor([-0.5, -1.0], dtype=torch.float64)  # which stay as they are
    odds = others - torch.log1p(-others.exp())
    want = -torch.log(sigmoid(odds[0] - odds[1]))
    torch.testing.assert_close(odds_ratio_losses(*others), want, rtol=1e-13, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_is_that_of_the_paper(smoothing: float) -> None:
    chosen, rejected, *_ = logprobs(1)
    margin = 2.5 * chosen - 2.5 * rejected - 1.4
    want = -(1 - smoothing) * torch.log(sigmoid(margin)) - smoothing * torch.log(sigmoid(-margin))
    torch.testing.assert_close(simpo_losses(chosen, rejected, 2.5, 1.4, smoothing), want)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_dpo_is_that_of_the_papers(kind: str) -> None:
    good, bad, good_reference, bad_reference = logprobs(2)
    margin = (good - good_reference) - (bad - bad_reference)
    want = {
        "sigmoid": -0.9 * torch.log(sigmoid(0.3 * margin)) - 0.1 * torch.log(sigmoid(-0.3 * margin)),
        "hinge": (1 - 0.3 * margin).clamp(min=0),
        "ipo": (margin - 1 / 0.6) ** 2,
    }[kind]
    torch.testing.assert_close(dpo_losses(margin, kind, 0.3, 0.1), want)


def test_a_reference_is_what_training_began_with() -> None:
    """So the first margin is 0, and later ones are made of what it said then."""
    run = cases.make_run("dense", {}, layers=2, objective="dpo", global_batch=4, microbatch=2)
    batch, state = pair_batch(), TrainState(run)
    before, counts = document_logprobs(run, batch)
    first, second = (state.train_step(batch) for _ in range(2))
    assert first.loss.item() == pytest.approx(np.log(2), rel=1e-12)
    assert first.read_measured() == pytest.approx([0, 0, 0, 0], abs=1e-12)
    now = [each.detach().clone() for each in state.model.parameters()]
    again = TrainState(run)
    again.train_step(batch)
    after = network_logprobs(again.model, batch)[0]
    ratios = (after - before).unflatten(0, (-1, 2))
    want = -torch.log(sigmoid(run.objective.beta * (ratios[:, 0] - ratios[:, 1]))).mean()
    assert second.loss.item() == pytest.approx(want.item(), rel=1e-11)
    assert any(not torch.equal(a, b) for a, b in zip(now, again.model.parameters(), strict=True))
    assert counts.min() > 0


def test_kto_is_that_of_the_paper() -> None:
    ratios = torch.linspace(-2, 2, 9, dtype=torch.float64)
    wanted, kl = torch.arange(9) % 2 == 0, torch.tensor(0.3, dtype=torch.float64)
    want = torch.where(wanted, 2.0 * (1 - sigmoid(0.5 * (ratios - kl))), 0.7 * (1 - sigmoid(0.5 * (kl - ratios))))
    torch.testing.assert_close(kto_losses(ratios, wanted, kl, 0.5, (2.0, 0.7)), want)


def test_answers_move_on_by_one_in_their_row() -> None:
    ignored = IGNORE_INDEX
    batch = Batch(
        np.array([[1, 2, 3, 11, 12, 13, 14, 7], [1, 2, 3, 4, 5, 6, 7, 7]]),
        np.array([[ignored, 3, 4, ignored, ignored, 14, 15, ignored], [ignored, 3, 4, 5, 6, 7, ignored, ignored]]),
        documents=np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 1, 1]], np.int32),
        positions=np.array([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 0, 1]]),
    )
    other = mismatched(batch)
    assert other.documents is not None
    # 1 2 | 3 4 and 11 12 13 | 14 15 become 1 2 | 14 15 and 11 12 13 | 3 4.
    assert other.tokens[0, :7].tolist() == [1, 2, 14, 11, 12, 13, 3]
    assert other.targets[0].tolist() == [ignored, 14, 15, ignored, ignored, 3, 4, ignored]
    assert other.documents[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert (other.targets[1] == ignored).all()


def test_a_packed_step_of_kto_is_the_mean_over_answers_that_are_run_alone() -> None:
    run = cases.make_run("dense", {}, layers=2, objective="kto", global_batch=4, microbatch=2)
    batch, state = pair_batch(), TrainState(run)
    assert batch.documents is not None
    batch = replace(batch, labels=(batch.documents % 3 != 1).astype(np.int8))
    assert batch.labels is not None
    wanted = torch.tensor([bool(batch.labels[row, place]) for row, place in first_places(batch)])
    other = mismatched(batch)
    before = [network_logprobs(TrainState(run).model, each)[0] for each in (batch, other)]
    state.train_step(batch)
    after = [network_logprobs(state.model, each)[0] for each in (batch, other)]
    ratios, strayed = (now - then for now, then in zip(after, before, strict=True))
    result = state.train_step(batch)
    kl = strayed.mean().clamp(min=0)
    want = torch.where(wanted, 1 - sigmoid(0.1 * (ratios - kl)), 1 - sigmoid(0.1 * (kl - ratios))).mean()
    assert result.loss.item() == pytest.approx(want.item(), rel=1e-10)
    shown = state.objective.shown(dict(zip(state.objective.metrics, result.read_measured(), strict=True)))
    assert shown["kl"] == pytest.approx(kl.item(), abs=1e-10)
    assert shown["rewards_chosen"] == pytest.approx(0.1 * ratios[wanted].mean().item(), rel=1e-9)
    assert shown["rewards_rejected"] == pytest.approx(0.1 * ratios[~wanted].mean().item(), rel=1e-9)


def test_a_reward_is_the_score_at_the_end_of_an_answer() -> None:
    run = cases.make_run("tied", {}, layers=2, objective="reward", global_batch=4, microbatch=2)
    batch, state = pair_batch(), TrainState(run)
    assert batch.documents is not None
    targets = np.full_like(batch.targets, IGNORE_INDEX)
    for (row, _), (tokens, _) in zip(first_places(batch), alone(batch), strict=True):
        assert len(tokens)
        for n in range(batch.documents[row].max()):
            targets[row, np.flatnonzero(batch.documents[row] == n)[-1]] = 0
    scores = torch.stack(
        [state.model(torch.from_numpy(tokens)[None]).result[0, -1, 0] for tokens, _ in alone(batch)]
    ).detach()
    result = state.train_step(replace(batch, targets=targets))
    chosen, rejected = scores.unflatten(0, (-1, 2)).unbind(1)
    assert result.loss.item() == pytest.approx(-torch.log(sigmoid(chosen - rejected)).mean().item(), rel=1e-11)
    assert result.read_measured()[2] == pytest.approx((chosen - rejected).mean().item(), rel=1e-9)


def first_places(batch: Batch) -> list[tuple[int, int]]:
    """Row and place where each learned document begins."""
    assert batch.documents is not None
    found = []
    for row in range(len(batch.tokens)):
        for n in range(batch.documents[row].max() + 1):
            own = np.flatnonzero(batch.documents[row] == n)
            if (batch.targets[row, own] != IGNORE_INDEX).any():
                found.append((row, int(own[0])))
    return found


def pair_batch(rows: int = 4, length: int = cases.LENGTH, seed: int = 0) -> Batch:
    """Rows of pairs: prompts masked, some of the row left over."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 61, (rows, length))
    targets = generator.integers(0, 61, (rows, length))
    documents, positions = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int64)
    for row in range(rows):
        pairs = 1 + row % 2
        sizes = generator.integers(4, 8, 2 * pairs)
        ends = np.cumsum([*sizes, length - sizes.sum()])
        for n, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            documents[row, start:stop], positions[row, start:stop] = n, np.arange(stop - start)
            targets[row, start : start + 2 if n < 2 * pairs else stop] = IGNORE_INDEX
    return Batch(tokens, targets, positions, documents)


def step(run: Run, batch: Batch) -> tuple[float, float, dict[str, float]]:
    state = TrainState(run)
    result = state.train_step(batch)
    loss, norm, _ = result.read()
    return loss, norm, dict(zip(state.objective.metrics, result.read_measured(), strict=True))


def alone(batch: Batch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and targets of each document that is learned, in order."""
    assert batch.documents is not None
    found = []
    for row in range(len(batch.tokens)):
        for n in range(batch.documents[row].max() + 1):
            own = batch.documents[row] == n
            if (batch.targets[row, own] != IGNORE_INDEX).any():
                found.append((batch.tokens[row, own], batch.targets[row, own]))
    return found


def document_logprobs(run: Run, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of log-probabilities and counts of each document, run through the network one by one: none is packed."""
    return network_logprobs(TrainState(run).model, batch)


def network_logprobs(network: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of any network."""
    sums, counts = [], []
    for tokens, targets in alone(batch):
        logits = network(torch.from_numpy(tokens)[None]).result[0].log_softmax(-1)
        kept = np.flatnonzero(targets != IGNORE_INDEX)
        sums.append(logits[kept, targets[kept]].sum())
        counts.append(len(kept))
    return torch.stack(sums).detach(), torch.tensor(counts, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["orpo", "simpo"])
def test_a_packed_step_is_the_mean_over_pairs_that_are_run_alone(kind: str) -> None:
    run = cases.make_run("dense", {}, layers=2, objective=kind, global_batch=4, microbatch=2)
    batch = pair_batch()
    loss, _, measured = step(run, batch)
    sums, counts = document_logprobs(run, batch)
    chosen, rejected = (sums / counts).unflatten(0, (-1, 2)).unbind(1)
    beta, gamma = run.objective.beta, run.objective.gamma
    if kind == "orpo":
        want = -chosen - beta * torch.log(sigmoid(torch.logit(chosen.exp()) - torch.logit(rejected.exp())))
        assert measured["nll"] == pytest.approx(-chosen.mean().item(), rel=1e-12)
    else:
        want = -torch.log(sigmoid(beta * (chosen - rejected) - gamma))
    assert loss == pytest.approx(want.mean().item(), rel=1e-11)
    assert measured["reward_margin"] == pytest.approx(beta * (chosen - rejected).mean().item(), rel=1e-9)
    assert measured["reward_accuracy"] == pytest.approx((chosen > rejected).double().mean().item())


def test_answers_that_are_not_wanted_are_not_learned_by_tuning() -> None:
    run = cases.make_run("dense", {}, layers=2, objective="sft", global_batch=4, microbatch=2)
    batch = pair_batch()
    assert batch.documents is not None
    labels = (batch.documents % 2 == 0).astype(np.int8)
    wanted = replace(batch, targets=np.where(labels > 0, batch.targets, IGNORE_INDEX))
    assert step(run, replace(batch, labels=labels)) == step(run, wanted)


def test_auxiliary_losses_weigh_the_same_however_much_is_masked() -> None:
    """The gradient is that of the mean loss plus that of the auxiliary losses, the mean over all tokens."""

    def gradients(targets: np.ndarray, **train: Any) -> dict[str, torch.Tensor]:
        run = cases.make_run("softmax", {}, layers=2, global_batch=4, microbatch=2, clip=0.0, **train)
        state = TrainState(run)
        kept = {}

        def keep(step: int, factor: torch.Tensor) -> None:
            for each in state.parallel.parameters:
                assert each.grad is not None
                kept[each.name] = each.grad * factor

        state.optimizer.step = keep  # type: ignore[method-assign]
        state.train_step(replace(batch, targets=targets))
        return kept

    batch = cases.batch(0, True, 4)
    few = batch.targets.copy()
    few[:, 3:] = IGNORE_INDEX
    weights, none = dict(balance_loss=0.5, router_z_loss=0.3), dict(balance_loss=0.0, router_z_loss=0.0)
    with_auxiliary, without = gradients(batch.targets, **weights), gradients(batch.targets, **none)
    few_with, few_without = gradients(few, **weights), gradients(few, **none)
    for name in without:
        torch.testing.assert_close(
            few_with[name] - few_without[name], with_auxiliary[name] - without[name], rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
@pytest.mark.drawn(1)
def test_a_run_goes_on_as_if_it_had_never_stopped(kind: str, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": "yes" * n, "rejected": "no"} for n in range(1, 9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    build([tmp_path / "pairs.jsonl"], tmp_path / "set", workers=1, chat=ChatOptions())
    sizes = dict(steps=3, global_batch=2, microbatch=1, seq_len=64, eval_every=2, dtype="float64", device="cpu")
    run = run_from_dict(
        dict(
            model=dict(layers=1, hidden=16, heads=2), objective=dict(kind=kind),
            data=dict(sets=[str(tmp_path / "set")], holdout=0.25),
            train=sizes | dict(schedule="constant", checkpoint_every=2),
        )
    )  # fmt: skip
    loop.train(run, tmp_path / "whole")
    for steps in (2, 3):
        loop.train(replace(run, train=replace(run.train, steps=steps)), tmp_path / "again")
    whole, again = (
        [{k: r[k] for k in r if k not in TIMES} for r in read_metrics(tmp_path / name) if "loss" in r]
        for name in ("whole", "again")
    )
    assert whole == again
    assert len(whole) == 3
    assert {"rewards_chosen", "rewards_rejected", "reward_margin"} <= set(whole[0])


def test_a_reward_model_begins_with_the_weights_of_a_language_model(tmp_path: Path) -> None:
    train = dict(steps=1, global_batch=2, seq_len=64, eval_every=0, device="cpu")
    model = dict(layers=1, hidden=16, heads=2, tied_embeddings=True)
    loop.train(run_from_dict(dict(model=model, train=train)), tmp_path / "language")
    run = run_from_dict(
        dict(model=model, train=train | dict(weights=str(tmp_path / "language")), objective=dict(kind="reward"))
    )
    state, fresh = TrainState(run), TrainState(run)
    load_weights(state, TokenSet.open(builtin_corpus() / "train").tokenizer(), lambda _: None)
    before = load_model(tmp_path / "language")[0].state_dict()
    for name, value in state.model.state_dict().items():
        same = fresh.model.state_dict()[name] if name == "head.weight" else before[name]
        assert torch.equal(value, same), name
    assert state.model.state_dict()["head.weight"].shape == (1, 16)


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_pairs_are_to_differ_by_the_margins_of_their_rows(kind: str, tmp_path: Path) -> None:
    """From the rows to the loss: scores and rewards without margins say what it has to be with them."""
    pairs = [{"prompt": f"{n}?", "chosen": "yes" * n, "rejected": "no"} for n in range(1, 9)]
    margins = [0.5 * n for n in range(1, 9)]
    rows = [pair | ({"margin": margin} if margin != 2 else {}) for pair, margin in zip(pairs, margins, strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build([tmp_path / "pairs.jsonl"], tmp_path / "set", workers=1, chat=ChatOptions())
    tokens = TokenSet.open(tmp_path / "set")
    want = [0.0 if margin == 2 else margin for margin in margins]
    assert tokens.margins.reshape(-1, 2).tolist() == [[each, each] for each in want]
    run = run_from_dict(
        dict(
            model=dict(layers=1, hidden=16, heads=2), objective=dict(kind=kind, beta=0.3), data=dict(sets=[str(tmp_path / "set")]),
            train=dict(global_batch=2, microbatch=1, seq_len=64, eval_every=0, dtype="float64", device="cpu", lr=0.05, warmup=0),
        )
    )  # fmt: skip
    aiming = replace(run, objective=replace(run.objective, margins=True, margin=0.25 if kind == "reward" else 0.0))
    batch = open_data(aiming).train.take([0, 1])
    assert batch.margins is not None
    assert batch.documents is not None
    # After a step each pair has a reward; one row of each, alone, tells it.
    own = []
    for row in range(2):
        one = replace(batch, targets=np.where(np.arange(2)[:, None] == row, batch.targets, IGNORE_INDEX))
        for n in range(0, int(batch.documents[row].max()), 2):
            here = np.isin(batch.documents, (n, n + 1))
            alone = TrainState(run)
            alone.train_step(batch)
            measured = alone.train_step(replace(one, targets=np.where(here, one.targets, IGNORE_INDEX))).read_measured()
            place = np.flatnonzero(batch.documents[row] == n)[0]
            own.append((measured[2], float(batch.margins[row, place])))
    assert {margin for _, margin in own} <= set(want)
    state = TrainState(aiming)
    state.train_step(replace(batch, margins=np.zeros_like(batch.margins) - np.float32(aiming.objective.margin)))
    got = state.train_step(batch)
    wanted = [-np.log(1 / (1 + np.exp(-(reward - margin - aiming.objective.margin)))) for reward, margin in own]
    assert got.loss.item() == pytest.approx(np.mean(wanted), rel=1e-9)
    assert got.read_measured()[2] == pytest.approx(np.mean([reward for reward, _ in own]), rel=1e-9)
    with pytest.raises(UserError, match="says of no pair by how much"):
        open_data(replace(aiming, data=replace(aiming.data, sets=(str(plain_pairs(tmp_path)),))))


def plain_pairs(folder: Path) -> Path:
    (folder / "plain.jsonl").write_text(json.dumps({"prompt": "1?", "chosen": "yes", "rejected": "no"}) + "\n")
    build([folder / "plain.jsonl"], folder / "plain", workers=1, chat=ChatOptions())
    return folder / "plain"


def test_sets_without_pairs_or_verdicts_are_refused() -> None:
    for kind, phrase in (("dpo", "no pairs"), ("kto", "no verdicts"), ("reward", "no pairs")):
        run = cases.make_run("dense", {}, objective=kind)
        with pytest.raises(UserError, match=phrase):
            open_data(replace(run, model=replace(run.model, vocab=300)))


def test_a_reward_model_is_not_served() -> None:
    run = run_from_dict(dict(model=dict(layers=1, hidden=16, heads=2, vocab=32), objective=dict(kind="reward")))
    with pytest.raises(UserError, match=r"model\.scores.*is a reward model"):
        check_served(run)
