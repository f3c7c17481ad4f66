"""`shardwise.profile` beside fvcore's and DeepSpeed's counters on ten public architectures, and what watching costs.

    pip install fvcore deepspeed transformers
    python benchmarks/profiler_peers.py            # multiply-adds of a forward pass, batch of 1
    python benchmarks/profiler_peers.py --overhead # a training step without, inside and after a profile

Sizes are those of the published models, with random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise

MOST_ON, MOST_OFF = 0.15, 0.02
"""What a profile may add to a step, inside of it and after it."""
TOKENS = 128
IMAGE = (1, 3, 224, 224)


class FirstOutput(nn.Module):
    """A model of `transformers` as a function of one tensor, which is all that fvcore traces."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, return_dict=False)[0]


def architectures() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    import transformers as hf

    llama = hf.LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=32,
                           num_key_value_heads=4, use_cache=False)  # fmt: skip
    convnext = hf.ConvNextConfig(depths=[3, 3, 9, 3], hidden_sizes=[96, 192, 384, 768])
    return {
        "ResNet-50": (lambda: hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000)), IMAGE),
        "MobileNetV2": (lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(num_labels=1001)), IMAGE),
        "EfficientNet-B0": (lambda: hf.EfficientNetForImageClassification(hf.EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280, num_labels=1000)), IMAGE),
        "ConvNeXt-T": (lambda: hf.ConvNextForImageClassification(convnext), IMAGE),
        "ViT-B/16": (lambda: hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000)), IMAGE),
        "Swin-T": (lambda: hf.SwinForImageClassification(hf.SwinConfig(num_labels=1000)), IMAGE),
        "BERT-base": (lambda: hf.BertModel(hf.BertConfig()), (1, TOKENS)),
        "GPT-2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)), (1, TOKENS)),
        "Pythia-160M": (lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(
            vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
            use_cache=False)), (1, TOKENS)),
        "TinyLlama, 4 of 22 layers": (lambda: hf.LlamaForCausalLM(llama), (1, TOKENS)),
    }  # fmt: skip


def ours(model: nn.Module, x: Tensor) -> float:
    with torch.no_grad(), shardwise.profile(model, memory=False, time=False) as p:
        model(x)
    return p.macs


def torch_counter(model: nn.Module, x: Tensor) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops() / 2


def fvcore(model: nn.Module, x: Tensor) -> float:
    import logging

    from fvcore.nn import FlopCountAnalysis  # type: ignore[import-not-found]

    logging.disable(logging.WARNING)
    return FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()


def deepspeed(model: nn.Module, x: Tensor) -> float:
    from deepspeed.profiling.flops_profiler import FlopsProfiler  # type: ignore[import-not-found]

    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        profiler = FlopsProfiler(model)
        profiler.start_profile()
        model(x)
        macs = profiler.get_total_macs()
        profiler.end_profile()
    return macs


def written() -> dict[str, list[str]]:
    """The rows of the table in docs/python.md."""
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in rows if len(cells) == 5}


def compare() -> bool:
    """Print the table; whether it is the one in docs/python.md, which explains what differs. Counters that are missing are left
    out."""
    known, same = written(), True
    counters: dict[str, Any] = {"ours": ours, "PyTorch": torch_counter, "fvcore": fvcore, "DeepSpeed": deepspeed}
    print(f"| architecture | {' | '.join(counters)} |")
    print("|---|" + "---:|" * len(counters))
    for name, (make, shape) in architectures().items():
        torch.manual_seed(0)
        model = FirstOutput(make()).eval()
        x = torch.zeros(shape, dtype=torch.long) if len(shape) == 2 else torch.randn(shape)
        cells = []
        for counter in counters.values():
            try:
                cells.append(f"{counter(model, x) / 1e6:,.1f}")
            except Exception as e:
                cells.append(f"fails: {type(e).__name__}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        here = [(cell, there) for cell, there in zip(cells, known[name], strict=True) if "NotFound" not in cell]
        same = same and all(cell == there for cell, there in here)
    return same


def overhead(rounds: int) -> bool:
    """Medians of steps in turn, on this process's own time: of a copy that was never profiled, inside a profile, and after it.
    Whether they are within the limits."""
    within = True
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    small = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        "transformer, 4 x 256, 8 x 256 tokens": (nn.TransformerEncoder(small, 4), torch.randn(8, 256, 256)),
        "transformer, 4 x 512, 8 x 256 tokens": (nn.TransformerEncoder(layer, 4), torch.randn(8, 256, 512)),
    }
    with contextlib.suppress(ImportError):
        cases["ResNet-50, 4 images"] = (FirstOutput(architectures()["ResNet-50"][0]()), torch.randn(4, 3, 224, 224))
    for name, (model, x) in cases.items():
        untouched = copy.deepcopy(model)
        times: dict[str, list[float]] = {"never": [], "on": [], "off": []}

        def step(model: nn.Module, x: Tensor = x) -> float:
            began = time.process_time()
            model(x).sum().backward()
            return time.process_time() - began

        step(untouched), step(model)
        for _ in range(rounds):
            times["never"].append(step(untouched))
            with shardwise.profile(model):
                times["on"].append(step(model))
            times["off"].append(step(model))
        never, on, off = (statistics.median(times[which]) for which in ("never", "on", "off"))
        print(f"{name}: {never:.3f} s a step; on {on / never - 1:+.1%}, after it {off / never - 1:+.1%}", flush=True)
        within = within and on / never - 1 <= MOST_ON and off / never - 1 <= MOST_OFF
    return within


def main() -> int:
    """Exit code 1: a limit is exceeded, or a number is not that of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    return int(not (overhead(args.rounds) if args.overhead else compare()))


if __name__ == "__main__":
    raise SystemExit(main())
