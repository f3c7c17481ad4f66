"""The tokens of a run that learns from its own answers: how long its prompts are, and what of its rows is no padding."""

from __future__ import annotations

from pathlib import Path

from shardwise.run import Run
from shardwise.run.vocabulary import INDEX


def prompt_tokens(run: Run) -> int:
    """The mean length of a run's prompts, where its sets are there; else what answers leave of a row."""
    from shardwise.data.shards import read_index  # with all of `data/`, which no other plan needs

    most = run.train.seq_len - run.objective.completion_tokens
    found = [read_index(folder) for folder in run.data.sets if (Path(folder) / INDEX).is_file()]
    documents = sum(index.documents for index in found)
    return max(1, min(most, round(sum(index.tokens for index in found) / documents))) if documents else most


def step_tokens(run: Run) -> int:
    """Tokens of a step that are no padding: of answers at their full length, and their prompts."""
    if run.objective.kind != "grpo":
        return run.batch_tokens
    return run.train.global_batch * (prompt_tokens(run) + run.objective.completion_tokens)
