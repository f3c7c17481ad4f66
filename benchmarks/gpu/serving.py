"""The engine alone on one GPU with made-up weights: the loads that `vllm` is timed with, ends of text ignored, temperature 0.6; and
the plan of each beside it.

python benchmarks/gpu/serving.py llama3-8b [--serve.weights=fp8 …] [--out FILE] [--only NAME …] [--profile FILE]

With `--profile` the engine's steps are profiled instead (`serving_profile.py`).
"""

from __future__ import annotations

import argparse
import json
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
SHOWN = ("output tokens/s", "ttft p50", "tpot p50")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--profile", type=Path)
    args, overrides = parser.parse_known_args()
    import torch

    from shardwise.measure.serve_load import here, measure_load, ready_engine
    from shardwise.plan.serving.plan import plan_serving
    from shardwise.plan.serving.simulate import requests_of
    from shardwise.plan.serving.verdict import LoadVerdict
    from shardwise.run import read_run

    words = [
        f"model.preset={args.preset}",
        "model.max_positions=8192",
        "train.dtype=bfloat16",
        "serve.prefix_cache=false",
        *overrides,
    ]
    began = time.time()
    engine = ready_engine(read_run(None, words))
    torch.cuda.synchronize()
    rows: dict[str, Any] = dict(
        preset=args.preset, overrides=overrides, ready_s=time.time() - began, pages=engine.pool.pages,
        free_gib=torch.cuda.mem_get_info()[0] / 2**30,
    )  # fmt: skip
    print(json.dumps(rows), flush=True)
    if args.profile:
        from serving_profile import profile_steps

        profile_steps(engine, args.profile, args.only)
        return
    print(f"{'load':32}" + "".join(f"{name:>16} {'plan':>10} {'':>7}" for name in SHOWN), flush=True)
    for label in args.only or LOADS:
        count, inputs, outputs = LOADS[label]
        load = [f"serve.concurrency={count}", f"serve.requests={count}", f"serve.input_tokens={inputs}"]
        run = here(read_run(None, [*words, *load, f"serve.output_tokens={outputs}"]))
        plan, asked = plan_serving(run, over_http=False), requests_of(run.serve, run.train.seed)
        # Short loads three times, of which the fastest counts.
        measured = [measure_load(engine, run.serve, asked) for _ in range(1 if count > 64 else 3)]
        best = max(measured, key=lambda each: each.figures["output_tokens_per_s"])
        verdict = LoadVerdict(plan, best)
        found = {each.name: each for each in verdict.differences}
        scale = {name: 1.0 if "tokens" in name else 1e3 for name in SHOWN}
        cells = [
            f"{found[name].second * scale[name]:16,.2f} {found[name].first * scale[name]:10,.2f} "
            f"{found[name].first / found[name].second - 1:+7.1%}"
            for name in SHOWN
        ]
        print(f"{label:32}" + "".join(cells), flush=True)
        rows[label] = verdict.as_dict() | {"tokens_per_s": [each.figures["output_tokens_per_s"] for each in measured]}
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1))
    print("peak GiB", torch.cuda.max_memory_allocated() / 2**30, "free", torch.cuda.mem_get_info()[0] / 2**30)


if __name__ == "__main__":
    main()
