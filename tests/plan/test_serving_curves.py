"""Measured steps as curves: made of known factors, they give back these factors, also for steps that were not measured."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.hardware import Profile
from shardwise.hardware.chips import CHIPS
from shardwise.hardware.engine_facts import EngineFacts
from shardwise.plan.serving.curves import TOUCH, Curves

LAYER = dict(hidden=64, ffn=256, heads=4, kv_heads=2, head_dim=16)
SHAPE = tuple(float(size) for size in LAYER.values())
ALONE, TOGETHER, SHORT = (16, 64, 256, 1024), (64, 256, 1024), 16


def linear(shape: Any, tokens: float) -> float:
    return 1e-4 + 1e-6 * tokens


def attention(shape: Any, prompts: float, tokens: float) -> float:
    return 1e-5 + 1e-9 * prompts * tokens**2


def before(shape: Any, tokens: float, seen: float) -> float:
    return 1e-9 * tokens * seen


def decode(shape: Any, sequences: float, keys: float) -> float:
    return linear(shape, sequences) + 1e-8 * sequences * keys


class Machine:
    """Steps that take so many times what the model says."""

    def __init__(self, linear: float, attention: float, each: float, mixed: float, after: float) -> None:
        self.linear, self.attention, self.each, self.mixed, self.after = linear, attention, each, mixed, after

    def prompts(self, prompts: int, tokens: int) -> float:
        matrices = self.linear * linear(SHAPE, prompts * tokens)
        return matrices + prompts * self.each + self.attention * attention(SHAPE, prompts, tokens)

    def both(self, sequences: int, keys: int, prompts: int, tokens: int) -> float:
        seen = decode(SHAPE, sequences, keys) - decode(SHAPE, sequences, TOUCH)
        rest = self.linear * (linear(SHAPE, sequences + prompts * tokens) - linear(SHAPE, prompts * tokens))
        return self.prompts(prompts, tokens) + rest + self.mixed * seen

    def curves(self) -> Curves:
        fresh = [
            (count, tokens) for count, tokens in [(1, each) for each in ALONE] + [(n // SHORT, SHORT) for n in TOGETHER]
        ]
        prompt = [
            dict(prompts=count, tokens=tokens, keys=tokens, seconds=self.prompts(count, tokens))
            for count, tokens in fresh
        ]
        behind = self.prompts(1, 64) + self.after * before(SHAPE, 64, 448)
        prompt.append(dict(prompts=1, tokens=64, keys=512, seconds=behind))
        sizes = [(4, 512, 1, 256), (16, 512, 4, 64)]
        points: dict[str, list[dict[str, Any]]] = dict(
            decode=[dict(sequences=n, keys=k, seconds=decode(SHAPE, n, k)) for n in (1, 64) for k in (TOUCH, 512)],
            prompt=prompt,
            mixed=[
                dict(sequences=n, keys=k, prompts=count, tokens=tokens, seconds=self.both(n, k, count, tokens))
                for n, k, count, tokens in sizes
            ],
            pick=[dict(rows=1, hidden=64, vocab=100, seconds=1.0)],
        )
        labels = dict(weights="float32")
        profile = Profile(**{kind: tuple(LAYER | labels | each for each in found) for kind, found in points.items()})
        facts = EngineFacts(profile, CHIPS["cpu"], True)
        return Curves(facts, "float32", decode, linear, attention, before, lambda *_: 1.0)


@pytest.mark.parametrize(
    "made",
    [
        (1.0, 1.0, 0.0, 1.0, 1.0),
        (1.3, 0.7, 0.0, 1.6, 0.5),  # a GPU, which attends to all prompts at once
        (0.8, 2.0, 2e-4, 1.0, 3.0),  # a CPU, which does so to one after the other
    ],
)
def test_the_factors_of_a_step_are_told_apart(made: tuple[float, ...]) -> None:
    machine = Machine(*made)
    curves = machine.curves()
    for tokens in (16, 100, 256, 700, 1024):
        assert curves.linear(SHAPE, tokens) == pytest.approx(machine.linear, rel=1e-6)
    assert curves.prompt(SHAPE) == pytest.approx((machine.attention, machine.each), rel=1e-6, abs=1e-12)
    assert curves.mixed(SHAPE) == pytest.approx(machine.mixed, rel=1e-6)
    assert curves.after(SHAPE, 64) == pytest.approx(machine.after, rel=1e-6)


def test_without_prompts_of_both_kinds_attention_is_as_modelled() -> None:
    machine = Machine(1.3, 1.0, 0.0, 1.0, 1.0)
    full = machine.curves().facts.profile
    only = [each for each in full.prompt if each["prompts"] == 1]
    facts = EngineFacts(Profile(decode=full.decode, prompt=tuple(only), pick=full.pick), CHIPS["cpu"], True)
    curves = Curves(facts, "float32", decode, linear, attention, before, lambda *_: 1.0)
    assert curves.prompt(SHAPE) == (1.0, 0.0)
    assert curves.mixed(SHAPE) == 1.0
    assert curves.linear(SHAPE, 256) == pytest.approx(1.3)
