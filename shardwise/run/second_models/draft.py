"""The draft model of speculative decoding (`serve.draft`): its sizes, as far as a plan or a rule needs them, and what it must match
in the served model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwise.run.config import ModelConfig, Run
from shardwise.run.problems import UserError
from shardwise.run.rules.rule import Rule
from shardwise.run.second_models.named_model import named_model


def drafts(run: Run) -> int:
    """Draft tokens that a step verifies for each sequence, besides its last token; 0 without speculation."""
    return run.serve.draft_tokens if run.serve.speculate != "none" else 0


def draft_model(run: Run) -> ModelConfig | None:
    """The draft model's sizes; None if the run has none. Raises `UserError` if they cannot be known."""
    name = run.serve.draft
    if run.serve.speculate != "draft" or not name:
        return None
    return named_model(name, "serve.draft", run.train.seq_len)


# fmt: off
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
