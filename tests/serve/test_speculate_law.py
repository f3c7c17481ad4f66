"""The law of what a verified guess becomes, in closed form and as drawn: the output has the model's own distribution whatever the
guess's was, and a draft model is right as often as the formula in `serve/speculate` says."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from shardwise.serve.request import Sampling
from shardwise.serve.sampler import Sampler, thresholds

DRAWS = 20_000


def joint_law(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The probability [guess, output] that noise E picks `argmin E/q` as the guess and `argmin E/p` as the output, E exponential:
    the largest score with Gumbel noise is that. With a = E[guess], b = E[output] and t = b/a in the wedge that both constraints
    leave, it is the integral of dt / (1 + t + sum over others of max(q/q[guess], t p/p[output]))^2, which is rational between the
    points where a maximum changes sides."""
    size = len(p)
    law = np.zeros((size, size))
    for x in range(size):
        if q[x] == 0:
            continue
        if p[x]:
            law[x, x] = 1 / sum(max(p[z] / p[x], q[z] / q[x]) for z in range(size))
        for y in range(size):
            if y == x or p[y] == 0:
                continue
            low, high = q[y] / q[x], p[y] / p[x] if p[x] else math.inf
            if low >= high:
                continue
            others = [z for z in range(size) if z not in (x, y)]
            turns = [q[z] * p[y] / (q[x] * p[z]) for z in others if p[z]]
            points = [low, *sorted(t for t in turns if low < t < high), high]
            for start, stop in pairwise(points):
                middle = (start + stop) / 2 if stop < math.inf else start + 1
                rising = [z for z in others if middle * p[z] / p[y] > q[z] / q[x]]
                flat = 1 + sum(q[z] / q[x] for z in others if z not in rising)
                slope = 1 + sum(p[z] / p[y] for z in rising)
                end = 0.0 if stop == math.inf else 1 / (flat + slope * stop)
                law[x, y] += (1 / (flat + slope * start) - end) / slope
    return law


def drawn_laws() -> list[tuple[np.ndarray, np.ndarray]]:
    draw = random.Random(0)
    found = []
    for _ in range(60):
        size = draw.randint(2, 6)
        pair = []
        for _ in range(2):
            weights = np.array([draw.expovariate(1) * (draw.random() < 0.8) for _ in range(size)])
            weights[draw.randrange(size)] += 0.1
            pair.append(weights / weights.sum())
        found.append((pair[0], pair[1]))
    found.append((np.array([0.2, 0.8]), np.array([1.0, 0.0])))  # a guess that was not drawn
    return found


@pytest.mark.parametrize(("p", "q"), drawn_laws())
def test_the_output_has_the_models_law_whatever_the_guess(p: np.ndarray, q: np.ndarray) -> None:
    law = joint_law(p, q)
    assert law.sum(axis=0) == pytest.approx(p, abs=1e-12)
    assert law.sum(axis=1) == pytest.approx(q, abs=1e-12)
    apart = np.abs(p - q).sum() / 2
    right = np.trace(law)
    assert (1 - apart) / (1 + apart) - 1e-12 <= right <= 1 - apart + 1e-12


def test_a_guess_that_was_not_drawn_is_right_as_often_as_it_is_likely() -> None:
    """As rejection sampling would accept it: min(1, p/q) with q = 1."""
    p = np.array([0.1, 0.2, 0.3, 0.4])
    for token in range(4):
        assert np.trace(joint_law(p, np.eye(4)[token])) == pytest.approx(p[token])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.6), Sampling(1.3, top_k=4), Sampling(1.0, top_p=0.8), Sampling(1.0, min_p=0.2)],
    ids=["1", "0.6", "top-k", "top-p", "min-p"],
)
def test_what_is_drawn_follows_the_law(sampling: Sampling) -> None:
    """Both models' samplers, as the engine calls them, at as many positions: chi-square over guess and output, with the guess of a
    draft model and the distributions that the cuts leave."""
    generator = torch.Generator().manual_seed(5)
    large, small = torch.randn(2, 7, generator=generator, dtype=torch.float64) * 1.2
    slots, positions = torch.ones(DRAWS, dtype=torch.int32), torch.arange(DRAWS, dtype=torch.int32)
    drawn, laws = [], []
    for logits in (small, large):
        sampler = Sampler(2, 7, torch.device("cpu"))
        sampler.assign(1, sampling, 99, (), ())
        sampler.prepare()
        many = logits.expand(DRAWS, -1)
        plain = sampler.is_plain([1])
        drawn.append(
            sampler.pick_plain(many, slots, positions)
            if plain
            else sampler.pick(many, [1] * DRAWS, slots, positions).tokens
        )
        which = torch.tensor([1])
        cut = thresholds(
            logits[None], *(x[which] for x in (sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p))
        )
        kept = logits.masked_fill(logits < cut[0] - 1e-9, float("-inf"))
        laws.append((kept / sampling.temperature).softmax(0).numpy())
    law = joint_law(laws[1], laws[0])
    counts = torch.zeros(7, 7).index_put((drawn[0], drawn[1]), torch.ones(DRAWS), accumulate=True).numpy()
    assert not counts[law < 1e-12].any()
    there = law * DRAWS > 5
    statistic = (((counts - law * DRAWS) ** 2)[there] / (law * DRAWS)[there]).sum()
    freedom = int(there.sum()) - 1
    # Wilson and Hilferty's normal of a chi-square: one in a hundred thousand is beyond 4.3.
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(normal) < 4.3
