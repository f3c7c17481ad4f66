"""The draft model of speculative decoding (`serve.draft`): its sizes, as far as a plan or a rule needs them."""

from __future__ import annotations

from shardwise.run.config import ModelConfig, Run
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
