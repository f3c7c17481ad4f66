"""Random runs as changes of a base run, legal and not."""

from __future__ import annotations

import random

BASE = ["model.preset=llama3-8b", "cluster.chip=h100", "cluster.nodes=4", "layout.shard=8", "layout.tensor=4"]
CHOICES: dict[str, list[str]] = {
    "model.preset": ["llama3-70b", "llama3-405b", "mixtral-8x7b", "qwen2.5-7b", "deepseek-v3"],
    "cluster.chip": ["h100", "h200", "a100", "b200"],
    "cluster.nodes": ["1", "2", "8", "64"],
    "layout.replicate": ["1", "2", "4"],
    "layout.shard": ["1", "2", "8", "32"],
    "layout.context": ["1", "2", "4"],
    "layout.tensor": ["1", "2", "4", "8"],
    "layout.pipeline": ["1", "2", "4", "8"],
    "layout.expert": ["1", "2", "8"],
    "layout.zero": ["1", "2", "3"],
    "layout.schedule": ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"],
    "layout.recompute": ["none", "attention", "full"],
    "layout.context_method": ["ring", "ulysses"],
    "layout.async_tensor": ["true", "false"],
    "train.global_batch": ["64", "256", "1024"],
    "train.seq_len": ["2048", "8192", "32768"],
    "train.microbatch": ["1", "2"],
    "train.dtype": ["bfloat16", "float32"],
    "train.fp8": ["none", "rowwise"],
    "train.optimizer": ["adamw", "muon"],
    "objective.kind": ["pretrain", "sft", "dpo"],
}


def drawn(seed: int, count: int) -> list[dict[str, str]]:
    """So many sets of changes."""
    source = random.Random(seed)
    return [
        {key: source.choice(CHOICES[key]) for key in source.sample(sorted(CHOICES), source.randint(0, 7))}
        for _ in range(count)
    ]
