"""What fewer bits cost a model that was trained here: trains a run, packs it by every method, and prints the perplexity of held-out
text before and after.

    python benchmarks/perplexity.py [--run examples/demo.toml] [--out FILE]      # some minutes on two cores, one on a GPU
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WAYS = (
    ("int4", "gptq", 0.01),
    ("int4", "awq", 0.01),
    ("int4", "round", None),
    ("int8", "round", 0.002),
    ("int8", "smoothquant", 0.002),
    ("fp8", "gptq", 0.002),
    ("fp8", "gptq --weight-only", 0.002),
    ("fp8", "round", None),
)
"""Weights, method (and an option of it), and what it may cost."""


def shardwise(*words: str) -> str:
    """What a command prints."""
    done = subprocess.run([sys.executable, "-m", "shardwise", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"shardwise {' '.join(words)}:\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="examples/demo.toml")
    parser.add_argument("--trained", help="a folder that the run was trained to; without, it is trained first")
    parser.add_argument("--eval-sequences", default="256")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        trained = args.trained or f"{folder}/trained"
        if not args.trained:
            shardwise("train", args.run, "--out", trained)
        for weights, method, limit in WAYS:
            words = ("--weights", weights, "--method", *method.split(), "--eval-sequences", args.eval_sequences)
            found = json.loads(shardwise("quantize", trained, f"{folder}/{weights}-{method}", *words, "--json"))
            before, after = found["perplexity_before"], found["perplexity_after"]
            rows[f"{weights} {method}"] = {
                "before": before,
                "after": after,
                "relative": after / before - 1,
                "limit": limit,
            }
            kept = "" if limit is None else " within" if after / before - 1 <= limit else " NOT within"
            print(f"{weights:5} {method:18} {before:.4f} to {after:.4f} ({after / before - 1:+.2%}){kept}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
