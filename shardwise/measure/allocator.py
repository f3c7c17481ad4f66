"""Records the history of the CUDA allocator over a run's steps, with what the allocator does not know: the pass and module that
ran, and the owners of persistent tensors. From it `shardwise trace` shows who held memory when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.measure.counts.memory import gradients_of, optimizer_of, parameters_of, storage_of
from shardwise.measure.counts.modules import module_names
from shardwise.parallel.observer import Observer
from shardwise.schedules import Action
from shardwise.train.step import TrainState

MOST_ENTRIES = 1_000_000
FORWARD, BACKWARD, OPTIMIZER, OTHER = "forward", "backward", "optimizer", "other"


class Marks(Observer):
    """When each pass and layer starts to run: microseconds, pass, layer."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.names = names
        self.found: list[tuple[int, str, str]] = []
        self.open: list[tuple[str, str]] = [(OTHER, "")]

    def _mark(self) -> None:
        self.found.append((time.time_ns() // 1000, *self.open[-1]))

    @contextlib.contextmanager
    def _inside(self, which: str, name: str) -> Iterator[None]:
        self.begin(which, name)
        try:
            yield
        finally:
            self.end()

    def begin(self, which: str, name: str) -> None:
        """From now on this pass and layer run."""
        self.open.append((which, name))
        self._mark()

    def end(self) -> None:
        """The enclosing pass and layer run again."""
        self.open.pop()
        self._mark()

    def action(self, action: Action) -> Any:
        return self._inside(FORWARD if action.kind == "F" else BACKWARD, "")

    def phase(self, name: str) -> Any:
        return self._inside(OPTIMIZER if name in ("optimizer", "balance", "clip", "gradients") else OTHER, name)

    def weight_gradient(self, module: str) -> Any:
        return self._inside(BACKWARD, module)

    def recompute(self, module: nn.Module) -> Any:
        # The tensors that a recomputed layer saves are held until its own backward pass, like any other activation.
        return self._inside(FORWARD, self.names.get(module, ""))


@contextlib.contextmanager
def marked(train_state: TrainState) -> Iterator[Marks]:
    """While it is open, passes and layers are marked."""
    names = module_names(train_state)
    marks = Marks(names)
    layers = {block for model in train_state.parallel.models for block in model.layers.values()}
    ends = {model.loss for model in train_state.parallel.models}
    with contextlib.ExitStack() as stack:
        stack.enter_context(train_state.observers.watched_by(marks))
        for module in (*layers, *ends):
            name = names[module]
            before = module.register_forward_pre_hook(lambda *_, n=name: marks.begin(FORWARD, n), prepend=True)
            after = module.register_forward_hook(lambda *_: marks.end(), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield marks


@contextlib.contextmanager
def allocator_history(train_state: TrainState) -> Iterator[dict[str, Any]]:
    """While it is open, the CUDA allocator records its history. The yielded dict is filled at the end; without a GPU it stays
    empty."""
    found: dict[str, Any] = {}
    device = train_state.device
    if device.type != "cuda":
        yield found
        return
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MOST_ENTRIES, device=device)
    try:
        with marked(train_state) as marks:
            yield found
        found.update(_summarized(torch.cuda.memory._snapshot(device), device))
        found.update(marks=marks.found, owners=list(owners_of(train_state).items()))
    finally:
        torch.cuda.memory._record_memory_history(None, device=device)


def owners_of(train_state: TrainState) -> dict[int, str]:
    """Addresses of persistent tensors, and their owners."""
    owned = {
        "parameters": parameters_of(train_state),
        "gradients": [x for x in gradients_of(train_state) if x is not None],
        "optimizer": optimizer_of(train_state),
    }
    return {storage_of(x).data_ptr(): owner for owner, tensors in owned.items() for x in tensors}


def _summarized(snapshot: dict[str, Any], device: torch.device) -> dict[str, Any]:
    index = device.index or 0
    segments = [
        dict(address=s["address"], bytes=s["total_size"], blocks=[[b["size"], b["state"]] for b in s["blocks"]])
        for s in snapshot["segments"]
        if s["device"] == index
    ]
    history = snapshot["device_traces"][index]
    return dict(
        peak=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
        segments=segments,
        columns=["action", "address", "bytes", "microseconds"],
        history=[[e["action"], e.get("addr", 0), e["size"], e["time_us"]] for e in history],
    )
