"""Runs to be turned on the workbench: pages that begin with many kinds of run, and changes of every key that it offers, legal and
not. Presets, chips and words come from their declarations, so a new one is drawn too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from shardwise.run import PRESETS, RANK_AXES, UserError
from shardwise.run.sections.declare import Key
from shardwise.workbench.controls import SLIDERS, choices, offered
from shardwise.workbench.question import Base, base_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BASES: dict[str, list[str]] = {
    "no run": [],
    "dense": ["--model.preset=llama3-8b", "--cluster.chip=h100", "--cluster.nodes=4", "--layout.shard=8", "--layout.tensor=4"],
    "experts": ["--model.preset=deepseek-v3", "--cluster.chip=h200", "--cluster.nodes=32", "--layout.shard=32",
                "--layout.pipeline=8", "--layout.expert=32"],
    "own shape": ["--model.layers=24", "--model.hidden=2048", "--model.heads=16", "--model.vocab=50304", "--cluster.chip=a100",
                  "--layout.shard=8", "--layout.zero=3"],
    "answers": ["--model.preset=qwen2.5-7b", "--objective.kind=grpo", "--objective.rewards=contains", "--cluster.chip=h200",
                "--layout.shard=8", "--serve.max_step_tokens=4096", "--serve.max_sequences=128", "--serve.page_tokens=32"],
    "QLoRA": [str(EXAMPLES / "llama3-70b-qlora.toml")],
    "LoRA": [str(EXAMPLES / "llama3-8b-lora-h200.toml")],
    "preferences": [str(EXAMPLES / "dpo.toml")],
    "served while it trains": [str(EXAMPLES / "reverse" / "grpo.toml")],
    "in a file": [str(EXAMPLES / "llama3-70b-h100.toml"), "--train.global_batch=256"],
}  # fmt: skip
"""What the command is given."""
KEYS = {key.name: key for key in offered()}


def drawn_value(source: random.Random, key: Key) -> str:
    """Some value of a control, now and then one that is out of bounds."""
    if offers := [each for each in choices(key) if each]:
        return source.choice(offers)
    if key.type is bool:
        return source.choice(["true", "false"])
    if key.type is int:
        near = [int(key.default or 1), 2 * int(key.default or 1), key.least, 1, 2, 3, 4, 8, 16, 4096, -1]
        return str(source.choice([int(each) for each in near if each is not None]))
    if key.type is float:
        near = [key.default, key.least, key.most, 0.5, 0.1, 1, 2, 1e-4, 1000, -0.5]
        return f"{source.choice([float(each) for each in near if each is not None]):g}"
    words = {"tuple[int, ...]": ["8,8", "4,5,6", "x"], "tuple[float, ...]": ["1,2", "0.5", "-1"]}
    own = {"adapter.targets": ["all", "q,v", "attention", "nothing"], "objective.rewards": ["contains", "number", "x"],
           "layout.recompute_operations": ["ffn", "attention,norm", "x"],
           "objective.teacher": ["llama3-8b", "gpt3-175b"]}  # fmt: skip
    return source.choice(own.get(key.name) or words.get(str(key.type), ["x", "runs/other", "a b"]))


def another_value(key: Key, value: str) -> str:
    """One that a control with few of them can have instead."""
    if key.type is bool:
        return "false" if value == "true" else "true"
    offers = [each for each in choices(key) if each]
    return offers[(offers.index(value) + 1) % len(offers)] if value in offers else value


def drawn_changes(source: random.Random) -> dict[str, str]:
    """A model, a cluster, a layout that often has as many ranks as the cluster has devices, and some of everything else."""
    found: dict[str, str] = {}
    if source.random() < 0.6:
        found["model.preset"] = source.choice(sorted(PRESETS))
    if source.random() < 0.4:
        found["cluster.chip"] = drawn_value(source, KEYS["cluster.chip"])
    if source.random() < 0.7:
        found |= _fitting(source)
    for key, chance in {"objective.kind": 0.35, "adapter.kind": 0.25, "layout.zero": 0.3, "layout.schedule": 0.3,
                        "layout.recompute": 0.3, "train.dtype": 0.5, "train.fp8": 0.2, "train.optimizer": 0.2}.items():  # fmt: skip
        if source.random() < chance:
            found[key] = drawn_value(source, KEYS[key])
    for key in source.sample(["train.global_batch", "train.seq_len", "train.microbatch"], source.randint(0, 2)):
        found[key] = str(source.choice(SLIDERS[key][:8]))
    for key in source.sample(sorted(KEYS), source.choice([0, 0, 1, 1, 2, 4])):
        found.setdefault(key, drawn_value(source, KEYS[key]))
    return found


def _fitting(source: random.Random) -> dict[str, str]:
    nodes = source.choice([1, 2, 4, 8, 16, 64])
    sizes, left = dict.fromkeys(RANK_AXES, 1), 8 * nodes
    while left > 1:
        axis = source.choice(RANK_AXES)
        sizes[axis], left = 2 * sizes[axis], left // 2
    found = {"cluster.nodes": str(nodes), "cluster.devices_per_node": "8"}
    found |= {f"layout.{axis}": str(size) for axis, size in sizes.items()}
    if source.random() < 0.2:
        found["layout.expert"] = str(source.choice([2, 4, 8]))
    return found


def covering(source: random.Random, of: int) -> list[dict[str, str]]:
    """Changes that turn every control at least once, in so many runs."""
    order, runs = sorted(KEYS), [dict[str, str]() for _ in range(of)]
    source.shuffle(order)
    for at, name in enumerate(order):
        runs[at % of][name] = drawn_value(source, KEYS[name])
    return runs


def campaign(seed: int, count: int) -> list[tuple[str, dict[str, Any]]]:
    """The whole of it: a base and changes for each run, those of one page after another."""
    source = random.Random(seed)
    share = -(-count // len(BASES))
    cover = covering(source, max(1, count // 10))
    found = []
    for at in range(count):
        base = list(BASES)[at // share]
        found.append((base, cover.pop() if at % 10 == 5 and cover else _drawn(source, base, legal=at % 10 < 8)))
    return found


def _drawn(source: random.Random, base: str, legal: bool) -> dict[str, str]:
    """Changes of a page's run; `legal` ones are drawn until there is nothing wrong with them, or for long."""
    given = given_of(base)
    changes = drawn_changes(source)
    for _ in range(60 if legal else 0):
        try:
            given.planned(changes)
            break
        except UserError:
            changes = drawn_changes(source)
    return changes


def given_of(base: str) -> Base:
    """The run that a page begins with."""
    path = next((each for each in BASES[base] if not each.startswith("--")), None)
    return base_of(path, [each[2:] for each in BASES[base] if each.startswith("--")])
