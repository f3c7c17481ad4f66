"""Does training in 8 bits learn what 16 bits learn? The same model, seed and batches by this trainer in bf16 and in fp8, the
validation loss every so many steps, and how far apart the two end.

Two curves part by chance as well: sums are made in another order each time, and early training amplifies the least difference.
`--again` shows by how much, with bf16 a second time; with several seeds the difference is the mean of theirs.

Trains on the built-in corpus, as bytes, or on sets made by `shardwise data build`. Bytes are learned in steep falls, whose
beginning any disturbance moves, so that single pairs part by percents; tokens, as `manuals.py` makes them, show what 8 bits do. The
file holds every curve finished so far.
Exit code 1 when the validation loss of 8 bits ends more than 0.5% above or below bf16's.

    python benchmarks/gpu/fp8_loss.py --output fp8_loss.json [--model 1.5B] [--steps 500] [--batch 2] [--seq-len 4096]
        [--scalings tensorwise rowwise] [--seeds 0 1 2] [--again] [--lr 3e-4] [--sets FOLDER …] [--validation FOLDER …]
        [--no-compile]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.open import Data, open_data
from shardwise.run import Run, run_from_dict
from shardwise.train import cuda_graph, tune_gemms
from shardwise.train.batches.source import batches
from shardwise.train.step import TrainState

MODELS: dict[str, dict[str, int]] = {
    "tiny": dict(layers=4, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=257),
    "0.1B": dict(layers=12, hidden=768, heads=12, kv_heads=4, ffn=2048, vocab=32000),
    "0.4B": dict(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=128256),
    "1.5B": dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256),
}
ALLOWED = 0.005
PLAIN, AGAIN = "bf16", "bf16 again"


def make_run(args: argparse.Namespace, scaling: str, seed: int) -> Run:
    """The run of one curve; those of a seed differ in nothing but the scaling."""
    train = dict(
        steps=args.steps, seq_len=args.seq_len, global_batch=args.batch, dtype="bfloat16", fp8=scaling, seed=seed,
        compile=args.compile, lr=args.lr, warmup=min(args.warmup, args.steps // 5), device=args.device,
    )  # fmt: skip
    return run_from_dict(
        dict(model=MODELS[args.model], train=train, data=dict(sets=args.sets, validation=args.validation))
    )


def curve(name: str, run: Run, data: Data, every: int, sequences: int) -> dict[str, Any]:
    """Train; losses of all steps, and the validation loss every so many."""
    train_state = TrainState(run)
    tune_gemms.attach(train_state)
    cuda_graph.attach(train_state)
    count = data.validation.count
    chosen = np.arange(min(sequences, count)) * count // min(sequences, count)
    began = time.perf_counter()
    losses, validation = [], []
    for batch in batches(data.train, train_state, run.train.steps):
        losses.append(train_state.train_step(batch).loss)
        if train_state.step % every == 0 or train_state.step == run.train.steps:
            validation.append((train_state.step, train_state.evaluate(data.validation.take, chosen)))
            seconds = time.perf_counter() - began
            print(
                f"{name}: step {train_state.step}, loss {losses[-1].item():.4f}, "
                f"validation {validation[-1][1]:.4f}, {seconds:.0f} s",
                flush=True,
            )
    return dict(
        losses=[loss.item() for loss in losses], validation=validation, seconds=time.perf_counter() - began
    )  # fmt: skip


def main() -> int:
    """All curves, each written as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("fp8_loss.json"))
    parser.add_argument("--model", choices=MODELS, default="1.5B")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--sequences", type=int, default=64, help="validation sequences of an evaluation")
    parser.add_argument("--scalings", nargs="+", default=["tensorwise"], choices=["tensorwise", "rowwise"])
    parser.add_argument("--again", action="store_true", help="bf16 a second time, as a measure of chance")
    parser.add_argument("--sets", nargs="*", default=[], help="token sets to learn; none: the built-in corpus")
    parser.add_argument(
        "--validation", nargs="*", default=[], help="sets to validate on; none: a part of those to learn"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    kinds = {PLAIN: "none"} | {scaling: scaling for scaling in args.scalings} | ({AGAIN: "none"} if args.again else {})
    curves: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    differences: dict[str, list[float]] = {}
    for seed in args.seeds:
        for kind, scaling in kinds.items():
            run = make_run(args, scaling, seed)
            curves[kind].append(curve(f"seed {seed}, {kind}", run, open_data(run), args.every, args.sequences))
            ends = {kind: np.array([each["validation"][-1][1] for each in those]) for kind, those in curves.items()}
            differences = {kind: list(end / ends[PLAIN][: len(end)] - 1) for kind, end in ends.items() if kind != PLAIN}
            settings = {key: str(value) if key == "output" else value for key, value in vars(args).items()}
            result = dict(settings=settings, torch=torch.__version__, curves=curves, differences=differences)
            args.output.write_text(json.dumps(result) + "\n")
            gc.collect()
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    for kind, those in differences.items():
        of = f", the mean of {', '.join(f'{each:+.3%}' for each in those)}" if len(those) > 1 else ""
        print(f"{kind}: validation loss {statistics.mean(those):+.3%} beside bf16's at the end{of}")
    return 1 if any(abs(statistics.mean(differences[scaling])) > ALLOWED for scaling in args.scalings) else 0


if __name__ == "__main__":
    sys.exit(main())
