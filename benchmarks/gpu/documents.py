"""Documents packed in rows, and sliding windows: told to flash attention by their bounds, beside the same by masks, and beside rows
that are one document each, on one GPU.

A step is the trainer's own (`TrainState.train_step`), compiled, on random tokens; documents have random lengths. Prints JSON lines:
milliseconds a step (median by CUDA events), peak memory. TFLOP/s count a row as one document.

    python benchmarks/gpu/documents.py [--batch 8] [--seq 4096] [--mean 512] [--window 1024] [--steps 10]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from shapes import SHAPES, need_gpu, our_run
from steps import measure

from shardwise.measure.verify import random_batch
from shardwise.parallel import apply
from shardwise.run import Run
from shardwise.train import step


def never(run: Run, *, gpu: bool) -> bool:
    """Nothing is told by bounds."""
    return False


def main() -> int:
    """Measure all five."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seq", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--mean", type=int, default=512, help="tokens in a document, about")
    parser.add_argument("--window", type=int, default=1024, help="positions that a query sees")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    need_gpu()
    ends = np.random.default_rng(0).random((args.batch, args.seq)) < 1 / args.mean
    documents = ends.cumsum(axis=1).astype(np.int32)
    for name in ("rows", "documents", "documents by masks", "window", "window by masks"):
        shape = SHAPES["1.5B"] | (dict(sliding_window=args.window) if name.startswith("window") else {})
        run = our_run(shape, args.batch, args.seq, {})
        batch = random_batch(run)
        if name.startswith("documents"):
            batch = replace(batch, documents=documents)
        with contextlib.ExitStack() as stack:
            for place in (apply, step) if name.endswith("masks") else ():
                stack.enter_context(mock.patch.object(place, "uses_varlen_attention", never))
            print(json.dumps(measure(run, args.steps, name, batch)), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
