"""One rank of large jobs on one GPU, this project's and torchtitan's, in turns; and this project's beside its plan.

    python benchmarks/gpu/rehearsal.py --peers DIR [--out FILE] beside     # 8B on shard 8, a stage of 70B on tensor 8 x shard 32
    python benchmarks/gpu/rehearsal.py [--out FILE] plan                   # jobs of 8B to 671B, on 8 to 16,384 ranks
    python benchmarks/gpu/rehearsal.py case NAME                           # one of them, in this process

DIR holds torchtitan 0.2.2, unpacked. Both sides have the same shapes, tokens and compiler, and run with PyTorch's fake collectives
(`shardwise-fake`, `titan`) and with this project's stand-ins (`shardwise`, `titan-standin`), which copy what they would have sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwise.run import Run, read_run

JOBS: dict[str, str] = {
    "8b-shapes": "model.preset=llama3-8b model.layers=2 layout.shard=8 train.global_batch=8 train.microbatch=1 train.seq_len=8192",
    "8b-shard8": "model.preset=llama3-8b layout.shard=8 train.global_batch=8 train.microbatch=1 train.seq_len=8192",
    "70b-stage": "model.preset=llama3-70b layout.tensor=8 layout.shard=32 layout.pipeline=40 layout.zero=2 "
    "train.global_batch=32 train.microbatch=1 train.seq_len=8192",
}
SHAPES: dict[str, dict[str, int]] = {
    "8b-shard8": dict(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "70b-stage": dict(hidden=8192, layers=2, heads=64, kv_heads=8, ffn=28672, vocab=128256),
}
TITAN: dict[str, dict[str, str]] = {
    "8b-shard8": {"shard": "8"},
    "70b-stage": {"shard": "32", "tensor": "8", "stage": "yes"},
}
STEPS = {"8b-shapes": 8, "8b-shard8": 8, "70b-stage": 64}
"""Steps that are timed: those of the stage are as short as what else the host does."""
PLANNED: dict[str, tuple[str, int]] = {
    "8b-shard64": (
        "model.preset=llama3-8b layout.shard=64 train.global_batch=128 train.microbatch=2 train.seq_len=8192",
        5,
    ),
    "70b-3d": (
        "model.preset=llama3-70b layout.tensor=8 layout.pipeline=4 layout.shard=8 layout.zero=1 train.global_batch=64 "
        "train.microbatch=1 train.seq_len=8192",
        64,
    ),
    "mixtral": (
        "model.preset=mixtral-8x22b layout.shard=8 layout.expert=8 layout.tensor=2 layout.pipeline=4 layout.zero=1 "
        "train.global_batch=64 train.microbatch=1 train.seq_len=4096",
        20,
    ),
    "8b-128k": (
        "model.preset=llama3-8b model.max_positions=131072 layout.shard=8 layout.context=8 layout.context_method=ring "
        "layout.recompute=full train.global_batch=8 train.microbatch=1 train.seq_len=131072",
        3,
    ),
    "8b-fp8": (
        "model.preset=llama3-8b layout.shard=16 train.fp8=rowwise train.global_batch=32 train.microbatch=2 train.seq_len=8192",
        0,
    ),
    "405b-3d": (
        "model.preset=llama3-405b layout.tensor=8 layout.pipeline=16 layout.shard=128 layout.zero=1 "
        "layout.stages=[7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7] train.global_batch=2048 train.microbatch=1 train.seq_len=8192",
        8192,
    ),
    "v3": (
        "model.preset=deepseek-v3 layout.shard=64 layout.expert=32 layout.pipeline=16 layout.zero=1 layout.recompute=full "
        "train.global_batch=1024 train.microbatch=1 train.seq_len=4096",
        400,
    ),
    "405b-fp8": (
        "model.preset=llama3-405b layout.tensor=8 layout.pipeline=18 layout.shard=16 layout.zero=2 train.fp8=tensorwise "
        "train.global_batch=384 train.microbatch=1 train.seq_len=8192",
        2000,
    ),
    "gpt3": (
        "model.preset=gpt3-175b layout.tensor=8 layout.pipeline=8 layout.shard=12 layout.zero=1 layout.schedule=interleaved "
        "layout.chunks=2 train.global_batch=192 train.microbatch=1 train.seq_len=2048",
        300,
    ),
    "8b-hybrid": (
        "model.preset=llama3-8b layout.replicate=8 layout.shard=8 layout.zero=1 train.global_batch=256 train.microbatch=1 "
        "train.seq_len=4096",
        9,
    ),
    "qwen-muon": (
        "model.preset=qwen2.5-32b layout.shard=32 layout.tensor=2 layout.recompute=full train.optimizer=muon "
        "train.global_batch=32 train.microbatch=1 train.seq_len=8192",
        3,
    ),
    "8x7b-zero3": (
        "model.preset=mixtral-8x7b layout.shard=64 layout.expert=8 layout.recompute=full train.global_batch=128 "
        "train.microbatch=1 train.seq_len=8192",
        11,
    ),
}
"""Jobs of 8B to 671B parameters on every axis, on 16 to 16,384 ranks, and a rank of each."""
UNSEEN: dict[str, tuple[str, int]] = {
    "8b-ddp": (
        "model.preset=llama3-8b layout.replicate=8 layout.recompute=full train.global_batch=16 train.microbatch=1 "
        "train.seq_len=4096",
        3,
    ),
    "8b-context": (
        "model.preset=llama3-8b model.max_positions=65536 layout.context=4 layout.context_method=gather layout.tensor=2 "
        "layout.shard=4 layout.zero=2 layout.recompute=full train.fp8=rowwise train.global_batch=8 train.microbatch=1 "
        "train.seq_len=65536",
        13,
    ),
    "8x7b-tensor": (
        "model.preset=mixtral-8x7b layout.tensor=2 layout.expert=4 layout.shard=16 layout.replicate=2 layout.zero=2 "
        "layout.recompute=attention train.global_batch=64 train.microbatch=1 train.seq_len=4096",
        21,
    ),
    "neox-zb": (
        "model.preset=gpt-neox-20b layout.tensor=4 layout.pipeline=4 layout.shard=8 layout.zero=1 layout.schedule=zb-h1 "
        "train.global_batch=256 train.microbatch=2 train.seq_len=2048",
        40,
    ),
    "gemma": (
        "model.preset=gemma-7b layout.shard=16 layout.zero=2 train.global_batch=32 train.microbatch=1 "
        "train.seq_len=8192",
        7,
    ),
    "32b-pipeline": (
        "model.preset=qwen2.5-32b layout.pipeline=8 layout.tensor=2 layout.shard=4 layout.zero=1 "
        "layout.schedule=interleaved layout.chunks=2 train.fp8=tensorwise train.global_batch=64 train.microbatch=1 "
        "train.seq_len=4096",
        20,
    ),
    "70b-zero3": (
        "model.preset=llama3-70b layout.shard=256 layout.recompute=full train.global_batch=256 train.microbatch=1 "
        "train.seq_len=4096",
        17,
    ),
    "70b-rowwise": (
        "model.preset=llama3-70b model.max_positions=32768 layout.tensor=4 layout.context=4 "
        "layout.context_method=ulysses layout.pipeline=8 layout.shard=4 layout.zero=2 layout.recompute=full "
        "train.fp8=rowwise train.global_batch=32 train.microbatch=1 train.seq_len=32768",
        130,
    ),
    "8x22b-fp8": (
        "model.preset=mixtral-8x22b layout.shard=16 layout.expert=8 layout.pipeline=8 layout.zero=1 "
        "layout.recompute=full train.fp8=tensorwise train.global_batch=128 train.microbatch=1 train.seq_len=8192",
        70,
    ),
    "opt": (
        "model.preset=opt-175b layout.tensor=8 layout.pipeline=4 layout.shard=32 layout.zero=2 layout.recompute=full "
        "train.global_batch=512 train.microbatch=2 train.seq_len=2048",
        500,
    ),
    "405b-context": (
        "model.preset=llama3-405b model.max_positions=65536 layout.tensor=8 layout.context=4 layout.context_method=ring "
        "layout.pipeline=16 layout.shard=32 layout.zero=1 layout.stages=[7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7] "
        "train.global_batch=512 train.microbatch=1 train.seq_len=32768",
        9000,
    ),
    "v3-tensor": (
        "model.preset=deepseek-v3 layout.tensor=4 layout.shard=32 layout.expert=32 layout.pipeline=8 layout.zero=2 "
        "layout.recompute=full train.global_batch=512 train.microbatch=1 train.seq_len=4096",
        600,
    ),
}
"""A second dozen, chosen before any of them was measured."""
THIRD: dict[str, tuple[str, int]] = {
    "8b-tensor": (
        "model.preset=qwen3-8b layout.tensor=4 layout.shard=2 train.global_batch=8 train.microbatch=2 train.seq_len=4096",
        6,
    ),
    "13b-rowwise": (
        "model.preset=llama2-13b layout.replicate=4 layout.shard=8 layout.recompute=attention train.fp8=rowwise "
        "train.global_batch=64 train.microbatch=1 train.seq_len=4096",
        19,
    ),
    "a3b": (
        "model.preset=qwen3-30b-a3b layout.shard=32 layout.expert=16 layout.zero=2 layout.recompute=attention "
        "train.global_batch=64 train.microbatch=1 train.seq_len=4096",
        21,
    ),
    "neox-pipeline": (
        "model.preset=gpt-neox-20b layout.tensor=2 layout.pipeline=4 layout.shard=4 layout.zero=1 layout.recompute=attention "
        "train.global_batch=64 train.microbatch=1 train.seq_len=2048",
        9,
    ),
    "65b-zero2": (
        "model.preset=llama1-65b layout.tensor=2 layout.pipeline=4 layout.shard=16 layout.zero=2 layout.recompute=full "
        "train.fp8=tensorwise train.global_batch=128 train.microbatch=1 train.seq_len=4096",
        66,
    ),
    "32b-ulysses": (
        "model.preset=qwen3-32b model.max_positions=65536 layout.context=8 layout.context_method=ulysses layout.shard=8 "
        "layout.recompute=full train.global_batch=8 train.microbatch=1 train.seq_len=65536",
        37,
    ),
    "palm": (
        "model.preset=palm-62b layout.tensor=8 layout.shard=32 train.global_batch=64 train.microbatch=2 train.seq_len=2048",
        100,
    ),
    "bloom": (
        "model.preset=bloom-176b layout.tensor=4 layout.pipeline=14 layout.shard=8 layout.zero=1 layout.recompute=attention "
        "train.global_batch=128 train.microbatch=1 train.seq_len=2048",
        200,
    ),
    "8x7b-pipeline": (
        "model.preset=mixtral-8x7b layout.pipeline=4 layout.shard=16 layout.expert=4 layout.zero=1 layout.recompute=full "
        "layout.schedule=interleaved layout.chunks=2 train.global_batch=128 train.microbatch=1 train.seq_len=8192",
        40,
    ),
    "mt-nlg": (
        "model.preset=mt-nlg-530b layout.tensor=8 layout.pipeline=35 layout.shard=8 layout.zero=1 layout.recompute=full "
        "train.global_batch=280 train.microbatch=1 train.seq_len=2048",
        1000,
    ),
    "v3-fp8": (
        "model.preset=deepseek-v3 layout.pipeline=16 layout.shard=128 layout.expert=64 layout.zero=1 layout.recompute=full "
        "train.fp8=tensorwise train.global_batch=2048 train.microbatch=1 train.seq_len=4096",
        1000,
    ),
    "405b-gather": (
        "model.preset=llama3-405b model.max_positions=32768 layout.tensor=8 layout.context=2 layout.context_method=gather "
        "layout.pipeline=16 layout.shard=64 layout.zero=2 layout.stages=[7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7] layout.recompute=full "
        "train.global_batch=512 train.microbatch=1 train.seq_len=32768",
        8000,
    ),
}
"""A third, chosen after what the second had shown was mended, and again before any was measured."""
FOURTH: dict[str, tuple[str, int]] = {
    "7b-machine": (
        "model.preset=qwen2.5-7b layout.shard=8 train.global_batch=32 train.microbatch=2 train.seq_len=4096",
        5,
    ),
    "13b-zero2": (
        "model.preset=llama1-13b layout.shard=4 layout.replicate=16 layout.zero=2 layout.recompute=attention "
        "train.global_batch=256 train.microbatch=2 train.seq_len=2048",
        33,
    ),
    "14b-fp8": (
        "model.preset=qwen3-14b layout.shard=16 layout.tensor=2 train.fp8=tensorwise train.global_batch=32 train.microbatch=1 "
        "train.seq_len=8192",
        11,
    ),
    "66b-interleaved": (
        "model.preset=opt-66b layout.tensor=4 layout.pipeline=8 layout.shard=8 layout.zero=1 layout.schedule=interleaved "
        "layout.chunks=2 layout.recompute=full train.global_batch=128 train.microbatch=1 train.seq_len=2048",
        100,
    ),
    "72b-zb": (
        "model.preset=qwen2.5-72b layout.tensor=8 layout.pipeline=4 layout.shard=4 layout.zero=1 layout.schedule=zb-h1 "
        "train.global_batch=64 train.microbatch=1 train.seq_len=4096",
        40,
    ),
    "70b-ulysses": (
        "model.preset=llama2-70b model.max_positions=32768 layout.tensor=2 layout.context=4 layout.context_method=ulysses "
        "layout.shard=32 layout.recompute=full train.global_batch=32 train.microbatch=1 train.seq_len=32768",
        77,
    ),
    "1.5b-ddp": (
        "model.preset=gpt2-1.5b layout.replicate=8 train.global_batch=128 train.microbatch=8 train.seq_len=1024",
        2,
    ),
    "7b1": (
        "model.preset=bloom-7b1 layout.shard=8 layout.zero=2 train.global_batch=32 train.microbatch=2 train.seq_len=2048",
        3,
    ),
    "8x22b-zero3": (
        "model.preset=mixtral-8x22b layout.shard=128 layout.expert=8 layout.recompute=full train.fp8=rowwise "
        "train.global_batch=128 train.microbatch=1 train.seq_len=4096",
        90,
    ),
    "a3b-pipeline": (
        "model.preset=qwen3-30b-a3b layout.pipeline=4 layout.shard=16 layout.expert=8 layout.zero=1 layout.recompute=full "
        "train.global_batch=256 train.microbatch=1 train.seq_len=4096",
        50,
    ),
    "v3-context": (
        "model.preset=deepseek-v3 layout.pipeline=8 layout.context=2 layout.context_method=gather layout.shard=64 "
        "layout.expert=64 layout.zero=1 layout.recompute=full train.global_batch=512 train.microbatch=1 train.seq_len=8192",
        300,
    ),
    "405b-interleaved": (
        "model.preset=llama3-405b layout.tensor=8 layout.pipeline=16 layout.shard=64 layout.zero=1 layout.schedule=interleaved "
        f"layout.chunks=2 layout.stages=[3,{'4,' * 30}3] layout.recompute=attention train.global_batch=1024 train.microbatch=1 "
        "train.seq_len=8192",
        5000,
    ),
}
"""A fourth, chosen before any of it was measured."""
FIFTH: dict[str, tuple[str, int]] = {
    "8b-ulysses": (
        "model.preset=llama3-8b model.max_positions=65536 layout.context=4 layout.context_method=ulysses layout.shard=2 "
        "layout.recompute=full train.global_batch=2 train.microbatch=1 train.seq_len=65536",
        3,
    ),
    "33b-zero2": (
        "model.preset=llama1-33b layout.tensor=4 layout.shard=8 layout.zero=2 train.global_batch=64 train.microbatch=2 "
        "train.seq_len=2048",
        9,
    ),
    "14b-pipeline": (
        "model.preset=qwen3-14b layout.pipeline=2 layout.shard=8 layout.zero=1 layout.recompute=attention "
        "train.global_batch=64 train.microbatch=1 train.seq_len=4096",
        4,
    ),
    "32b-rowwise": (
        "model.preset=qwen2.5-32b layout.tensor=4 layout.pipeline=2 layout.shard=4 layout.zero=2 train.fp8=rowwise "
        "train.global_batch=64 train.microbatch=1 train.seq_len=4096",
        30,
    ),
    "palm-interleaved": (
        "model.preset=palm-62b layout.tensor=4 layout.pipeline=4 layout.shard=8 layout.zero=1 layout.schedule=interleaved "
        "layout.chunks=2 train.global_batch=128 train.microbatch=1 train.seq_len=2048",
        70,
    ),
    "gpt3-attention": (
        "model.preset=gpt3-175b layout.tensor=8 layout.pipeline=16 layout.shard=8 layout.zero=1 layout.recompute=attention "
        "train.global_batch=256 train.microbatch=1 train.seq_len=2048",
        600,
    ),
    "70b-2048": (
        "model.preset=llama3-70b layout.tensor=4 layout.pipeline=8 layout.shard=64 layout.zero=1 layout.recompute=full "
        "train.global_batch=1024 train.microbatch=1 train.seq_len=8192",
        1500,
    ),
    "405b-16k": (
        "model.preset=llama3-405b layout.tensor=8 layout.pipeline=16 layout.shard=128 layout.zero=1 train.fp8=tensorwise "
        "layout.stages=[7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7] layout.recompute=full train.global_batch=2048 train.microbatch=1 "
        "train.seq_len=8192",
        9000,
    ),
    "8x7b-zero2": (
        "model.preset=mixtral-8x7b layout.shard=32 layout.expert=8 layout.zero=2 layout.recompute=full train.global_batch=128 "
        "train.microbatch=2 train.seq_len=4096",
        17,
    ),
    "a3b-tensor": (
        "model.preset=qwen3-30b-a3b layout.tensor=2 layout.pipeline=2 layout.shard=16 layout.expert=8 layout.zero=1 "
        "layout.recompute=full train.global_batch=128 train.microbatch=2 train.seq_len=4096",
        33,
    ),
    "v3-2048": (
        "model.preset=deepseek-v3 layout.pipeline=16 layout.shard=128 layout.expert=64 layout.zero=1 layout.recompute=full "
        "train.global_batch=2048 train.microbatch=1 train.seq_len=4096",
        1300,
    ),
    "70b-ring": (
        "model.preset=llama3-70b model.max_positions=32768 layout.tensor=8 layout.context=4 layout.context_method=ring "
        "layout.shard=8 layout.recompute=full train.global_batch=8 train.microbatch=1 train.seq_len=32768",
        100,
    ),
}
"""A fifth, chosen when the plan knew the chip's power, and before any of it was measured: of 8B to 671B parameters, on 8 to 16,384
ranks."""
SIXTH: dict[str, tuple[str, int]] = {
    "8b-2d": (
        "model.preset=llama3-8b layout.tensor=2 layout.shard=4 train.global_batch=16 train.microbatch=1 train.seq_len=8192",
        5,
    ),
    "13b-1f1b": (
        "model.preset=llama2-13b layout.pipeline=4 layout.shard=4 layout.zero=1 layout.recompute=attention "
        "train.global_batch=64 train.microbatch=1 train.seq_len=4096",
        6,
    ),
    "14b-zero3": (
        "model.preset=qwen2.5-14b layout.shard=32 layout.recompute=full train.fp8=rowwise train.global_batch=64 "
        "train.microbatch=2 train.seq_len=4096",
        21,
    ),
    "30b-replicas": (
        "model.preset=opt-30b layout.replicate=4 layout.shard=16 layout.zero=3 layout.recompute=full train.global_batch=128 "
        "train.microbatch=2 train.seq_len=2048",
        40,
    ),
    "8b-gather": (
        "model.preset=llama3-8b model.max_positions=65536 layout.context=4 layout.context_method=gather layout.tensor=2 "
        "layout.shard=4 layout.recompute=full train.global_batch=4 train.microbatch=1 train.seq_len=65536",
        19,
    ),
    "32b-tensorwise": (
        "model.preset=qwen3-32b layout.tensor=4 layout.pipeline=2 layout.shard=16 layout.zero=2 layout.recompute=attention "
        "train.fp8=tensorwise train.global_batch=128 train.microbatch=1 train.seq_len=4096",
        77,
    ),
    "65b-zb": (
        "model.preset=llama1-65b layout.tensor=8 layout.pipeline=4 layout.shard=4 layout.zero=1 layout.schedule=zb-h1 "
        "train.global_batch=64 train.microbatch=1 train.seq_len=2048",
        90,
    ),
    "72b-interleaved": (
        "model.preset=qwen2.5-72b layout.tensor=8 layout.pipeline=4 layout.shard=32 layout.zero=1 layout.schedule=interleaved "
        "layout.chunks=2 layout.recompute=full train.global_batch=512 train.microbatch=1 train.seq_len=4096",
        555,
    ),
    "8x7b-1f1b": (
        "model.preset=mixtral-8x7b layout.pipeline=2 layout.shard=32 layout.expert=4 layout.zero=1 layout.recompute=full "
        "train.global_batch=256 train.microbatch=1 train.seq_len=4096",
        50,
    ),
    "a3b-zero3": (
        "model.preset=qwen3-30b-a3b layout.shard=64 layout.expert=32 layout.zero=3 layout.recompute=full "
        "train.global_batch=128 train.microbatch=2 train.seq_len=4096",
        37,
    ),
    "v3-1024": (
        "model.preset=deepseek-v3 layout.pipeline=8 layout.shard=128 layout.expert=64 layout.zero=1 layout.recompute=full "
        "train.global_batch=1024 train.microbatch=1 train.seq_len=4096",
        600,
    ),
    "405b-zero2": (
        "model.preset=llama3-405b layout.tensor=8 layout.pipeline=16 layout.shard=128 layout.zero=2 "
        "layout.stages=[7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7] layout.recompute=full train.global_batch=1024 train.microbatch=1 "
        "train.seq_len=8192",
        11000,
    ),
}
"""A sixth, chosen when the kernels of the plan were those at the highest clock, and before any of it was measured."""
JOBS_BESIDE_PLAN = PLANNED | UNSEEN | THIRD | FOURTH | FIFTH | SIXTH
COMMON = "train.dtype=bfloat16 cluster.chip=h200 train.device=cuda"
MACHINE = 8
"""GPUs of a machine."""


def on_machines(words: str) -> Run:
    """The run of a job, on machines of so many GPUs."""
    every = [*words.split(), *COMMON.split()]
    world = read_run(None, every).layout.world
    return read_run(None, [*every, f"cluster.nodes={max(1, world // MACHINE)}"])


@contextlib.contextmanager
def fake_collectives(rank: int, world: int, hold: object = None) -> Iterator[None]:
    """PyTorch's own, which send nothing. Its all-gathers copy a rank's shard to the place of every other rank, tensor by tensor:
    576 launches in a step of 70B's stage, 6 ms, where NCCL has one call a layer. Here they copy it once, for both sides."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeWork

    from shardwise.torch_private import close_library, fake_process_group

    def one(out: Any, mine: Any, *rest: Any) -> Any:
        out.view(-1)[: mine.numel()].copy_(mine.view(-1))
        return out, FakeWork().boxed()

    def several(outs: Any, mine: Any, *rest: Any) -> Any:
        for each in zip(outs, mine, strict=True):
            one(*each)
        return FakeWork().boxed()

    fake_process_group(rank, world)
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacing the backend's kernels warns, but is intended
        library.impl("_allgather_base_", one, "CUDA")
        library.impl("allgather_into_tensor_coalesced_", several, "CUDA")
    try:
        yield
    finally:
        close_library(library)
        dist.destroy_process_group()


