"""What is known of a collective: its axis, its kind, its process group and its bytes.

Programs write this in several places, by version and backend: in the arguments of NCCL's kernel or of the host's
`record_param_comms`, in a label of this project's trainer, in the shapes of the call (`nccl:all_reduce`, `c10d::…`), at worst
only in the kernel's name. The axis comes from the label, or else from the description of the process group: this project's
words, the dimensions of a DeviceMesh (torchtitan, FSDP) or Megatron's names. Any other group keeps its own name, since a guess
would blame the wrong axis. Few descriptions are distinct, so each is worked out once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.labels import read_label
from shardwise.ledger import AXIS_OF, wire_bytes
from shardwise.trace.reading.profile import Integers, Profile, column_at, row_of

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")

WORLD = "world"
"""The default process group, of all ranks."""

UNKNOWN = "unknown"
"""The profile names no process group."""

_DIMENSIONS = {
    "tp": "tensor", "tensor": "tensor", "mp": "tensor", "tensor_model": "tensor", "expert_tensor": "tensor", "etp": "tensor",
    "pp": "pipeline", "pipeline": "pipeline", "pipeline_model": "pipeline", "embedding": "pipeline",
    "position_embedding": "pipeline", "stage": "pipeline",
    "cp": "context", "context": "context", "sp": "context", "sequence_data": "context", "ulysses": "context",
    "ep": "expert", "expert": "expert", "expert_model": "expert", "moe_ep": "expert",
    "dp": "replicate", "data": "replicate", "ddp": "replicate", "dp_replicate": "replicate", "replicate": "replicate",
    "data_with_cp": "replicate", "dp_cp": "replicate", "inter_distributed_optimizer_instance": "replicate",
    "shard": "shard", "fsdp": "shard", "dp_shard": "shard", "dp_shard_cp": "shard", "dp_shard_mod_ep": "shard",
    "dp_shard_in_ep": "shard", "efsdp": "shard", "zero": "shard", "expert_data": "shard", "edp": "shard",
    "intra_distributed_optimizer_instance": "shard", "batch": "replicate", "loss": "replicate",
}  # fmt: skip
"""Axes of mesh dimensions and of Megatron's groups, without the words that all of those have. Megatron's distributed optimizer
shards over its data group, but the group is there for replicas."""

_COLLECTIVES = (
    (re.compile(r"reduce_?scatter"), "reduce_scatter"),
    (re.compile(r"all_?gather"), "all_gather"),
    (re.compile(r"all_?reduce"), "all_reduce"),
    (re.compile(r"all_?to_?all"), "all_to_all"),
    (re.compile(r"broadcast"), "broadcast"),
    (re.compile(r"barrier"), "barrier"),
    (re.compile(r"send_?recv"), "send_recv"),
    (re.compile(r"send"), "send"),
    (re.compile(r"recv|receive"), "recv"),
    (re.compile(r"scatter"), "scatter"),
    (re.compile(r"gather"), "gather"),
    (re.compile(r"reduce"), "reduce"),
)

POINT_TO_POINT = ("send", "recv", "send_recv")

ELEMENT_BYTES = {
    "float": 4, "half": 2, "double": 8, "bfloat16": 2, "int": 4, "long": 8, "longint": 8, "short": 2, "shortint": 2,
    "byte": 1, "char": 1, "signedchar": 1, "unsignedchar": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "complexfloat": 8, "complexdouble": 16, "uint8": 1, "int8": 1, "int32": 4,
    "int64": 8, "float16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""Bytes of an element, by the profiler's spelling in lower case without blanks."""

