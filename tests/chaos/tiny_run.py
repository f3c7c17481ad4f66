"""The smallest run that trains for real, as a `Run` and as a file. It stands beside the campaigns, which run as scripts."""

from __future__ import annotations

from typing import Any

from shardwise.run import Run, run_from_dict
from shardwise.run.write import sections_to_toml

MODEL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, ffn=32)
TRAIN: dict[str, Any] = dict(seq_len=32, global_batch=4, device="cpu", eval_every=0)


def tiny_run(layout: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **train: Any) -> Run:
    """The run, with these keys of its sections."""
    return run_from_dict(dict(name="tiny", model=model or MODEL, layout=layout or {}, train=TRAIN | train))


def tiny_toml(layout: dict[str, Any] | None = None, **train: Any) -> str:
    """Its file, as a user would write one."""
    return sections_to_toml(dict(name="tiny", model=MODEL, layout=layout or {}, train=TRAIN | train))
