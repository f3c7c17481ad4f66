"""Initial weights as a function of (seed, name of the parameter) alone.

Every parameter, and every expert of a stacked one, has a generator of its own. So a rank that holds a part of the model
draws just that part and gets the numbers that one device would have drawn, and no rank ever holds the whole model.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from shardwise.run import ModelConfig

MOST_THREADS = 8
"""Parameters that are drawn at the same time, at most: so many stand in memory besides the one that is used."""


def generator(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU, so that the numbers are the same for every device."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def initial_value(config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 value a parameter starts from: ones for norms, zeros for biases, else normal.

    Matrices that write to the residual stream are narrower by sqrt(2 layers), so that it does not grow with depth
    (Radford et al. 2019, section 2.3).
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    leaf = name.removesuffix(".weight").split(".")[-1]
    std = config.init_std / (2 * config.layers) ** 0.5 if leaf in ("out", "down") else config.init_std
    if len(shape) == 3:
        experts = [
            torch.empty(shape[1:]).normal_(0, std, generator=generator(seed, f"{name}/{e}")) for e in range(shape[0])
        ]
        return torch.stack(experts)
    return torch.empty(shape).normal_(0, std, generator=generator(seed, name))


def initial_values(config: ModelConfig, seed: int, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[Tensor]:
    """The values of several parameters, given by name and shape, one after the other. The next ones are drawn meanwhile, a core
    each: the generators are apart, but each draws on one core alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(cores, MOST_THREADS)) as pool:
        ahead = deque[Future[Tensor]]()
        for name, shape in wanted:
            ahead.append(pool.submit(initial_value, config, seed, name, shape))
            if len(ahead) > MOST_THREADS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Give every parameter its initial value and every buffer zeros."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(config, seed, name, tuple(parameter.shape)))
    for buffer in model.buffers():
        buffer.zero_()
