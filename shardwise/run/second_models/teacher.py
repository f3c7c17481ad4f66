"""The teacher model of a distillation run: its sizes, its layout beside the student on the same ranks, and what it must match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from shardwise.run.config import ModelConfig, Run
from shardwise.run.problems import UserError
from shardwise.run.rules.rule import Rule
from shardwise.run.second_models.named_model import named_model
from shardwise.run.sections.adapter import AdapterConfig
from shardwise.run.sections.objective import ObjectiveConfig, facts_of

KEY = "objective.teacher"


def teacher_model(run: Run) -> ModelConfig:
    """The teacher's sizes. Raises `UserError` if they cannot be known."""
    name = run.objective.teacher
    stamps = tuple(file.stat().st_mtime_ns for file in _files(Path(name)))
    return _named(name, stamps, run.train.seq_len)


@lru_cache(maxsize=64)
def _named(name: str, stamps: tuple[int, ...], seq_len: int) -> ModelConfig:
    """Cached until its files change, since every rank of a plan asks for it."""
    return named_model(name, KEY, seq_len)


def _files(path: Path) -> list[Path]:
    return sorted([*path.glob("run.toml"), *path.glob("checkpoints/step-*/run.toml")])


def teacher_run(run: Run) -> Run:
    """The teacher's run beside the student's: the same axes, its own stages, and no expert axis if it has no experts. Weights
    that are drawn, for tests, are not of the student's parametrization: a head of zeros names no likeliest tokens."""
    model, layout = teacher_model(run), replace(run.layout, stages=())
    if not model.experts:
        layout = replace(layout, expert=1, expert_tensor=False)
    train = replace(run.train, parametrization="standard")
    return replace(run, model=model, layout=layout, train=train, adapter=AdapterConfig())


# fmt: off
def teacher_rules(run: Run) -> Iterator[Rule]:
    """Rules of objective.kind = distill, and of log-probabilities stored with the data."""
    o, m = run.objective, run.model
    yield Rule(o.stored and o.kind not in ("dpo", "distill"), "objective.stored", ("objective.kind",),
               lambda: f"{o.kind} learns nothing from numbers beside the data; they are for dpo and distill")
    if o.kind != "distill":
        return
    yield Rule(not o.teacher and not o.stored, KEY, ("objective.stored",), lambda: (
        "is empty, and there is nothing to learn from; name a model, or set objective.stored where its scores are beside the data"
    ))
    yield Rule(o.cross_entropy > 0 and o.temperature != 1, "objective.cross_entropy", ("objective.temperature",), lambda: (
        "is that of the student as it is, and objective.temperature divides its logits; use one of the two"
    ))
    yield Rule(o.stored and not o.teacher_tokens, "objective.teacher_tokens", ("objective.stored",),
               lambda: "0 would store the whole vocabulary for each token; store some of the likeliest")
    yield Rule(run.train.invariant, "train.invariant", ("objective.kind",),
               lambda: "has no GEMMs for a teacher; leave it off")
    if not o.teacher:
        return
    try:
        teacher = teacher_model(run)
    except UserError as error:
        yield Rule(True, KEY, (), partial(str, error.problems[0].message))
        return
    yield Rule(teacher.vocab != m.vocab, KEY, ("model.vocab",), lambda: (
        f"{o.teacher} has a vocabulary of {teacher.vocab} and the model one of {m.vocab}: its tokens would mean something else"
    ))
    yield Rule(teacher.scores, KEY, (), lambda: f"{o.teacher} is a reward model, which says nothing of the next token")
    yield Rule(teacher.position == "learned" and teacher.max_positions < run.train.seq_len, KEY, ("train.seq_len",), lambda: (
        f"{o.teacher} has {teacher.max_positions} learned positions, and train.seq_len = {run.train.seq_len}"
    ))


def teacher_layout_rules(run: Run, rules: Callable[[Run], Iterator[Rule]]) -> Iterator[Rule]:
    """Rules between teacher and layout: the same `rules` as for any network. Sizes of the layout may be arrays."""
    if run.objective.kind != "distill" or not run.objective.teacher or not facts_of(run.objective).reference:
        return
    try:
        teacher = teacher_run(run)
    except UserError:  # the other rules report it
        return
    plain = replace(
        teacher.layout, recompute="none", recompute_budget=0.0, recompute_operations=(), recompute_every=1
    )
    for rule in rules(replace(teacher, objective=ObjectiveConfig(), layout=plain)):
        yield Rule(rule.broken, KEY, (*rule.others, rule.key),
                   lambda rule=rule: f"{run.objective.teacher} does not fit {rule.key}: {rule.reason()}")  # type: ignore[misc]
