"""Consistency rules of a run that writes text samples at its evaluations (`train.samples`)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.run.config import Run
from shardwise.run.rules.rule import Rule

SAMPLED = ("pretrain", "sft", "distill")
"""Objectives whose network continues texts of the validation set."""
PROMPT_TOKENS = 32
"""Tokens of a validation sequence that form a sample's prompt, at most a quarter of a row."""

# fmt: off


def prompt_tokens(run: Run) -> int:
    """The number of tokens of a validation sequence that form a sample's prompt."""
    return min(PROMPT_TOKENS, max(1, run.train.seq_len // 4))


def sample_rules(run: Run) -> Iterator[Rule]:
    """Rules of train.samples. The sizes of the layout may be arrays."""
    train, lay = run.train, run.layout
    if not train.samples:
        return
    yield Rule((lay.tensor > 1) | (lay.pipeline > 1) | (lay.context > 1), "train.samples",
               ("layout.tensor", "layout.pipeline", "layout.context"), lambda: (
        "works only without tensor, pipeline and context parallelism; set it to 0, and use `shardwise generate` with a "
        "checkpoint"
    ))
    yield Rule(run.objective.kind not in SAMPLED or run.model.scores, "train.samples", ("objective.kind",),
               lambda: f"continues texts of the validation set; objective.kind = {run.objective.kind} has none; set it to 0")
    yield Rule(not train.eval_every, "train.samples", ("train.eval_every",),
               lambda: "are written at evaluations, but train.eval_every is 0")
    yield Rule(prompt_tokens(run) + train.sample_tokens > train.seq_len, "train.sample_tokens", ("train.seq_len",), lambda: (
        f"{train.sample_tokens} plus {prompt_tokens(run)} tokens of prompt is more than train.seq_len = {train.seq_len}"
    ))
