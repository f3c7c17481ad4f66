"""Jobs for tests of the planner."""

from __future__ import annotations

from typing import Any

from shardwise.hardware import make_cluster
from shardwise.plan.cost.frameworks import FRAMEWORKS
from shardwise.plan.cost.job import Job
from shardwise.run import LayoutConfig, ModelConfig
from shardwise.run.derive import derive_model

GPT: dict[str, Any] = dict(
    layers=8,
    hidden=1024,
    heads=16,
    ffn=4096,
    vocab=51200,
    norm="layernorm",
    bias="all",
    position="learned",
    activation="gelu",
)
LLAMA: dict[str, Any] = dict(layers=8, hidden=1024, heads=16, kv_heads=8, ffn=2816, vocab=32000)
EXPERTS: dict[str, Any] = LLAMA | dict(
    experts=16, experts_per_token=2, expert_ffn=512, shared_experts=1, dense_layers=1
)


def make_job(model: dict[str, Any], framework: str = "shardwise", **layout: Any) -> Job:
    """A job on A100s; `microbatch`, `batch` and `seq_len` beside the layout's keys."""
    seq_len, microbatch, batch = layout.pop("seq_len", 2048), layout.pop("microbatch", 1), layout.pop("batch", 64)
    config = derive_model(ModelConfig(**model), seq_len)
    lay = LayoutConfig(**layout)
    return Job(config, lay, seq_len, batch, microbatch, FRAMEWORKS[framework], make_cluster("a100-sxm-80g", 64, 8))
