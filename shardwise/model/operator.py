"""This project's own operators, which the compiler calls without looking inside.

`torch.library.custom_op` makes such operators too, but a call of an empty one takes the host 34 microseconds, which is as long as
many a kernel; of one made here it takes 9, or 27 with a gradient (one core of a server, PyTorch 2.13). A gradient costs that much
because PyTorch asks Python at every call whether it is wanted. A compiled layer has its gradient in its graph, so there
`without_gradient.py` replaces an operator by a twin that has none: `name.compiled`.

Operators that write to their arguments are left to `custom_op`, which counts the versions of those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Implementation = Callable[..., Any]
_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")
COMPILED: dict[Any, Any] = {}
"""Operators with a gradient, and their twins."""


def operator(schema: str, *, differentiable: bool = False) -> Callable[[Implementation], Any]:
    """Makes an operator of a function, by its schema without the namespace. The function is called on every device; `shape_of` says
    what it returns, and `differentiate` how its gradient is computed."""
    name, _, arguments = schema.partition("(")

    def make(function: Implementation) -> Any:
        for each in (name, f"{name}.compiled") if differentiable else (name,):
            _LIBRARY.define(f"{each}({arguments}", tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.impl(_LIBRARY, each, "CompositeExplicitAutograd")(function)
        packet = getattr(torch.ops.shardwise, name)
        if differentiable:
            COMPILED[packet.default] = packet.compiled
        return packet.default

    return make


def shape_of(*operators: Any) -> Callable[[Implementation], Implementation]:
    """The function returns empty tensors like those that the operators return."""

    def register(function: Implementation) -> Implementation:
        for each in operators:
            for one in (each, COMPILED[each]) if each in COMPILED else (each,):
                torch.library.register_fake(one, function, lib=_LIBRARY)
        return function

    return register


def differentiate(
    operator: Any,
    backward: Callable[..., Any],
    keep: Callable[[Any, tuple[Any, ...], Tensor], None],
) -> None:
    """The gradient of an operator: `keep(ctx, inputs, output)` is called in the forward pass. Registered this way, and not as an
    autograd function: PyTorch's compile cache misses layers that contain one of those."""
    torch.library.register_autograd(operator, backward, setup_context=keep, lib=_LIBRARY)
