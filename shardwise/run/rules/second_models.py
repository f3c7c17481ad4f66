"""Rules of the models beside a run's own: what a teacher and a draft must match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from shardwise.run.config import Run
from shardwise.run.problems import UserError
from shardwise.run.rules.rule import Rule
from shardwise.run.second_models.draft import draft_model
from shardwise.run.second_models.teacher import KEY, teacher_model, teacher_run
from shardwise.run.sections.objective import ObjectiveConfig, facts_of


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


def speculation_rules(run: Run) -> Iterator[Rule]:
    """Requirements of speculative decoding on the run and on the draft model."""
    m, serve = run.model, run.serve
    yield Rule(serve.ngram_min > serve.ngram_max, "serve.ngram_min", ("serve.ngram_max",),
               lambda: f"{serve.ngram_min} is more than serve.ngram_max = {serve.ngram_max}")
    yield Rule(serve.speculate == "draft" and not serve.draft, "serve.draft", ("serve.speculate",),
               lambda: 'is empty, and serve.speculate = "draft" needs a model that guesses; "ngram" needs none')
    try:
        draft = draft_model(run)
    except UserError as error:
        yield Rule(True, "serve.draft", (), partial(str, error.problems[0].message))
        return
    if draft is None:
        return
    yield Rule(draft.vocab != m.vocab, "serve.draft", ("model.vocab",), lambda: (
        f"{serve.draft} has a vocabulary of {draft.vocab} and the model one of {m.vocab}: its tokens would mean something else"
    ))
    yield Rule(m.sliding_window and not 0 < draft.sliding_window <= m.sliding_window, "serve.draft", ("model.sliding_window",),
               lambda: f"{serve.draft} sees further back than the {m.sliding_window} tokens whose pages are kept")
    yield Rule(draft.position == "learned" and draft.max_positions < m.max_positions, "serve.draft", ("model.max_positions",),
               lambda: f"{serve.draft} has {draft.max_positions} learned positions and the model {m.max_positions}")