def ours(job: str, rank: int, tune: bool = False, fake: bool = False) -> dict[str, Any]:
    """This project's rank."""
    from shardwise.measure.rehearse import rehearse
    from shardwise.measure.stand_in import stand_in_collectives

    run = on_machines(JOBS.get(job, job))
    collectives = fake_collectives if fake else stand_in_collectives
    parts: dict[str, Any] = {}
    found = rehearse(
        run,
        rank,
        steps=STEPS[job],
        warmup=4,
        tune=tune,
        collectives=collectives,
        read=lambda p: parts.update(detail(p)),
    )
    named = {d.name: d.second for d in found.quantities}
    took = statistics.median(found.step_seconds)
    return dict(case="shardwise", job=job, ms=1e3 * took, gib=named["memory peak"] / 2**30, **found.as_dict(), **parts)


def titan(job: str, stand_in: bool) -> dict[str, Any]:
    """torchtitan's rank."""
    import torch
    from peers import torchtitan

    from shardwise.measure.stand_in import stand_in_collectives

    torch.cuda.set_device(0)
    shape, options = SHAPES[job], TITAN[job]
    world = int(options.get("shard", 1)) * int(options.get("tensor", 1))
    with (stand_in_collectives if stand_in else fake_collectives)(0, world):
        step = torchtitan(shape, 8192, options)
        if options.get("stage"):
            local = (1, 8192 // int(options["tensor"]), shape["hidden"])
            x, y = (torch.randn(local, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        else:
            tokens = torch.randint(0, shape["vocab"], (1, 8193), device="cuda")
            x, y = tokens[:, :-1], tokens[:, 1:]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(6 + STEPS[job])]
        for number, end in enumerate(ends):
            if number == 4:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            step(x, y)
            end.record()
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) for before, after in pairwise(ends[5:])]  # as `rehearse` does
    peak = torch.cuda.max_memory_allocated() / 2**30
    return dict(case="titan-standin" if stand_in else "titan", job=job, ms=statistics.median(times), gib=peak)


