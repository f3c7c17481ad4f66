"""Draws of what saves memory and traffic, two or more together on any axes: an exchange that is compressed or rare, a schedule that
trades memory or weights for time, and what is kept in fewer bits or elsewhere."""

from __future__ import annotations

import math
import random
from typing import Any

import cases
import layouts

from shardwise.run import Run, UserError
from shardwise.run.axes import ASYNCHRONOUS

REPLICAS: list[dict[str, Any]] = [
    *(dict(compress=method) for method in ("int8", "fp8", "int4")),
    dict(compress="onebit", compress_warmup=3),
    *(dict(compress="powersgd", compress_rank=rank) for rank in (1, 4)),
    dict(compress="topk", compress_density=0.07),
    dict(compress="topk", compress_momentum=0.9),
    dict(compress="powersgd", compress_warmup=2),
    dict(sync_every=3, outer_optimizer="average"),
    dict(sync_every=2),
    dict(sync_every=4, sync_fragments=3, sync_overlap=1, compress="int4"),
]
SHARDS: list[dict[str, Any]] = [
    dict(compress_weights="int8", compress_shards="int4"),
    dict(compress_weights="int4"),
    dict(compress_shards="fp8"),
    dict(secondary_shard=2),
    dict(secondary_shard=2, compress_weights="int8"),
]
PIPELINES = ("pipedream", "pipedream-2bw", "bpipe", "zb-2p", "dualpipe")
MEMORY: list[dict[str, Any]] = [
    *(dict(activation_bits=bits) for bits in (8, 4, 2)),
    dict(activations="host"),
]
OFFLOAD = dict(offload=True)
"""Parameters in the host's memory: needs a GPU, and is compared dry."""
SIZES = ("replicate", "shard", "context", "tensor", "pipeline")
KINDS = ("replicas", "shards", "pipelines", "memory")


TRIES = 40
"""Layouts that are drawn for a choice of methods before it is taken for one that the rules refuse."""


def draw(generator: random.Random, world: int = 8) -> tuple[str, Run]:
    """A legal run on up to so many ranks with some of the methods, and its model's name. The methods are chosen first, so that
    those that go with few models come up as often as others."""
    while True:
        kinds = generator.sample(KINDS, generator.choice([2, 2, 3]))
        chosen = _chosen(generator, kinds)
        memory = generator.choice([*MEMORY, {}]) if "memory" in kinds else {}
        dry = "memory" in kinds and not memory
        chosen |= OFFLOAD if dry else {}
        for _ in range(TRIES):
            model, layout, train = layouts.draw(generator, world, axes=1)
            layout |= chosen
            train |= dict(global_batch=8, microbatch=1, dtype=generator.choice(["float32", "float32", "bfloat16"]))
            if dry:
                train["device"] = "cuda"
            if layout["schedule"] in ASYNCHRONOUS:
                train |= dict(clip=0.0)
            if "sync_every" in chosen:
                train |= dict(balance_rate=0.0)
            if math.prod(layout[axis] for axis in SIZES) > world:
                continue
            try:
                return model, cases.make_run(model, layout, memory=memory, **cases.layers_for(layout) | train)
            except UserError:
                continue


def _chosen(generator: random.Random, kinds: list[str]) -> dict[str, Any]:
    """The keys of the layout that the methods have."""
    layout: dict[str, Any] = {}
    if "replicas" in kinds:
        layout |= generator.choice(REPLICAS) | dict(replicate=2)
    if "shards" in kinds:
        layout |= generator.choice(SHARDS) | dict(shard=generator.choice([2, 4]))
    if "secondary_shard" in layout:
        layout |= dict(shard=4, zero=3)
    if "pipelines" in kinds:
        layout |= dict(pipeline=generator.choice([2, 2, 4]), schedule=generator.choice(PIPELINES), stages=())
    return layout
