"""On real ranks: a step computed twice, of which one rank may miscalculate, and a rank that computes longer than the other."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from tiny_run import tiny_run

from shardwise.data.open import open_data
from shardwise.train.faults.recheck import Corruption
from shardwise.train.step import TrainState


def twice(
    rank: int, layout: dict[str, Any], corrupt: int | None, cache: str, where: str = "layers.1.ffn"
) -> str | float:
    """The loss of a step that is rechecked, or what was found wrong with it. `corrupt` is the rank that flips one bit of one
    gradient once: of the output of the module that is `where`."""
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    run = tiny_run(layout, microbatch=1)
    train_state = TrainState(run)
    batch = open_data(run).train.take(train_state.samples(np.arange(4)))
    train_state.train_step(batch)
    if rank == corrupt:
        calls = 0

        def flip(module: Any, grads: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != 3:
                return None
            wrong = grads[0].clone()
            wrong.view(-1)[7:8].view(torch.int32).bitwise_xor_(1 << 20)
            return (wrong, *grads[1:])

        train_state.model.get_submodule(where).register_full_backward_pre_hook(flip)
    try:
        return train_state.train_step(batch, recheck=True).loss.item()
    except Corruption as e:
        return str(e)


def compared(rank: int, slow: int) -> tuple[int, float]:
    """The slowest rank and its ratio, where one rank computes three times as long as the others. The clock is that of the
    thread alone: a core that is shared with other tests would rightly make a rank slow."""
    from shardwise.train.progress import speed as module

    stragglers = module.Stragglers(2, torch.device("cpu"), torch.float32, world=2, rank=rank)
    with mock.patch.object(module, "busy_seconds", time.thread_time):
        for step in range(1, 7):
            until = time.thread_time() + (0.03 if rank == slow else 0.01)
            while time.thread_time() < until:
                pass
            found = stragglers.compare(step)
    assert found is not None
    assert (
        stragglers.summary()
        == found.__class__(np.median([c.seconds for c in stragglers.comparisons], 0).tolist()).sentence()
    )
    return found.slowest, found.ratio
