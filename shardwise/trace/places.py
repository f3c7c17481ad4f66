"""Which module, and which pass over it, a moment of a host's thread belongs to; and so every kernel launched then.

Forward, the module is the innermost span of one: a label, a Python frame `nn.Module: …`, else a range of the user's. Backward,
autograd runs nodes by itself; but each carries the number that its forward operator had, and that one stood in a module.
Inside a node's span, operators that number new nodes are the forward pass once more: recomputation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import read_label
from shardwise.trace.answers import PASSES
from shardwise.trace.reading.events import Events, Integers, Profile
from shardwise.trace.spans.activity import Spans, spans_of
from shardwise.trace.spans.nesting import distinct

FORWARD, RECOMPUTE, BACKWARD, OTHER = range(len(PASSES))
NODE = "autograd::engine::evaluate_function"
FRAME = "nn.Module: "
NO_PLACE = "(nowhere)"
NO_LAUNCH = "(launch not recorded)"

# Ranges that programs name themselves.
_OPTIMIZER = re.compile(r"^\W*optim(?:izer)?(?:[ _.]?step)?\W*$")
_DATA = re.compile(r"^\W*(?:load|get|next|fetch)_?batch\W*$|^\W*data_?load(?:er|ing)\W*$")
_BACKWARD_RANGE = re.compile(r"^\W*backward\W*$", re.IGNORECASE)

_NOT_MODULES = (
    "ProfilerStep",
    "nccl:",
    "gloo:",
    "mpi:",
    "ucc:",
    "shardwise:",
    "PyTorch Profiler",
    "Optimizer.",
    "enumerate(",
)


@dataclass(frozen=True)
class Places:
    """Places of moments: numbers into `names`, and passes."""

    names: tuple[str, ...]
    module: NDArray[np.bool_]
    """Which names are modules; the others are phases, in brackets."""
    place: Integers
    passes: Integers


class Finder:
    """The spans of one profile that say where its work belongs."""

    def __init__(self, profile: Profile) -> None:
        self.events = events = profile.events
        self.names: list[str] = [NO_PLACE]
        self._numbers: dict[str, int] = {NO_PLACE: 0}
        labels = [read_label(name) for name in events.names]
        kinds = [found.kind if found else "" for found in labels]
        self.modules, self._module_name = self._module_spans(events, kinds)
        self.phases = self._phase_spans(events, kinds)
        self.actions = self._some(events, [kind == "action" for kind in kinds])
        self.nodes = self._some(events, [name.startswith(NODE) for name in events.names])
        numbered = (
            (events.sequence >= 0) & events.of_kind("cpu_op") & ~self._mask(events, [NODE in n for n in events.names])
        )
        self.numbered = spans_of(events, numbered & (events.forward_thread <= 0))
        self._of_node = self._places_of_nodes()

    def find(self, lane: NDArray[np.integer], time: Integers) -> Places:
        """The place of each moment; lane -1 is no moment."""
        events = self.events
        module, node = self.modules.innermost(lane, time), self.nodes.innermost(lane, time)
        inner = self.numbered.innermost(lane, time)
        action, phase = self.actions.innermost(lane, time), self.phases.innermost(lane, time)
        in_node = node >= 0
        began = np.where(module >= 0, events.start[module], -1)
        own = (module >= 0) & (~in_node | (began >= events.start[node]))
        place = np.where(own, self._module_name[module], np.where(in_node, self._of_node[node], 0))
        repeated = in_node & (inner >= 0) & (events.start[inner] >= events.start[node])
        passes = np.where(in_node, np.where(repeated, RECOMPUTE, BACKWARD), np.where(module >= 0, FORWARD, OTHER))
        by_action = self._pass_of_action[events.name[action]]
        passes = np.where((action >= 0) & ~in_node & (module >= 0), by_action, passes)
        passes = np.where((action >= 0) & (place == 0) & ~in_node, by_action, passes)
        for fallback in (phase, action):
            place = np.where((place == 0) & (fallback >= 0), self._fallback[events.name[fallback]], place)
        place = np.where((place == 0) & in_node, self._number("(backward)"), place)
        place = np.where(lane < 0, self._number(NO_LAUNCH), place)
        passes = np.where(lane < 0, OTHER, passes)
        # What a phase names is no pass over the model, wherever a module would be.
        passes = np.where((phase >= 0) & ~own & ~in_node, OTHER, passes)
        backward = np.array([_BACKWARD_RANGE.match(name) is not None for name in self.names])
        passes = np.where(backward[place], BACKWARD, passes)
        return Places(tuple(self.names), np.array([not n.startswith("(") for n in self.names]), place, passes)

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

    @staticmethod
    def _mask(events: Events, wanted: list[bool]) -> NDArray[np.bool_]:
        return events.named(np.array(wanted or [False], np.bool_))

    def _some(self, events: Events, wanted: list[bool]) -> Spans:
        return spans_of(events, self._mask(events, wanted) & events.of_kind("cpu_op", "annotation"))

    def _module_spans(self, events: Events, kinds: list[str]) -> tuple[Spans, Integers]:
        """Spans of modules by the best sign there is, and the number of each event's name."""
        of_event = np.zeros(len(events) + 1, np.int64)
        labelled = self._some(events, [kind == "module" for kind in kinds])
        if len(labelled.event):
            text = [
                name.partition(" ")[2] if kind == "module" else ""
                for name, kind in zip(events.names, kinds, strict=True)
            ]
            of_name = np.array([self._number(t) if t else 0 for t in text], np.int64)
            of_event[labelled.event] = of_name[events.name[labelled.event]]
            return labelled, of_event
        frames = spans_of(
            events, self._mask(events, [n.startswith(FRAME) for n in events.names]) & events.of_kind("python")
        )
        if len(frames.event):
            self._name_paths(events, frames, of_event)
            return frames, of_event
        named = [not name.startswith(_NOT_MODULES) and not phase_of(name) for name in events.names]
        ranges = spans_of(events, self._mask(events, named) & events.of_kind("annotation"))
        of_name = np.array(
            [self._number(n) if use else 0 for n, use in zip(events.names, named, strict=True)] or [0], np.int64
        )
        of_event[ranges.event] = of_name[events.name[ranges.event]]
        return ranges, of_event

    def _name_paths(self, events: Events, frames: Spans, of_event: Integers) -> None:
        """Frames are named by class alone, so a module is the path of those around it."""
        path: dict[tuple[int, int], int] = {}
        parents, event_names = frames.nest.parent.tolist(), events.name[frames.event].tolist()
        number: list[int] = []
        for at, (parent, name) in enumerate(zip(parents, event_names, strict=True)):
            # A parent begins before what it encloses, so its number is known.
            outer = number[parent] if 0 <= parent < at else 0
            if (outer, name) not in path:
                own = events.names[name].removeprefix(FRAME)
                path[outer, name] = self._number(f"{self.names[outer]}.{own}" if outer else own)
            number.append(path[outer, name])
        of_event[frames.event] = number

    def _phase_spans(self, events: Events, kinds: list[str]) -> Spans:
        """Parts of a step outside the model: labels, and what PyTorch names by itself."""
        self._fallback = np.zeros(max(len(events.names), 1), np.int64)
        self._pass_of_action = np.full(max(len(events.names), 1), OTHER)
        wanted: list[bool] = []
        for at, (name, kind) in enumerate(zip(events.names, kinds, strict=True)):
            phase = phase_of(name)
            wanted.append(bool(phase))
            if phase:
                self._fallback[at] = self._number(f"(phase {phase})")
            if kind == "action":
                word = name.partition(" ")[2]
                self._fallback[at] = self._number(f"(stage {word[1:].partition('.')[0]})")
                self._pass_of_action[at] = FORWARD if word.startswith("F") else BACKWARD
        return self._some(events, wanted)

    def _places_of_nodes(self) -> Integers:
        """Place of each of autograd's nodes, by event; nodes without a forward operator, which add a gradient to those before,
        belong with the node that ran before them on their thread."""
        events, node = self.events, self.nodes.event
        found = np.zeros(len(events) + 1, np.int64)
        if not len(node):
            return found
        place = np.zeros(len(node), np.int64)
        numbered = self.numbered.event
        outside = self.nodes.innermost(events.lane[numbered], events.start[numbered]) < 0
        for thread in np.unique(events.forward_thread[node]):
            mine = np.flatnonzero((events.forward_thread[node] == thread) & (events.sequence[node] >= 0))
            operator = self._forward_of(
                node[mine], numbered, outside if thread <= 0 else np.ones(len(numbered), np.bool_)
            )
            module = self.modules.innermost(events.lane[operator], events.start[operator])
            place[mine] = np.where((operator >= 0) & (module >= 0), self._module_name[module], 0)
        order = np.lexsort((events.start[node], events.lane[node]))
        known = np.where(place[order] > 0, np.arange(len(order)), -1)
        latest = np.maximum.accumulate(known)
        same = (latest >= 0) & (events.lane[node[order]] == events.lane[node[order[latest]]])
        found[node[order]] = np.where(same, place[order[latest]], 0)
        return found

    def _forward_of(self, node: Integers, operator: Integers, usable: NDArray[np.bool_]) -> Integers:
        """The operator that made each node: the last one with its number before it, on the thread that has most of them."""
        events = self.events
        operator = operator[usable]
        best = np.full(len(node), -1, np.int64)
        # Numbers and times as their places in order, which leave room for both in one key.
        order = np.searchsorted(distinct(events.sequence[operator]), events.sequence)
        moment = np.searchsorted(distinct(events.start), events.start)
        key = order * len(events) + moment
        for lane in np.unique(events.lane[operator]):
            own = operator[events.lane[operator] == lane]
            own = own[np.argsort(key[own], kind="stable")]
            at = np.searchsorted(key[own], key[node]) - 1
            candidate = own[np.maximum(at, 0)]
            made = np.where((at >= 0) & (events.sequence[candidate] == events.sequence[node]), candidate, -1)
            if (made >= 0).sum() > (best >= 0).sum():
                best = made
        return best


def phase_of(name: str) -> str:
    """The phase that a label or one of PyTorch's own ranges names, "" for any other name."""
    label = read_label(name)
    if label is not None and label.kind == "phase":
        return label.words[0]
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
