"""Times attention over pages in all shapes of its kernels, for the heads of Llama 3 8B or 1B, and keeps the fastest for this
machine, as `shardwise bench --serve` does.

    python benchmarks/gpu/attention_tiles.py [--width 128]      # half a minute on one GPU, most of it compiling
"""

from __future__ import annotations

import argparse

import torch

from shardwise.measure.bench.tune_attention import tune_attention

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    width = parser.parse_args().width
    for name, tile in tune_attention(
        [(32, 8, width)], torch.device("cuda", 0), lambda text: print(text, flush=True)
    ).items():
        print(f"{name}: {tile}")
