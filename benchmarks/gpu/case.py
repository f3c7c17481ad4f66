"""One trainer in a process of its own, for `harness.py`: makes ready, then trains so many steps each time it is asked to, and says
how long they took. It speaks JSON, a line an answer: when it is ready, for every number of steps it reads, and at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from shapes import SHAPES, our_run

SETTLE = 2
"""Steps after a pause that do not count."""
Step = Callable[[int], bool]
"""Trains a step on the tokens of its number, and says whether later ones will be like it: nothing is being tried out any more."""


def main() -> int:
    """Make ready, then answer until there is no more to read."""
    # Memory that is kept but not used would be missing to the case beside.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    args = argparse.Namespace(**json.loads(sys.argv[1]))
    step = make(args)
    step(0)
    torch.cuda.synchronize()
    first = time.time() - args.began
    done, settled = 1, False
    while done < args.warm or not settled:
        settled = step(done)
        done += 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    log(first_step_seconds=first, steps_to_settle=done, gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    for line in sys.stdin:
        log(**measured(step, done, int(line)))
        done += SETTLE + int(line)
    log(
        memory_gib=torch.cuda.max_memory_allocated() / 2**30,
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30,
    )
    return 0


def log(**values: Any) -> None:
    """An answer."""
    print(json.dumps(values), flush=True)


def measured(step: Step, done: int, steps: int) -> dict[str, Any]:
    """Milliseconds of each step, by CUDA events between steps that nobody waits for, and joules of all of them."""
    import torch

    for number in range(done, done + SETTLE):
        step(number)
    torch.cuda.synchronize()
    before = joules()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for number, event in enumerate(events[1:], done + SETTLE):
        step(number)
        event.record()
    torch.cuda.synchronize()
    return dict(milliseconds=[a.elapsed_time(b) for a, b in pairwise(events)], joules=(joules() - before) / steps)


def joules() -> float:
    """What the GPU has used since its driver was loaded, by its own count; not a number where it does not count."""
    used, handle = ctypes.c_ulonglong(), ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return float("nan")
    failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        or library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used))
    )
    return float("nan") if failed else used.value / 1e3


def make(args: argparse.Namespace) -> Step:
    """The step of a case."""
    name, _, text = args.case.partition(":")
    options = dict(pair.split("=", 1) for pair in text.split(",") if pair)
    shape = SHAPES[args.model]
    if name == "shardwise":
        return ours(shape, args.batch, args.seq, options)
    sys.path.insert(0, args.peers)
    import peers

    makers = {"torchtitan": peers.torchtitan, "liger": peers.liger, "transformers": peers.transformers}
    return with_tokens(makers[name](shape, args.seq, options), shape["vocab"], args.batch, args.seq)


def ours(shape: dict[str, int], batch: int, seq: int, options: dict[str, str]) -> Step:
    """The step of `shardwise train`, read a step later and replayed where its loop does so."""
    from shardwise.measure.verify import random_batch
    from shardwise.train import cuda_graph, tune_gemms
    from shardwise.train.step import TrainState

    run = our_run(shape, batch, seq, options)
    train_state = TrainState(run)
    tune_gemms.attach(train_state, lambda text: print(text, file=sys.stderr))
    cuda_graph.attach(train_state)
    unread = []

    def step(number: int) -> bool:
        unread.append(train_state.train_step(random_batch(run, number)))
        if len(unread) > 1:
            unread.pop(0).read()
        return train_state.tuner is None or (number > 1 and train_state.tuner.done)

    return step


def with_tokens(train: Callable[[Any, Any], Any], vocab: int, batch: int, seq: int) -> Step:
    """A peer's step on random tokens of the device."""
    import torch

    def step(number: int) -> bool:
        tokens = torch.randint(0, vocab, (batch, seq + 1), device="cuda")
        train(tokens[:, :-1], tokens[:, 1:])
        return True

    return step


if __name__ == "__main__":
    sys.exit(main())
