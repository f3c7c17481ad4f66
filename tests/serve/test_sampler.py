"""Draws follow the distribution that temperature, cuts, penalties and biases leave, by brute force; the kernels for GPUs draw the
same, in Triton's interpreter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted_kernels import Interpreter
from torch import Tensor

from shardwise.serve.request import Sampling
from shardwise.serve.sampler import PENALIZED, Sampler, gumbel, thresholds, words_of
from shardwise.torch_private import TorchDispatchMode

LOGITS = torch.tensor([0.1, 2.0, 1.0, -1.0, 1.5, 1.0], dtype=torch.float64)
DRAWS = 6000


def shares(sampling: Sampling, prompt: tuple[int, ...] = (), made: tuple[int, ...] = ()) -> Tensor:
    """How often each token is drawn, at as many positions."""
    sampler = Sampler(2, len(LOGITS), torch.device("cpu"))
    sampler.assign(1, sampling, 12345, prompt, made)
    sampler.prepare()
    slots, positions = torch.ones(DRAWS, dtype=torch.int32), torch.arange(DRAWS, dtype=torch.int32)
    many = LOGITS.expand(DRAWS, -1)
    if sampler.is_plain([1]):
        drawn = sampler.pick_plain(many, slots, positions)
    else:
        drawn = sampler.pick(many, [1] * DRAWS, slots, positions).tokens
    return drawn.bincount(minlength=len(LOGITS)) / DRAWS


def softmax_of(logits: Tensor, kept: list[int]) -> Tensor:
    found = torch.zeros(len(LOGITS), dtype=torch.float64)
    found[kept] = logits[kept].softmax(0)
    return found


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(0.7), [0, 1, 2, 3, 4, 5]),
        (Sampling(1.0, top_k=2), [1, 4]),
        (Sampling(1.0, top_k=3), [1, 2, 4, 5]),  # two tokens share the third place
        (Sampling(1.0, top_p=0.6), [1, 4]),
        (Sampling(1.0, top_p=0.7), [1, 2, 4, 5]),
        (Sampling(1.3, top_k=4, top_p=0.5), [1, 4]),
        (Sampling(1.0, min_p=0.3), [1, 2, 4, 5]),
        (Sampling(0.5, min_p=0.3), [1, 4]),
        (Sampling(1e-300), [1]),
        (Sampling(0.0), [1]),
    ],
    ids=str,
)
def test_draws_follow_what_temperature_and_cuts_leave(sampling: Sampling, kept: list[int]) -> None:
    wanted = softmax_of(LOGITS / max(sampling.temperature, 1e-3), kept)
    found = shares(sampling)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.03)
    assert (found > 0).nonzero().flatten().tolist() == kept


def test_penalties_and_biases_change_the_scores() -> None:
    prompt, made = (0, 3), (1, 1, 4)
    changed = LOGITS.clone()
    for token in {*prompt, *made}:
        changed[token] = changed[token] / 1.5 if changed[token] > 0 else changed[token] * 1.5
    changed -= torch.tensor([0, 0.4 * 2 + 0.3, 0, 0, 0.4 + 0.3, 0], dtype=torch.float64)
    changed[5] += 1.25
    sampling = Sampling(1.0, presence_penalty=0.3, frequency_penalty=0.4, repetition_penalty=1.5, logit_bias={5: 1.25})
    torch.testing.assert_close(shares(sampling, prompt, made).double(), changed.softmax(0), rtol=0, atol=0.03)


def penalized_sampler(rows: int, vocab: int, everyone: bool) -> Sampler:
    """Slots from 1 on, most of which have penalties, or all, and some biases."""
    draw = random.Random(rows)
    sampler = Sampler(rows + 1, vocab, torch.device("cpu"))
    for slot in range(1, rows + 1):
        more: dict[str, Any] = {}
        if everyone or draw.random() < 0.6:
            more = dict(presence_penalty=draw.uniform(-2, 2), frequency_penalty=draw.uniform(-2, 2))
        if more and draw.random() < 0.8:
            more["repetition_penalty"] = draw.uniform(0.5, 2)
        if draw.random() < 0.3:
            more["logit_bias"] = {draw.randrange(vocab): draw.uniform(-100, 100) for _ in range(20)}
        prompt, made = ([draw.randrange(vocab) for _ in range(30)] for _ in range(2))
        sampler.assign(slot, Sampling(0.8, **more), slot, prompt, made)
    sampler.prepare()
    return sampler


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [2**17, 1000])
@pytest.mark.parametrize("everyone", [False, True])
def test_rows_are_penalized_together_as_each_alone(
    dtype: torch.dtype, at_once: int, everyone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PENALIZED, "cpu", at_once)
    draw, vocab = random.Random(1), 300
    sampler = penalized_sampler(20, vocab, everyone)
    numbers, behind = [], []
    for slot in range(1, 21):  # some verify drafts
        drafts = [draw.randrange(vocab) for _ in range(draw.choice([0, 0, 3]))]
        numbers += [slot] * (len(drafts) + 1)
        behind += [drafts[:n] for n in range(len(drafts) + 1)]
    logits = (torch.randn(len(numbers), vocab, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    logits[0, 5], logits[1, 6] = float("-inf"), 0.0
    found = sampler.adjusted(logits, numbers, torch.tensor(numbers), behind)
    assert sampler.generated is not None
    assert sampler.prompted is not None
    for row, slot in enumerate(numbers):
        wanted, asked = logits[row].to(found.dtype), sampler.sampling[slot]
        counts = sampler.generated[slot] + torch.tensor(behind[row], dtype=torch.int64).bincount(minlength=vocab)
        if asked.repetition_penalty != 1:
            known = sampler.prompted[slot] | (counts > 0)
            factor = torch.where(wanted > 0, 1 / asked.repetition_penalty, asked.repetition_penalty)
            wanted = torch.where(known, wanted * factor, wanted)
        if asked.frequency_penalty:
            wanted = wanted - (asked.frequency_penalty * counts + asked.presence_penalty * (counts > 0))
        for token, bias in asked.logit_bias.items():
            wanted[token] += torch.tensor(bias, dtype=found.dtype)
        assert torch.equal(found[row], wanted)


class OperatorCounter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_penalties_of_many_rows_take_as_many_operations_as_of_two() -> None:
    counts = []
    for rows in (2, 50):
        sampler, numbers = penalized_sampler(rows, 300, True), list(range(1, rows + 1))
        for slot in numbers:
            sampler.assign(slot, Sampling(1.0, repetition_penalty=1.1, logit_bias={1: 2.0}), 1, (1,), (2,))
        with OperatorCounter() as counter:
            sampler.adjusted(torch.randn(rows, 300), numbers, torch.tensor(numbers))
        counts.append(counter.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_are_the_models_own_beside_penalties(dtype: torch.dtype) -> None:
    sampler = Sampler(1, len(LOGITS), torch.device("cpu"))
    sampler.assign(0, Sampling(1.0, repetition_penalty=2.0, logit_bias={1: -5.0}, logprobs=6), 1, (0, 1, 2), (3, 4))
    sampler.prepare()
    logits, zero = LOGITS[None].to(dtype), torch.zeros(1, dtype=torch.int32)
    picked = sampler.pick(logits, [0], zero, zero)
    sampler.add_logprobs(picked, logits, [0])
    assert picked.top is not None
    found = torch.empty(1, 6).scatter(1, picked.top[0], picked.top[1].float())
    torch.testing.assert_close(found, LOGITS[None].to(dtype).float().log_softmax(-1))


def test_masks_forbid_tokens() -> None:
    masks = torch.tensor([[0b001101]], dtype=torch.int32)
    sampler = Sampler(1, len(LOGITS), torch.device("cpu"))
    sampler.assign(0, Sampling(1.0), 1, (), ())
    sampler.prepare()
    zero = torch.zeros(1, dtype=torch.int32)
    drawn = {int(sampler.pick(LOGITS[None], [0], zero, zero + n, masks).tokens) for n in range(400)}
    assert drawn == {0, 2, 3}


def test_the_noise_is_gumbels() -> None:
    """By its distribution function exp(-exp(-x)), and unlike for other tokens, seeds and positions."""
    seeds = torch.arange(8)
    noise = gumbel(words_of(seeds, torch.zeros(8)), 20_000).double()
    place = (-(-noise).exp()).exp().sort(dim=1).values
    even = (torch.arange(20_000) + 0.5) / 20_000
    assert float((place - even).abs().max()) * 20_000**0.5 < 2.2  # Kolmogorov's, once in ten thousand
    flat = torch.corrcoef(noise)
    assert float((flat - torch.eye(8)).abs().max()) < 0.04
    other = gumbel(words_of(seeds, torch.ones(8)), 20_000).double()
    assert abs(float(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1])) < 0.02


def test_thresholds_of_random_rows_are_brute_forces() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        vocab = int(generator.integers(2, 40))
        logits = torch.from_numpy(generator.normal(0, 2, (1, vocab)).round(1))
        temperature, top_p = float(generator.uniform(0.2, 2)), float(generator.uniform(0.05, 1))
        top_k, min_p = int(generator.integers(0, vocab + 3)), float(generator.choice([0, generator.uniform(0, 1)]))
        found = thresholds(
            logits, torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
        )
        row = logits[0]
        kept = row >= (row.sort(descending=True).values[min(top_k, vocab) - 1] if top_k else -np.inf)
        mass = torch.where(kept, ((row - row.max()) / temperature).exp(), 0.0)
        best = -np.inf
        for value in sorted(set(row[kept].tolist())):
            if float(mass[row >= value].sum()) >= top_p * float(mass.sum()) * (1 - 1e-6):
                best = max(best, value)
        kept &= row >= best
        if min_p:
            kept &= mass >= min_p * (1 - 1e-6)
        assert (row >= found[0] - 1e-6).tolist() == kept.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuts_of_16_bits_are_those_of_32(dtype: torch.dtype) -> None:
    """Sums over a vocabulary need more digits."""
    logits = torch.randn(4, 32_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    ones = torch.ones(4)
    top_p, min_p = torch.tensor([0.5, 0.9, 0.99, 1.0]), torch.tensor([0.0, 0.0, 0.0, 0.011])
    found = thresholds(logits, ones, 0 * ones, top_p, min_p).double()
    torch.testing.assert_close(found, thresholds(logits.double(), ones, 0 * ones, top_p, min_p))
    kept = torch.where(logits >= found[:, None], logits.double().exp(), 0.0).sum(1) / logits.double().exp().sum(1)
    assert kept[:3].tolist() == pytest.approx(top_p[:3].tolist(), abs=0.01)


def test_a_top_p_of_almost_one_keeps_almost_all() -> None:
    logits = torch.randn(64, 5_000, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(64)
    found = thresholds(logits, ones, 0 * ones, ones.nextafter(0 * ones), 0 * ones)
    assert bool((found < -2.5).all())


@pytest.mark.drawn(group="kernels")
def test_the_kernels_draw_the_same(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).parents[1] / "model" / "serving_kernels.py", "sample")
