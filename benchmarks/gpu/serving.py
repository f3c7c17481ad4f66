"""The engine alone on one GPU with made-up weights: the loads that `vllm` is timed with, ends of text ignored, temperature 0.6.

python benchmarks/gpu/serving.py llama3-8b [--serve.weights=fp8 …] [--out FILE] [--only NAME …]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

LOADS: dict[str, tuple[int, str, str]] = {
    "1 x 128/256": (1, "128", "256"),
    "8 x 32/128": (8, "32", "128"),
    "32 x 128/256": (32, "128", "256"),
    "256 x U(100,1024)/U(100,1024)": (256, "U(100,1024)", "U(100,1024)"),
    "512 x 1000/1000": (512, "1000", "1000"),
    "128 x 2048/128": (128, "2048", "128"),
}


def lengths(words: str, count: int, draw: random.Random) -> list[int]:
    """Numbers as "128" or "U(100,1024)" says."""
    if not words.startswith("U"):
        return [int(words)] * count
    low, high = map(int, words[2:-1].split(","))
    return [draw.randint(low, high) for _ in range(count)]


def random_model(run: Any) -> Any:
    """The run's network on the GPU, its weights random."""
    import torch

    from shardwise.model import Transformer

    torch.set_default_dtype(getattr(torch, run.train.dtype))
    with torch.device("cuda"):
        model = Transformer(run.model, dtype=getattr(torch, run.train.dtype)).eval()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(LOADS))
    args, overrides = parser.parse_known_args()
    import torch

    from shardwise.run import read_run
    from shardwise.serve.engine import engine_of
    from shardwise.serve.request import Request, Sampling

    words = [
        f"model.preset={args.preset}",
        "model.max_positions=8192",
        "train.dtype=bfloat16",
        "serve.prefix_cache=false",
    ]
    run = read_run(None, [*words, *overrides])
    began = time.time()
    engine = engine_of(random_model(run), run)
    engine.warm()
    torch.cuda.synchronize()
    rows: dict[str, Any] = dict(
        preset=args.preset, overrides=overrides, ready_s=time.time() - began, pages=engine.pool.pages,
        free_gib=torch.cuda.mem_get_info()[0] / 2**30,
    )  # fmt: skip
    print(json.dumps(rows), flush=True)
    draw = random.Random(0)
    for label in ["warm", *args.only]:
        count, inputs, outputs = LOADS.get(label, (1, "32", "16"))
        took, made, steps = [], 0, 0
        for repeat in range(1 if count > 256 else 2 if count > 64 else 3):
            for n, (prompt, answer) in enumerate(
                zip(lengths(inputs, count, draw), lengths(outputs, count, draw), strict=True)
            ):
                tokens = tuple(draw.randrange(3, run.model.vocab - 256) for _ in range(prompt))
                engine.add(Request(f"{label} {repeat} {n}", tokens, answer, Sampling(0.6), ignore_end=True))
            start, made, steps = time.perf_counter(), 0, 0
            while not engine.idle:
                made += sum(len(output.tokens) for output in engine.step())
                steps += 1
            took.append(time.perf_counter() - start)
        rows[label] = dict(
            tokens=made,
            seconds=took,
            steps=steps,
            tokens_per_s=made / min(took),
            preemptions=engine.stats().preemptions,
        )
        print(label, json.dumps(rows[label]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1))
    rows["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print("peak GiB", torch.cuda.max_memory_allocated() / 2**30, "free", torch.cuda.mem_get_info()[0] / 2**30)


if __name__ == "__main__":
    main()