def detail(profiler: Any) -> dict[str, list[list[Any]]]:
    """What a step is made of: products by their sizes, kernels by their names, and passes over memory by the operator that launched
    them and its inputs, each with its calls and seconds."""
    from shardwise.measure.rehearse import GEMMS
    from shardwise.trace.kernel_names import category_of

    products: dict[tuple[int, ...], list[float]] = {}
    kernels: dict[tuple[str], list[float]] = {}
    moves: dict[tuple[str, str], list[float]] = {}
    for event in profiler.events() or ():
        for kernel in event.kernels:
            if category_of(kernel.name) == "memory":
                where = event.name, f"{kernel.name[:40]} {event.input_shapes}"[:240]
                moves.setdefault(where, []).append(kernel.duration * 1e-6)
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernels.setdefault((event.name[:90],), []).append(event.device_time * 1e-6)
        elif event.name in GEMMS and event.device_time_total and event.input_shapes:
            first, second = (event.input_shapes[place] for place in GEMMS[event.name])
            if len(first) == len(second) == 2:
                products.setdefault((first[0], second[1], first[1]), []).append(event.device_time_total * 1e-6)

    def rows(found: dict[Any, list[float]]) -> list[list[Any]]:
        return sorted(([*key, len(each), sum(each)] for key, each in found.items()), key=lambda row: -row[-1])

    return dict(products=rows(products), kernels=rows(kernels)[:60], moves=rows(moves)[:60])


