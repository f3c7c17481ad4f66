"""Initial weights as a function of seed, name and index in the parameter; the parameter table names the distribution.

So a rank draws only the slices that it holds, whatever the layout, and gets the bits that one device would have drawn.
Initialization takes the memory of those slices and of one block of `normal.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from shardwise.model.normal import fill_normal, key_of
from shardwise.run import AdapterConfig, ModelConfig
from shardwise.run.parameters import find_parameter
from shardwise.run.sections.adapter import NO_ADAPTER

DRAWS = ContextVar("DRAWS", default=True)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within this context parameters get memory but no values: for a dry run, where drawing took a fifth of the time."""
    token = DRAWS.set(False)
    try:
        yield
    finally:
        DRAWS.reset(token)


@torch.no_grad()
def draw(
    values: Tensor,
    config: ModelConfig,
    seed: int,
    name: str,
    offset: Sequence[int] | None = None,
    device: torch.device | None = None,
    adapter: AdapterConfig = NO_ADAPTER,
    factor: float = 1.0,
) -> None:
    """Fill a tensor with the initial value of a parameter, times `factor`, or with the box of it that begins at `offset`. It is
    computed on `device`, by default the tensor's device.

    Matrices that write to the residual stream start smaller by sqrt(2 layers), so that it does not grow with depth
    (Radford et al. 2019, section 2.3).
    """
    if not DRAWS.get():
        return
    entry = find_parameter(config, name, adapter)
    if entry.init in ("ones", "zeros"):
        values.fill_(factor if entry.init == "ones" else 0.0)
        return
    std = config.init_std / (2 * config.layers) ** 0.5 if entry.init == "residual" else config.init_std
    if entry.init == "adapter":
        std = (3 * entry.shape[-1]) ** -0.5
    fill_normal(values, std * factor, key_of(f"{seed}/{name}"), entry.shape, offset or (0,) * len(entry.shape), device)


@torch.no_grad()
def initialize(
    model: nn.Module, config: ModelConfig, seed: int, prefix: str = "", adapter: AdapterConfig = NO_ADAPTER
) -> None:
    """Give every parameter its initial value and every buffer zeros. `prefix` is the name of `model` inside the whole model."""
    for name, parameter in model.named_parameters():
        draw(parameter.data, config, seed, f"{prefix}{name}", adapter=adapter)
    for buffer in model.buffers():
        buffer.zero_()
