"""Initial weights as a function of (seed, name of the parameter) alone; the table of parameters names the distribution.

Every parameter, every expert of a stack, and every slice of a large matrix has its own generator. So a rank draws only the
parameters it holds and gets the values that one device would have drawn, no rank ever holds the whole model, and all cores
draw at the same time.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.run import ModelConfig
from shardwise.run.parameters import find_parameter

SLICE = 2**22
"""Elements that one generator draws, at most: so that several cores can draw one large matrix."""
AHEAD = 4
"""Parameters that are drawn ahead: so many are in memory besides the one in use."""


def generator(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU, so that the values are the same for every device."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _to_draw(
    config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]
) -> tuple[Tensor, list[Callable[[], Tensor]]]:
    """A parameter's memory, and the calls that fill it with its initial value, in any order.

    Matrices that write to the residual stream start smaller by sqrt(2 layers), so that it does not grow with depth
    (Radford et al. 2019, section 2.3).
    """
    entry = find_parameter(config, name)
    if entry.init in ("ones", "zeros"):
        return torch.ones(shape) if entry.init == "ones" else torch.zeros(shape), []
    std = config.init_std / (2 * config.layers) ** 0.5 if entry.init == "residual" else config.init_std
    value = torch.empty(shape)
    matrices = [(f"{name}/{e}", one) for e, one in enumerate(value)] if entry.routed else [(name, value)]
    calls: list[Callable[[], Tensor]] = []
    for title, matrix in matrices:
        slices = matrix.view(-1).split(SLICE)
        titles = [title] if len(slices) == 1 else [f"{title}/{n}" for n in range(len(slices))]
        calls += [partial(_draw, one, std, seed, own) for one, own in zip(slices, titles, strict=True)]
    return value, calls


def _draw(values: Tensor, std: float, seed: int, name: str) -> Tensor:
    return values.normal_(0, std, generator=generator(seed, name))


def initial_value(config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 value a parameter starts from."""
    value, calls = _to_draw(config, seed, name, shape)
    for call in calls:
        call()
    return value


def initial_values(config: ModelConfig, seed: int, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[Tensor]:
    """The values of several parameters, given by name and shape, one after the other, drawn on all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        ahead: deque[tuple[Tensor, list[Future[Tensor]]]] = deque()
        for n in range(len(wanted) + AHEAD):
            if n < len(wanted):
                value, calls = _to_draw(config, seed, *wanted[n])
                # A fake tensor belongs to the thread that made it, and has nothing to draw.
                real = type(value) is torch.Tensor
                ahead.append((value, [pool.submit(call) for call in calls] if real else []))
            if n >= AHEAD:
                value, drawn = ahead.popleft()
                for one in drawn:
                    one.result()
                yield value


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int, prefix: str = "") -> None:
    """Give every parameter its initial value and every buffer zeros. `prefix` is where a part lies in the whole model."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(config, seed, f"{prefix}{name}", tuple(parameter.shape)))
    for buffer in model.buffers():
        buffer.zero_()
