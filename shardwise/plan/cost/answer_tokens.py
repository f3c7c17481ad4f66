"""Token counts of a run that trains on its own completions: the length of its prompts, and its tokens that are not padding."""

from __future__ import annotations

from pathlib import Path

from shardwise.run import Run
from shardwise.run.vocabulary import INDEX


def prompt_tokens(run: Run) -> int:
    """The mean length of a run's prompts, where its datasets are present; else the tokens of a row that completions leave."""
    from shardwise.data.shards import read_index  # imports all of `data/`, which no other plan needs

    most = run.train.seq_len - run.objective.completion_tokens
    found = [read_index(folder) for folder in run.data.sets if (Path(folder) / INDEX).is_file()]
    documents = sum(index.documents for index in found)
    return max(1, min(most, round(sum(index.tokens for index in found) / documents))) if documents else most


def step_tokens(run: Run) -> int:
    """Tokens of a step that are not padding: completions at their full length, and their prompts."""
    if run.objective.kind != "grpo":
        return run.batch_tokens
    return run.train.global_batch * (prompt_tokens(run) + run.objective.completion_tokens)
