"""The models that are measured on a GPU, the runs of this trainer that train them, and whether there is a GPU."""

from __future__ import annotations

import json
import sys
from typing import Any

from shardwise.run import Run, run_from_dict
from shardwise.run.sections.layout import LayoutConfig

SHAPES: dict[str, dict[str, int]] = {
    "0.4B": dict(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=128256),
    "1.5B": dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256),
    "3.6B": dict(layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192, vocab=128256),
    "8B": dict(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
}


def value_of(text: str) -> Any:
    """A number or truth value where it reads as one."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def our_run(shape: dict[str, int], batch: int, seq: int, options: dict[str, str]) -> Run:
    """The run of a case; options are keys of `layout` or `train`."""
    values = {key: value_of(text) for key, text in options.items()}
    layout = {key: value for key, value in values.items() if key in LayoutConfig.__dataclass_fields__}
    train = {key: value for key, value in values.items() if key not in layout}
    basis = dict(global_batch=batch, seq_len=seq, dtype="bfloat16", device="cuda", compile=True)
    return run_from_dict(dict(model=shape, layout=layout, train=basis | train, cluster=dict(chip="h200")))


def need_gpu() -> None:
    """End with a sentence where there is none."""
    import torch

    if not torch.cuda.is_available():
        print("this measures a GPU, and PyTorch sees none on this machine", file=sys.stderr)
        raise SystemExit(2)
