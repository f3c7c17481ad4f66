"""What `fully_shard` casts, copies and adds on a rank, counted in a dry run, beside what the plan prices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from shardwise.measure.dry import dry_rank, even_routing
from shardwise.measure.verify import random_batch
from shardwise.plan.cost.job import job_of
from shardwise.plan.time.copies import copied_bytes
from shardwise.run import run_from_dict
from shardwise.torch_private import TorchDispatchMode, tree_leaves

LEAST = 1024
"""Elements of the smallest shard of a matrix; activations are smaller."""


class Copies(TorchDispatchMode):
    """Counts bytes that casts, copies and sums of matrices, of their gradients and of shards of them read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1]
        moved = {
            "_to_copy": lambda: (args, result),
            "add_.Tensor": lambda: (args, result),
            "_foreach_copy_": lambda: args,
            "all_gather_copy_in": lambda: (args[0], args[0]),
            "split_with_sizes_copy": lambda: (args, kwargs),
            "chunk_cat": lambda: (args, kwargs),
        }.get(name)
        if moved is not None:
            tensors = [t for t in tree_leaves(moved()) if isinstance(t, Tensor) and t.numel() >= LEAST]
            self.found[name] += sum(t.numel() * t.element_size() for t in tensors)
        return result


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.drawn(4, "zero")
def test_bytes_of_fully_shard(zero: int, microbatches: int, reduce_dtype: str, schedule: str) -> None:
    """With ZeRO-1 weights are cast and copied once a step, and gradients added whole; with ZeRO-3 for every pass."""
    model = dict(vocab=64, hidden=64, layers=3, heads=2, ffn=128)
    train = dict(dtype="bfloat16", reduce_dtype=reduce_dtype, seq_len=8, microbatch=1, global_batch=4 * microbatches)
    layout = dict(
        shard=4, zero=zero, pipeline=3, schedule=schedule
    )  # so that ZeRO-3 keeps no embedding gathered from pass to pass
    run = run_from_dict(dict(model=model, layout=layout, train=train | dict(device="cpu", compile=False)))
    with dry_rank(run, 4) as state, even_routing(state):  # a stage in the middle
        batch = random_batch(run, 0)
        state.train_step(batch)
        with Copies() as copies:
            state.train_step(batch)
    job = job_of(run)
    assert job.fully_sharded[0] == 1
    each = copied_bytes(job, 4)
    matrices = 4 * 64 * 64 + 3 * 64 * 128
    several = each.several * (microbatches > 1)
    planned = matrices * (microbatches * (each.forward + each.backward) + each.once + several)
    # Of deferred gradients those that come between two backward passes are added up in 16 bits, which the plan leaves out.
    assert sum(copies.found.values()) == pytest.approx(planned, rel=0.01 if schedule == "1f1b" else 0.12), copies.found
