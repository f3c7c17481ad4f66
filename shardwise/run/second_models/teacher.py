"""The teacher model of a distillation run: its sizes, and its layout beside the student on the same ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shardwise.run.config import ModelConfig, Run
from shardwise.run.second_models.named_model import named_model
from shardwise.run.sections.adapter import AdapterConfig

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