CHANGES_SIZE = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives whose calls name both input and output."""


class Description(NamedTuple):
    """What is known of a collective."""

    axis: str
    collective: str
    group: str
    """Name of the process group; "" when the profile names none."""
    size: int
    """Ranks in the group, 0 when not known."""
    bytes: float
    """On the wire."""
    payload: float
    """Of the whole tensor."""
    sized: bool
    """Whether its bytes are known."""


def axis_of(description: str, name: str = "") -> str:
    """The axis of a process group, or what the program called the group when its description names no known axis."""
    word = re.sub(r"[\s\-]+", "_", description.strip().lower())
    if word in ("default_pg", "default", "world"):
        return WORLD
    if word in AXES:
        return word
    if word in AXIS_OF:
        return AXIS_OF[word]
    bare = re.sub(r"^(mesh|group)_", "", word)
    bare = re.sub(r"(_model)?_parallel(_group)?", lambda found: "_model" if found[1] else "", bare)
    bare = re.sub(r"_group$", "", bare)
    if bare in _DIMENSIONS:
        return _DIMENSIONS[bare]
    if word and word != "undefined":
        return description.strip()
    return f"group {name}" if name else UNKNOWN


def collective_of(name: str) -> str:
    """The ledger's word for the collective that the name of a kernel, operator or range spells; "" for any other name."""
    spelled = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    for pattern, word in _COLLECTIVES:
        if pattern.search(spelled):
            return word
    return ""


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a type as the profiler writes it; 0 for an unknown type."""
    return ELEMENT_BYTES.get(re.sub(r"c10::|[\s]", "", dtype.lower()), 0)


def describe(
    profile: Profile, own: Integers, label: Integers, carrier: Integers, call: Integers
) -> tuple[tuple[Description, ...], Integers]:
    """The distinct descriptions of some collectives, and which is whose. Each collective is given by events, -1 for none: its
    own, its label, the one that carries its arguments and the call that has its shapes."""
    events, messages, shapes = profile.events, profile.messages, profile.shapes
    if not len(own):
        return (), np.zeros(0, np.int64)
    row, shaped = row_of(messages.event, carrier), row_of(shapes.event, call)
    arguments = (
        messages.group, messages.description, messages.collective, messages.dtype, messages.ranks, messages.splits_in,
        messages.elements_in, messages.elements_out, messages.size,
    )  # fmt: skip
    columns = [
        *(column_at(events.name, event) for event in (own, label, call)),
        column_at(shapes.dims, shaped),
        column_at(shapes.types, shaped),
        *(column_at(column, row) for column in arguments),
    ]
    distinct, which = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    return tuple(_Reader(profile, *line).read() for line in distinct.tolist()), which.reshape(-1)


@dataclass(frozen=True)
class _Reader:
    """One distinct description, as indices into the profile's tables."""

    profile: Profile
    own: int
    label: int
    call: int
    dims: int
    types: int
    group: int
    description: int
    collective: int
    dtype: int
    ranks: int
    splits: int
    given: int
    got: int
    size: int

    def read(self) -> Description:
        """In words and bytes."""
        names = self.profile.events.names
        name = self._text(self.group)
        group = self.profile.groups.get(name)
        own, call = names[self.own], names[self.call] if self.call >= 0 else ""
        # The backend may run another collective than was asked for; the name of a kernel says least.
        spelled = (self._text(self.collective), *((own, call) if own.startswith("c10d::") else (call, own)))
        collective = next((word for word in map(collective_of, spelled) if word), "unknown")
        description = self._text(self.description) or (group.description if group else "")
        axis = axis_of(description, name)
        label = read_label(names[self.label]) if self.label >= 0 else None
        labelled = label is not None and len(label.words) >= 3
        if label is not None and labelled:
            axis, collective = AXIS_OF.get(label.words[0], label.words[0]), label.words[1]
        size = self.size if self.size > 0 else group.size if group else 0
        if not name:
            name, size = self._group_of_axis(axis)
        given = self._given(collective)
        if not name and size <= 0:
            size = self._size_by_shapes(collective)
        wire = self._wire(collective, size, given) if given is not None and size > 0 else None
        if label is not None and labelled:
            wire = _number(label.words[2])
        payload = 0 if given is None else given * (size if collective == "all_gather" else 1)
        sized = wire is not None or collective in ("recv", "barrier")
        return Description(axis, collective, name, max(size, 0), float(wire or 0), float(payload), sized)

    def _group_of_axis(self, axis: str) -> tuple[str, int]:
        """The group of a collective that names none, if all groups of its axis have the same members."""
        alike = {g.ranks: name for name, g in self.profile.groups.items() if axis_of(g.description, name) == axis}
        return (next(iter(alike.values())), len(next(iter(alike)))) if len(alike) == 1 else ("", 0)

    def _text(self, at: int) -> str:
        return self.profile.messages.texts[at] if at >= 0 else ""

    def _given(self, collective: str) -> int | None:
        """Bytes that this rank puts in, None when not known."""
        element = element_bytes(self._text(self.dtype)) if self.dtype >= 0 else 0
        if element and max(self.given, self.got) > 0:
            return element * (self.got if collective == "recv" and self.got > 0 else max(self.given, 0) or self.got)
        return self._given_by_shapes(collective)

    def _tensors(self) -> list[tuple[int, int]]:
        """Numel and element size of each tensor of the call."""
        dims, types = self.profile.shapes.decode(self.dims), self.profile.shapes.decode(self.types)
        found: list[tuple[int, int]] = []
        for shape, kind in zip(dims, types, strict=False):
            shapes = shape if shape and isinstance(shape[0], list) else [shape]
            element = element_bytes(str(kind))  # the type of a list of tensors is not recorded
            if element and all(isinstance(n, int) for one in shapes for n in one):
                found += [(prod(one), element) for one in shapes if one]
        return found

    def _given_by_shapes(self, collective: str) -> int | None:
        tensors = self._tensors()
        if not tensors:
            return None
        called = self.profile.events.names[self.call]
        # Operators of `c10d` take the output before the input; annotations have only the input.
        second = called.startswith("c10d::") and collective in CHANGES_SIZE
        if second and len(tensors) < 2:
            return None
        elements, element = tensors[1] if second else tensors[0]
        return elements * element

    def _size_by_shapes(self, collective: str) -> int:
        """Ranks of the group: the factor by which an all-gather or reduce-scatter changes the size, or else all of the job."""
        tensors = self._tensors()
        if collective in ("all_gather", "reduce_scatter") and len(tensors) >= 2 and self.call >= 0:
            small, large = sorted(elements for elements, _ in tensors[:2])
            return large // small if small else 0
        return 0 if self.profile.groups else max(self.profile.world, 0)

    def _wire(self, collective: str, size: int, given: int) -> Fraction:
        splits = _numbers(self._text(self.splits))
        if collective == "all_to_all" and len(splits) == size and any(splits):
            index = self._index_in_group()
            if 0 <= index < size:
                return Fraction(given * (sum(splits) - splits[index]), sum(splits))
        return wire_bytes(collective, size, given)

    def _index_in_group(self) -> int:
        group = self.profile.groups.get(self._text(self.group))
        members = list(group.ranks) if group and group.ranks else _numbers(self._text(self.ranks))
        return members.index(self.profile.rank) if self.profile.rank in members else -1


def _numbers(text: str) -> list[int]:
    """The integers of a list as the file writes it; [] when it is shortened or not a list."""
    parts = text.strip().strip("[]").split(",")
    try:
        return [int(part) for part in parts if part.strip()]
    except ValueError:
        return []


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
