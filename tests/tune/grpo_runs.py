"""Runs that are small in every way, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.run import Run, run_from_dict


def grpo_run(folder: Path, **more: dict[str, Any]) -> Run:
    """A run on the task of a folder; further keys by section."""
    train = dict(
        steps=4, global_batch=8, seq_len=16, dtype="float64", device="cpu", eval_every=0, lr=1e-2, schedule="constant"
    )
    sections: dict[str, dict[str, Any]] = dict(
        model=dict(layers=2, hidden=32, heads=4, kv_heads=2, vocab=260),
        train=train,
        objective=dict(kind="grpo", rewards=[f"{folder / 'rewards.py'}:letters"], group=4, completion_tokens=6),
        data=dict(sets=[str(folder / "set")]),
        serve=dict(page_tokens=4, max_sequences=8),
    )
    for section, values in more.items():
        sections[section] = sections.get(section, {}) | values
    return run_from_dict(sections)
