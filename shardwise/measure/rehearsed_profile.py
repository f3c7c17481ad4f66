"""A hardware profile from a rehearsal: the GEMMs and attention of one rank of a job, timed inside its step, with the step's effects
on the chip's clock and caches. The planner corrects its curves with these points near their shapes."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from torch.profiler import profile

from shardwise.hardware import Profile
from shardwise.measure.bench.machine import empty_profile
from shardwise.measure.rehearse import Say, rehearse
from shardwise.model.device import choose_device
from shardwise.run import Run, UserError

Points = dict[tuple[Any, ...], list[float]]

GEMMS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "shardwise::gemm": (0, 1), "shardwise::gemm_onto": (0, 1)}
"""Operators that multiply two matrices, and the argument positions of the two."""
ATTENTION = {
    "aten::_scaled_dot_product_cudnn_attention": ("flash3", "forward", 0),
    "aten::_scaled_dot_product_flash_attention": ("flash2", "forward", 0),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("flash2", "forward", 0),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("flash3", "backward", 1),
    "aten::_scaled_dot_product_flash_attention_backward": ("flash2", "backward", 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": ("flash2", "backward", 1),
}
"""Fused attention operators: the planner's kernel name, the direction, and the argument position of the queries; keys follow."""


def rehearsed_profile(run: Run, rank: int, say: Say = lambda text: None) -> Profile:
    """Rehearse a rank and read the times of its GEMMs and its attention from the profile."""
    gemms: Points = {}
    attention: Points = {}

    def read(recorded: profile) -> None:
        for event in recorded.events() or ():
            seconds = (event.device_time_total if on_gpu else event.cpu_time_total) * 1e-6
            if not seconds or not event.input_shapes:
                continue
            if event.name in GEMMS:
                first, second = (event.input_shapes[place] for place in GEMMS[event.name])
                if len(first) == len(second) == 2:
                    gemms.setdefault((first[0], second[1], first[1]), []).append(seconds)
            elif event.name in ATTENTION:
                kernel, direction, at = ATTENTION[event.name]
                (batch, heads, queries, width), keys = event.input_shapes[at], event.input_shapes[at + 1][2]
                attention.setdefault((batch, heads, queries, keys, width, kernel, direction), []).append(seconds)

    device = choose_device(run.train.device)
    on_gpu = device.type == "cuda"
    rehearse(run, rank, steps=1, read=read, say=say)
    if not gemms:
        raise UserError("the rehearsal ran no GEMM that the profiler saw; no profile was written")
    dtype = run.train.dtype
    return replace(
        empty_profile(device),
        gemm=tuple(
            dict(m=m, n=n, k=k, dtype=dtype, seconds=seconds, tflops=2.0 * m * n * k / seconds / 1e12)
            for (m, n, k), times in gemms.items()
            for seconds in (statistics.median(times),)
        ),
        attention=tuple(
            dict(batch=batch, heads=heads, queries=queries, keys=keys, head_dim=width, causal=queries == keys,
                 kernel=kernel, direction=direction, dtype=dtype, seconds=statistics.median(times))
            for (batch, heads, queries, keys, width, kernel, direction), times in attention.items()
        ),
    )  # fmt: skip
