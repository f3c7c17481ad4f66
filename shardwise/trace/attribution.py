"""Attributes moments of a host's thread, and so the kernels launched then, to a module and a pass.

In the forward pass the module is the innermost module span: a label, a Python frame `nn.Module: …`, or else a user annotation. In
the backward pass autograd runs its nodes itself, but each node has the sequence number of its forward operator, which ran in a
module. Operators with new sequence numbers inside a node are a forward pass inside the backward: recompute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import label, read_label
from shardwise.trace.answers import PASSES
from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import Profile
from shardwise.trace.spans.activity import Spans, label_spans, spans_of
from shardwise.trace.spans.intervals import distinct

FORWARD, RECOMPUTE, BACKWARD, OTHER = range(len(PASSES))
NODE = "autograd::engine::evaluate_function"
FRAME = "nn.Module: "
UNATTRIBUTED = "(nowhere)"
NO_LAUNCH = "(launch not recorded)"
DEEPEST = 40
"""Modules in a path; a deeper one is named by these and by itself."""
THREADS = 16
"""Threads among which the forward operator of a node is looked for, those with most operators."""

# Annotations that programs use.
_OPTIMIZER = re.compile(r"^\W*optim(?:izer)?(?:[ _.]?step)?\W*$")
_DATA = re.compile(r"^\W*(?:load|get|next|fetch)_?batch\W*$|^\W*data_?load(?:er|ing)\W*$")
_BACKWARD_RANGE = re.compile(r"^\W*backward\W*$", re.IGNORECASE)

_NOT_MODULES = (
    "ProfilerStep", "nccl:", "gloo:", "mpi:", "ucc:", "shardwise:", "PyTorch Profiler", "Optimizer.", "enumerate(",
)  # fmt: skip


@dataclass(frozen=True)
class Attribution:
    """Module or phase, and pass, of each moment."""

    names: tuple[str, ...]
    is_module: NDArray[np.bool_]
    """Which names are modules; the others are phases, in brackets."""
    owner: Integers
    """Of each moment, an index into `names`."""
    passes: Integers


class ModuleFinder:
    """Attributes moments of one profile by its spans of modules, phases, actions and autograd nodes."""

    def __init__(self, profile: Profile) -> None:
        self.events = events = profile.events
        self.names: list[str] = [UNATTRIBUTED]
        self._numbers: dict[str, int] = {UNATTRIBUTED: 0}
        self.modules, self._module_name = self._module_spans()
        self.phases = self._phase_spans()
        self.actions = label_spans(events, "action")
        self.nodes = self._some(lambda name: name.startswith(NODE))
        numbered = (events.sequence >= 0) & events.named(lambda name: NODE not in name, "cpu_op")
        self.numbered = spans_of(events, numbered & (events.forward_thread <= 0))
        self._of_node = self._owners_of_nodes()

    def find(self, track: NDArray[np.integer], time: Integers) -> Attribution:
        """The attribution of each moment; track -1 is an unrecorded launch."""
        events = self.events
        module, node = self.modules.innermost(track, time), self.nodes.innermost(track, time)
        inner = self.numbered.innermost(track, time)
        action, phase = self.actions.innermost(track, time), self.phases.innermost(track, time)
        in_node = node >= 0
        began = np.where(module >= 0, events.start[module], -1)
        own = (module >= 0) & (~in_node | (began >= events.start[node]))
        owner = np.where(own, self._module_name[module], np.where(in_node, self._of_node[node], 0))
        recomputed = in_node & (inner >= 0) & (events.start[inner] >= events.start[node])
        passes = np.where(in_node, np.where(recomputed, RECOMPUTE, BACKWARD), np.where(module >= 0, FORWARD, OTHER))
        by_action = (action >= 0) & ~in_node & ((module >= 0) | (owner == 0))
        passes = np.where(by_action, self._pass_of_action[events.name[action]], passes)
        for fallback in (phase, action):
            owner = np.where((owner == 0) & (fallback >= 0), self._fallback[events.name[fallback]], owner)
        owner = np.where((owner == 0) & in_node, self._number("(backward)"), owner)
        owner = np.where(track < 0, self._number(NO_LAUNCH), owner)
        # Work in a phase belongs to no pass, unless a module or node of its own encloses it.
        passes = np.where((track < 0) | ((phase >= 0) & ~own & ~in_node), OTHER, passes)
        backward = np.array([_BACKWARD_RANGE.match(name) is not None for name in self.names])
        passes = np.where(backward[owner], BACKWARD, passes)
        return Attribution(tuple(self.names), np.array([not n.startswith("(") for n in self.names]), owner, passes)

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

    def _some(self, wanted: Callable[[str], bool], *kinds: str) -> Spans:
        return spans_of(self.events, self.events.named(wanted, *(kinds or ("cpu_op", "annotation"))))

    def _module_spans(self) -> tuple[Spans, Integers]:
        """Spans of modules from the best source available, and each event's module, as an index into `names`."""
        events = self.events
        of_event = np.zeros(len(events) + 1, np.int64)
        spans, prefix = label_spans(events, "module"), label("module", "")
        if not len(spans.event):
            frames = self._some(lambda name: name.startswith(FRAME), "python")
            if len(frames.event):
                of_event[frames.event] = self._paths(frames)
                return frames, of_event
            spans = self._some(lambda name: not name.startswith(_NOT_MODULES) and not phase_of(name), "annotation")
        names = events.name[spans.event].tolist()
        number = {
            at: self._number(events.names[at].removeprefix(prefix) or UNATTRIBUTED) for at in dict.fromkeys(names)
        }
        of_event[spans.event] = [number[at] for at in names]
        return spans, of_event

    def _paths(self, frames: Spans) -> list[int]:
        """Frames have only the class of a module, so its name is the path of the enclosing frames."""
        events = self.events
        path: dict[tuple[int, int], int] = {}
        depth: dict[int, int] = {}
        deepest: dict[int, int] = {}
        number: list[int] = []
        parents, names = frames.nest.parent.tolist(), events.name[frames.event].tolist()
        for at, (parent, name) in enumerate(zip(parents, names, strict=True)):
            # A parent begins before its children, so its number is known.
            outer = number[parent] if 0 <= parent < at else 0
            # Frames deeper than that belong to a path that leaves out those between.
            outer = deepest.get(outer, outer)
            if (outer, name) not in path:
                own = events.names[name].removeprefix(FRAME)
                deep = depth.get(outer, 0) >= DEEPEST
                path[outer, name] = made = self._number(f"{self.names[outer]}.{'….' * deep}{own}" if outer else own)
                depth[made] = depth.get(outer, 0) + 1
                if deep:
                    deepest[made] = outer
            number.append(path[outer, name])
        return number

    def _phase_spans(self) -> Spans:
        """Phases of a step outside the model: labels, and annotations of PyTorch. Also records the stage and pass of actions."""
        names = self.events.names
        self._fallback = np.zeros(max(len(names), 1), np.int64)
        self._pass_of_action = np.full(max(len(names), 1), OTHER)
        for at in self.events.names_of("cpu_op", "annotation").tolist():
            name = names[at]
            found = read_label(name)
            if phase := phase_of(name):
                self._fallback[at] = self._number(f"(phase {phase})")
            if found is not None and found.kind == "action":
                action = found.words[0]
                self._fallback[at] = self._number(f"(stage {action[1:].partition('.')[0]})")
                self._pass_of_action[at] = FORWARD if action.startswith("F") else BACKWARD
        return self._some(lambda name: bool(phase_of(name)))

    def _owners_of_nodes(self) -> Integers:
        """The module of each autograd node, by event. A node without a forward operator (AccumulateGrad) belongs to the module of
        the node before it on its thread."""
        events, node = self.events, self.nodes.event
        found = np.zeros(len(events) + 1, np.int64)
        if not len(node):
            return found
        owner = np.zeros(len(node), np.int64)
        numbered = self.numbered.event
        outside = self.nodes.innermost(events.track[numbered], events.start[numbered]) < 0
        known = events.sequence[node] >= 0
        inner = events.forward_thread[node] > 0
        for mine, candidates in ((known & inner, numbered), (known & ~inner, numbered[outside])):
            operator = self._forward_of(node[mine], candidates)
            module = self.modules.innermost(events.track[operator], events.start[operator])
            owner[mine] = np.where((operator >= 0) & (module >= 0), self._module_name[module], 0)
        order = np.lexsort((events.start[node], events.track[node]))
        known = np.where(owner[order] > 0, np.arange(len(order)), -1)
        latest = np.maximum.accumulate(known)
        same = (latest >= 0) & (events.track[node[order]] == events.track[node[order[latest]]])
        found[node[order]] = np.where(same, owner[order[latest]], 0)
        return found

    def _forward_of(self, node: Integers, operator: Integers) -> Integers:
        """The forward operator of each node: the last one before it with its sequence number, on the thread with most of those of
        all nodes with its `forward_thread`."""
        events = self.events
        best = np.full(len(node), -1, np.int64)
        if not len(operator) or not len(node):
            return best
        # Operators by sequence number, thread and time. A cell is one number on one thread, the busier threads first.
        busy = np.bincount(events.track[operator], minlength=len(events.tracks))
        place = np.argsort(np.argsort(-busy, kind="stable"), kind="stable")[events.track[operator]]
        operator = operator[np.lexsort((operator, place, events.sequence[operator]))]
        sequence, track, moment = events.sequence[operator], events.track[operator], events.start[operator]
        begins = np.append(True, (np.diff(sequence) != 0) | (np.diff(track) != 0))
        cell, number = np.flatnonzero(begins), np.cumsum(begins) - 1
        # Times are replaced by their order, so that cell and time fit into one key.
        moments = distinct(moment)
        key = number * (len(moments) + 1) + np.searchsorted(moments, moment)
        low, high = (np.searchsorted(sequence[cell], events.sequence[node], side=side) for side in ("left", "right"))
        count = np.minimum(high - low, THREADS)
        pair = np.repeat(np.arange(len(node)), count)
        of_cell = low[pair] + np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
        before = np.searchsorted(moments, events.start[node])
        at = np.searchsorted(key, of_cell * (len(moments) + 1) + before[pair]) - 1
        made = (at >= 0) & (number[at] == of_cell)
        pair, at = pair[made], at[made]
        # The thread with most matches, of equals the first.
        thread = events.forward_thread[node][pair]
        voted, which, votes = np.unique(
            np.stack((thread, track[at]), 1), axis=0, return_inverse=True, return_counts=True
        )
        order = np.lexsort((voted[:, 1], -votes, voted[:, 0]))
        won = order[np.append(np.ones(min(len(order), 1), np.bool_), np.diff(voted[order, 0]) != 0)]
        chosen = np.isin(which.reshape(-1), won)
        best[pair[chosen]] = operator[at[chosen]]
        return best


@lru_cache(maxsize=1 << 16)
def phase_of(name: str) -> str:
    """The phase of a step that a label or annotation names, "" for any other name."""
    found = read_label(name)
    if found is not None and found.kind == "phase":
        return found.words[0]
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    if name.startswith("Optimizer.zero_grad#"):
        return "gradients"
    if name.startswith("enumerate(DataLoader)#"):
        return "data"
    word = name.lower() if len(name) < 80 else ""
    if _OPTIMIZER.search(word):
        return "optimizer"
    return "data" if _DATA.search(word) else ""
