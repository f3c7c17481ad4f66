"""A covering array of layouts: few of many drawn ones, in which every axis meets every other and every variant."""

from __future__ import annotations

import ast
import functools
import itertools
import random

import cases
import pytest
from layouts import AXES, KINDS, OBJECTIVES, Drawn, draw_tuned

from shardwise.plan.cost.stages import layers_of_stages
from shardwise.run import Run
from shardwise.run.sections.objective import FACTS

Pair = tuple[str, str]
CANDIDATES = 720
"""Drawn at least to choose a covering array from; most combinations of an axis and a variant come up in them several times."""
SOME = "some microbatches"
ALWAYS: set[str] = {
    *cases.MODELS, *cases.SCHEDULES, *cases.METHODS, *(f"zero {n}" for n in (1, 2, 3)), *OBJECTIVES, "muon", "bfloat16",
}  # fmt: skip
"""What some layout of the small tier has with every commit, beside every axis."""
SOMETIMES: set[str] = {
    *cases.VARIANTS, *KINDS, *(f"recompute {how}" for how in ("none", "attention", "full", "operations", "budget", "optimal")),
    "async_tensor", "expert_tensor", "loss chunked", "uneven stages", "odd batch", "a budget of chunks", "a stage without layers",
}  # fmt: skip
"""What it has with some commits: half of these with each, and a third of the pairs of axes, beside what comes along."""


def features(model: str, run: Run) -> tuple[set[str], set[str]]:
    """The axes of a layout, and everything that could go wrong on one of them."""
    lay, train = run.layout, run.train
    axes = {axis for axis in AXES if getattr(lay, axis) > 1}
    found = axes | {train.optimizer, f"loss {train.loss}", f"recompute {lay.recompute}"}
    found |= {word.partition(" #")[0] for word in model.split(" + ")}
    found |= {f"window, {lay.context_method}"} if lay.context > 1 and run.model.sliding_window else set()
    found |= {"a budget of chunks"} if lay.recompute == "budget" and lay.stages_per_rank > 1 else set()
    found |= {"a stage without layers"} if any(not layers for layers in layers_of_stages(run)) else set()
    found |= {f"zero {lay.zero}"} if lay.shard > 1 else set()
    found |= {lay.context_method} if lay.context > 1 else set()
    found |= {"uneven stages" if lay.stages else "even stages"} if lay.pipeline > 1 else set()
    # A schedule shows with more microbatches than its two stages hold at once, and what accumulates with more than one.
    found |= {lay.schedule} if lay.pipeline > 1 and run.accumulation > 2 else set()
    found |= {SOME} if run.accumulation > 1 else set()
    found |= {name for name in ("async_tensor", "expert_tensor") if getattr(lay, name) and lay.tensor > 1}
    found |= {"odd batch"} if train.global_batch % 2 else set()
    return axes, found | {train.dtype}


@functools.cache
def covering_array(seed: int, world: int = 4) -> tuple[list[Drawn], int]:
    """Few layouts in which every axis meets every other and every variant: of many drawn, always the one that has most of what is
    missing for its cost (greedily, as AETG does: Cohen et al. 1997). The first of them, so many, are those of the small tier."""
    generator = random.Random(seed)
    drawn: list[Drawn] = []
    essential: list[set[Pair]] = []
    pairs: list[set[Pair]] = []
    costs: list[float] = []
    axis_pairs = sorted(itertools.combinations(sorted(AXES), 2))
    needed = {(each, each) for each in ALWAYS | SOMETIMES} | set(axis_pairs) | {(axis, SOME) for axis in AXES}
    missing = set(needed)
    while missing or len(drawn) < CANDIDATES:
        assert len(drawn) < 10 * CANDIDATES, f"draws lack {missing}"
        # Pairs of axes need four ranks; what is left to see shows on two.
        axes = generator.choice((1, 2))
        each, run = draw_tuned(generator, world if axes > 1 else 2, axes)
        of_run, found = features(each[0], run)
        found |= {name for name in (each[2].get("objective"), each[2].get("adapter")) if name}
        essential.append({(name, name) for name in found} | set(itertools.combinations(sorted(of_run), 2)))
        essential[-1] |= {(axis, SOME) for axis in of_run if SOME in found}
        pairs.append(essential[-1] | set(itertools.product(sorted(of_run), found)))
        costs.append(cost(run))
        drawn.append(each)
        missing -= essential[-1]
    left_out = set(generator.sample(sorted(SOMETIMES), len(SOMETIMES) // 2))
    small = needed - {(each, each) for each in left_out} - set(generator.sample(axis_pairs, 2 * len(axis_pairs) // 3))
    first = cover(essential, costs, small)
    missing = set().union(*pairs) - set().union(*(pairs[n] for n in first))
    return [drawn[n] for n in first + cover(pairs, costs, missing)], len(first)


def array_of(config: pytest.Config) -> tuple[list[Drawn], int]:
    """The array of this seed. Of several workers the first to come draws it, the others read what that one wrote."""
    seed, together = config.getoption("--seed"), getattr(config, "workerinput", {}).get("testrunuid")
    cache = getattr(config, "cache", None)
    if together is None or cache is None:
        return covering_array(seed)
    written = cache.get("layouts/array", None)
    if not written or written[0] != together:
        array, count = covering_array(seed)
        written = [together, repr(array), count]
        cache.set("layouts/array", written)
    return ast.literal_eval(written[1]), written[2]


def cover(sets: list[set[Pair]], costs: list[float], needed: set[Pair]) -> list[int]:
    """The numbers of some sets that together have what is needed, greedily; one that others make up for is left out again."""
    chosen: list[int] = []
    missing = set(needed)
    while missing:
        best = max(range(len(sets)), key=lambda n: len(sets[n] & missing) / costs[n])
        missing -= sets[best]
        chosen.append(best)
    for number in sorted(chosen, key=lambda n: -costs[n]):
        others = [n for n in chosen if n != number]
        if set().union(*(sets[n] for n in others)) >= needed:
            chosen = others
    return chosen


def cost(run: Run) -> float:
    """What a layout takes, about, in seconds of all its ranks: each starts, and runs some steps of small
    operations; and of the process that compares them."""
    lay, model = run.layout, run.model
    passes = run.accumulation * model.layers / lay.pipeline
    passes *= 1 + (model.experts > 0) + (lay.context > 1 and lay.context_method == "ring") + lay.async_tensor
    passes *= 1.5 if lay.recompute != "none" else 1.0
    passes *= 1.5 if FACTS[run.objective.kind].reference else 1.0
    passes *= 2.0 if run.train.dtype == "bfloat16" else 1.0  # which CPUs do not multiply
    return 1.0 + lay.world * (0.4 + 0.06 * passes)
