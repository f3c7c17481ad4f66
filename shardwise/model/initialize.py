"""Initial weights as a function of (seed, name of the parameter) alone.

Every parameter, every expert of a stacked one, and every piece of a large one has a generator of its own. So a rank that holds
a part of the model draws just that part and gets the numbers that one device would have drawn, no rank ever holds the whole
model, and all cores draw at the same time.
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

PIECE = 2**22
"""Numbers that one generator draws, at most: so that several cores can draw one large matrix."""
AHEAD = 4
"""Parameters that are drawn before they are asked for: so many stand in memory besides the one that is used."""


def generator(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU, so that the numbers are the same for every device."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _to_draw(
    config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]
) -> tuple[Tensor, list[Callable[[], Tensor]]]:
    """A parameter's memory, and what must be called, in any order, to give it its initial value.

    Matrices that write to the residual stream are narrower by sqrt(2 layers), so that it does not grow with depth
    (Radford et al. 2019, section 2.3).
    """
    if name.endswith(".bias") or len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape), []
    leaf = name.removesuffix(".weight").split(".")[-1]
    std = config.init_std / (2 * config.layers) ** 0.5 if leaf in ("out", "down") else config.init_std
    value = torch.empty(shape)
    matrices = [(f"{name}/{e}", one) for e, one in enumerate(value)] if len(shape) == 3 else [(name, value)]
    calls: list[Callable[[], Tensor]] = []
    for title, matrix in matrices:
        pieces = matrix.view(-1).split(PIECE)
        titles = [title] if len(pieces) == 1 else [f"{title}/{n}" for n in range(len(pieces))]
        calls += [partial(_draw, piece, std, seed, own) for piece, own in zip(pieces, titles, strict=True)]
    return value, calls


def _draw(piece: Tensor, std: float, seed: int, name: str) -> Tensor:
    return piece.normal_(0, std, generator=generator(seed, name))


def initial_value(config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 value a parameter starts from: ones for norms, zeros for biases, else normal."""
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
                # A tensor without numbers belongs to the thread that pretends; it has nothing to draw.
                real = type(value) is torch.Tensor
                ahead.append((value, [pool.submit(call) for call in calls] if real else []))
            if n >= AHEAD:
                value, drawn = ahead.popleft()
                for one in drawn:
                    one.result()
                yield value


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Give every parameter its initial value and every buffer zeros."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(config, seed, name, tuple(parameter.shape)))
    for buffer in model.buffers():
        buffer.zero_()
