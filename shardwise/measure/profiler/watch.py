"""Follows a module while it runs: which submodule an operator belongs to, and in which pass.

Hooks report which submodule's forward pass runs. Autograd numbers its nodes as the forward pass creates them, so a node's number
identifies the submodule that created it, to which its backward pass belongs; this is exact for custom functions too. A forward pass
inside of a backward pass is recomputation. A dispatch mode, below autograd, sees operators. A function mode, above it, sees
attention, so that attention counts the same whichever kernel is chosen.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from shardwise.measure.profiler.formulas import (
    NAMES,
    bound,
    formula_of,
    is_counted,
    is_unknown,
    kernel_of,
    recomputed_scores,
    sdpa_flops,
)
from shardwise.torch_private import BareDispatchMode, autograd_number, autograd_sequence, graph_task, storage_key

OUTSIDE = "(outside)"
"""Owner of operators outside of the module: the loss, the optimizer, the data."""
FORWARD, BACKWARD, RECOMPUTE = PASSES = "forward", "backward", "recompute"
ATTENTION = "\0"
"""Prefix for nodes of an attention whose backward pass is counted in one piece."""
NOT_IN_BACKWARD = -1
MOST_MARKS = 1_000_000

Label = tuple[str, str]
"""A submodule, and a pass."""


class Clock:
    """Divides time among labels, from `start` to `stop`: the time from one switch to the next belongs to the label that was
    switched to, so the labels' times add up to the total. On a GPU a switch is an event in the stream, read when the profile ends:
    nothing waits for it."""

    def __init__(self, device: torch.device, first: Label) -> None:
        self.on_gpu, self.label, self.first = device.type == "cuda", first, first
        self.seconds: dict[Label, float] = {}
        self._then = 0.0
        self._events: list[tuple[Label, torch.cuda.Event]] = []

    def start(self) -> None:
        """Start the clock at the first label."""
        self.label = self.first
        if self.on_gpu:
            torch.cuda.synchronize()
            self._events = [(self.label, _event())]
        self._then = time.perf_counter()

    def switch(self, label: Label) -> None:
        """From now on time belongs to this label."""
        if self.on_gpu:
            self._events.append((label, _event()))
        else:
            now = time.perf_counter()
            self.seconds[self.label] = self.seconds.get(self.label, 0.0) + now - self._then
            self._then = now
        self.label = label

    def stop(self) -> None:
        """Stop the clock."""
        self.switch(self.first)
        if self.on_gpu:
            torch.cuda.synchronize()
            for (label, event), (_, following) in zip(self._events, self._events[1:], strict=False):
                passed = event.elapsed_time(following) / 1e3
                self.seconds[label] = self.seconds.get(label, 0.0) + passed
            self._events = []

    @property
    def total(self) -> float:
        """Seconds of all labels."""
        return sum(self.seconds.values())


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Marks:
    """Maps autograd's sequence numbers to the owners of their nodes: each mark holds from its number on."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.owners: list[str] = []

    def add(self, number: int, owner: str) -> None:
        """Nodes from this number on belong to `owner`."""
        self.numbers.append(number)
        self.owners.append(owner)
        if len(self.numbers) > MOST_MARKS:
            del self.numbers[: MOST_MARKS // 2], self.owners[: MOST_MARKS // 2]

    def owner(self, number: int) -> str:
        """The owner of a node."""
        at = bisect_right(self.numbers, number) if number >= 0 else 0
        return self.owners[at - 1] if at else OUTSIDE


class Watch:
    """Measures by submodule and pass while it is open."""

    def __init__(self, module: nn.Module, *, memory: bool, time: bool) -> None:
        self.module, self.memory, self.time = module, memory, time
        self.flops: dict[Label, float] = defaultdict(float)
        self.by_dtype: dict[torch.dtype, float] = defaultdict(float)
        self.fused: dict[str, float] = defaultdict(float)
        """The part of recomputation that fused attention does inside of its backward kernels."""
        self.saved: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        """Custom operators without a formula, and their calls."""
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.clock = Clock(self.device, (OUTSIDE, FORWARD))
        self._waiting: list[tuple[dict[Any, float], Any, Tensor]] = []
        self._inside: list[tuple[str, bool]] = []
        self._functions: list[_Functions] = []
        self._marks: dict[int, Marks] = {NOT_IN_BACKWARD: Marks()}
        self._node = (NOT_IN_BACKWARD, NOT_IN_BACKWARD, OUTSIDE)
        """The node that ran last: its graph task (backward pass), its number, and its owner."""
        self.attending = self._fused = False
        self.behind = False
        """Whether the clock's current label is not a forward pass."""
        self._storages: set[int] = set()
        self._kept: dict[int, Any] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        for name, module in self.module.named_modules():
            before = module.register_forward_pre_hook(lambda *_, name=name: self.enter(name), prepend=True)
            after = module.register_forward_hook(lambda *_: self.leave(), always_call=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        for x in (*self.module.parameters(), *self.module.buffers()):
            if not hasattr(x, "to_local"):
                self._storages.add(storage_key(x.untyped_storage()))
        # Operators inside of a compiled region, or of a fused inference layer, cannot be seen.
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._open.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        if self.memory:
            self._open.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x))
        self._open.enter_context(_Functions(self))
        self._open.enter_context(_Operators(self))
        if self.time:
            self.clock.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.time:
            self.clock.stop()
        self._open.close()
        self._marks, self._kept = {NOT_IN_BACKWARD: Marks()}, {}
        for counter, key, amount in self._waiting:
            counter[key] += float(amount)
        self._waiting = []

    def add(self, counter: dict[Any, float], key: Any, amount: Any) -> None:
        """Count; an amount that only the device knows is added when the profile ends."""
        if isinstance(amount, Tensor):
            self._waiting.append((counter, key, amount))
        else:
            counter[key] += amount

    def label(self) -> Label:
        """Submodule and pass that run now."""
        task = graph_task()
        if task == NOT_IN_BACKWARD:
            return (self._inside[-1][0] if self._inside else OUTSIDE), FORWARD
        if self._inside and self._inside[-1][1]:
            return self._inside[-1][0], RECOMPUTE
        return self._owner_of_node(task), RECOMPUTE if torch.is_grad_enabled() else BACKWARD

    def _owner_of_node(self, task: int) -> str:
        """The submodule whose forward pass created the running node. A forward pass inside of a backward pass creates nodes that
        run in a nested backward pass, and that the outer one's thread numbered."""
        number = autograd_number()
        if self._node[:2] != (task, number):  # a node runs several operators
            made = NOT_IN_BACKWARD
            if len(self._marks) > 1:
                made = max((each for each in self._marks if each < task), default=NOT_IN_BACKWARD)
            self._node = task, number, self._marks[made].owner(number)
        return self._node[2]

    def mark(self, owner: str) -> None:
        """Nodes from here on belong to this submodule."""
        task = graph_task()
        if task == NOT_IN_BACKWARD and len(self._marks) > 1:
            self._marks = {NOT_IN_BACKWARD: self._marks[NOT_IN_BACKWARD]}
        self._marks.setdefault(task, Marks()).add(autograd_sequence(), owner)

    def enter(self, name: str) -> None:
        """A submodule's forward pass begins."""
        recomputes = graph_task() != NOT_IN_BACKWARD
        if recomputes and not (self._inside and self._inside[-1][1]):
            # `backward` is a function too, and inside of functions the mode is off.
            self._functions.append(_Functions(self))
            self._functions[-1].__enter__()
        self._inside.append((name, recomputes))
        self.mark(name)
        if not recomputes:
            self.calls[name] += 1
        self._switch((name, RECOMPUTE if recomputes else FORWARD))

    def leave(self) -> None:
        """The forward pass of the innermost submodule ends."""
        _, recomputes = self._inside.pop()
        if recomputes and not (self._inside and self._inside[-1][1]):
            self._functions.pop().__exit__(None, None, None)
        self.mark(self._inside[-1][0] if self._inside else OUTSIDE)
        self._switch(self.label())

    def _switch(self, label: Label) -> None:
        if self.time and label != self.clock.label:
            self.clock.switch(label)
            self.behind = label[1] != FORWARD

    def _save(self, x: Tensor) -> Tensor:
        """Count the bytes autograd saves: each storage once, and parameters and buffers not at all."""
        storage = (x.to_local() if hasattr(x, "to_local") else x).untyped_storage()
        key = storage_key(storage)
        if key not in self._storages and key not in self._kept and graph_task() == NOT_IN_BACKWARD:
            # While the reference is held, no other storage has this key.
            self._kept[key] = StorageWeakRef(storage)
            self.saved[self._inside[-1][0] if self._inside else OUTSIDE] += storage.nbytes()
        return x

    def operator(self, operator: Any, args: Any, keys: Any, out: Any, label: Label) -> None:
        """Count one call of an operator."""
        kernel = kernel_of(operator)
        if self.attending:
            self._fused = self._fused or kernel is not None
            return
        if kernel is not None:
            flops_of, backward = kernel
            given = bound(operator, args, keys)
            flops = flops_of(given)
            self.add(self.flops, label, 2.0 * flops if backward else flops)
            if backward:
                self.add(self.fused, label[0], recomputed_scores(flops, given["query"], given["value"]))
        elif (formula := formula_of(operator)) is not None:
            flops = formula(args, keys, out)
            self.add(self.flops, label, flops)
            dtype = next((x.dtype for x in args if isinstance(x, Tensor)), None)
            if dtype is not None:
                self.add(self.by_dtype, dtype, flops)
        elif is_unknown(operator):
            self.unknown[operator.name()] += 1

    def attend(self, args: Any, keys: Any) -> Tensor:
        """Run attention, count it by pairs, and skip the products that its inner operators would count."""
        owner, which = self.label()
        given = dict(zip(NAMES, args, strict=False)) | keys
        flops = sdpa_flops(given)
        self.add(self.flops, (owner, which), flops)
        self.mark(ATTENTION + owner)
        self.attending, self._fused = True, False
        try:
            out = nn.functional.scaled_dot_product_attention(*args, **keys)
        finally:
            self.attending = False
            self.mark(owner)
        if out.requires_grad:
            again = recomputed_scores(flops, given["query"], given["value"]) if self._fused else 0.0

            def backward(_: Tensor) -> None:
                self.add(self.flops, (owner, BACKWARD), 2.0 * flops)
                self.add(self.fused, owner, again)

            out.register_hook(backward)
        return out


class _Operators(BareDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch = self.watch
        # Operators that are neither counted nor timed separately, which are most, take this fast path.
        # In a forward pass hooks have set the clock, unless a backward pass ran in between.
        counts = is_counted(operator)
        if not counts and not (watch.time and (watch.behind or graph_task() != NOT_IN_BACKWARD)):
            return operator(*args, **kwargs) if kwargs else operator(*args)
        label = watch.label()
        attends = label[0].startswith(ATTENTION)
        if watch.time:
            watch._switch((label[0][1:], label[1]) if attends else label)
        out = operator(*args, **kwargs) if kwargs else operator(*args)
        if counts and not attends:
            watch.operator(operator, args, kwargs or {}, out, label)
        return out


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.scaled_dot_product_attention and not self.watch.attending:
            return self.watch.attend(args, kwargs or {})
        return function(*args, **(kwargs or {}))
