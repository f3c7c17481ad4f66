"""Observers of a step: the pipeline, the optimizer and the train step call them around their work.

Counters of work and memory, and the labels of a profile, are observers; nothing is patched. Without observers, a call is a truth
test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from shardwise.schedules import Action

NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class Observer:
    """Returns contexts to run things in; this one does nothing."""

    def action(self, action: Action) -> AbstractContextManager[Any]:
        """An action of the schedule, including its waits."""
        return NOTHING

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """A phase of a step outside of the schedule: data, gradients, clip (also inside of optimizer), optimizer, balance."""
        return NOTHING

    def weight_gradients(self) -> AbstractContextManager[Any]:
        """All deferred weight gradients of a stage and microbatch."""
        return NOTHING

    def weight_gradient(self, module: str) -> AbstractContextManager[Any]:
        """One deferred weight gradient, that of the matrix of this name."""
        return NOTHING

    def recompute(self, module: nn.Module) -> AbstractContextManager[Any]:
        """The recomputed forward pass of a module, during the backward pass. The module's own hooks do not run then; those of the
        modules inside of it do."""
        return NOTHING


class Observers(Observer):
    """All observers of a rank as one."""

    def __init__(self) -> None:
        self.each: list[Observer] = []

    @contextlib.contextmanager
    def watched_by(self, observer: Observer) -> Iterator[None]:
        """While this context is open, the observer is called; the last one added is the innermost."""
        self.each.append(observer)
        try:
            yield
        finally:
            self.each.remove(observer)

    def action(self, action: Action) -> AbstractContextManager[Any]:
        return self._all(lambda one: one.action(action))

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return self._all(lambda one: one.phase(name))

    def weight_gradients(self) -> AbstractContextManager[Any]:
        return self._all(lambda one: one.weight_gradients())

    def weight_gradient(self, module: str) -> AbstractContextManager[Any]:
        return self._all(lambda one: one.weight_gradient(module))

    def recompute(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self._all(lambda one: one.recompute(module))

    def _all(self, context_of: Callable[[Observer], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
        return _nested([context_of(one) for one in self.each]) if self.each else NOTHING


@contextlib.contextmanager
def _nested(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