def beside_plan(names: list[str], out: Path | None) -> None:
    """Rehearse jobs one after the other, each beside its plan."""
    import gc

    import torch

    from shardwise.measure.rehearse import rehearse

    rows: dict[str, Any] = {}
    for name in names or JOBS_BESIDE_PLAN:
        words, rank = JOBS_BESIDE_PLAN[name]
        try:
            run = on_machines(words)
            parts: dict[str, Any] = {}

            def read(profiler: Any, into: dict[str, Any] = parts) -> None:
                into.update(detail(profiler))

            rows[name] = rehearse(run, rank, steps=3, warmup=3, read=read).as_dict() | parts
            short = {q["name"]: f"{100 * (q['relative'] or 0):+.1f}%" for q in rows[name]["quantities"]}
            print(
                name,
                run.layout.world,
                {k: v for k, v in short.items() if k.split()[0] in ("time", "memory")},
                flush=True,
            )
        except Exception as error:
            rows[name] = {"error": repr(error)[:500]}
            print(name, rows[name], flush=True)
        if out:
            out.write_text(json.dumps(rows, indent=1))
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["beside", "case", "plan"])
    parser.add_argument("name", nargs="*")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=["shardwise-fake", "titan", "shardwise", "titan-standin"])
    args = parser.parse_args()
    if args.what == "case":
        case, job, *rest = args.name
        if case.startswith("shardwise"):
            found = ours(job, int(rest[0]) if rest else 0, tune="tune" in case, fake="fake" in case)
        else:
            found = titan(job, case == "titan-standin")
        print("RESULT " + json.dumps(found))
        return
    if args.what == "plan":
        beside_plan(args.name, args.out)
        return
    rows = []
    jobs = args.name or list(JOBS)
    for _ in range(args.rounds):
        for job in jobs:
            for case in args.cases:
                rank = ["2560"] if job == "70b-stage" and case.startswith("shardwise") else []
                command = [sys.executable, __file__, "case", case, job, *rank]
                paths = [str(args.peers.resolve())] if args.peers else []
                paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
                env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                row = json.loads(lines[-1][7:]) if lines else dict(case=case, job=job, error=done.stderr[-1500:])
                rows.append(row)
                print(
                    json.dumps({k: v for k, v in row.items() if k in ("case", "job", "ms", "gib", "error")}), flush=True
                )
                if args.out:
                    args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
