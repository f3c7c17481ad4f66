"""Describes a collective: its axis, kind, process group and bytes.

The source depends on version and backend: arguments of the NCCL kernel or of `record_param_comms` on the host, a label of this
project's trainer, shapes of the call (`nccl:all_reduce`, `c10d::…`), at worst only the kernel's name. The axis comes from the
label, or from the description of the process group: this project's axes, dimensions of a DeviceMesh (torchtitan, FSDP) or
Megatron's names. Any other group keeps its own name, since a guess could blame the wrong axis. Few descriptions are distinct, so
each is computed once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.labels import read_label
from shardwise.ledger import AXIS_OF, wire_bytes
from shardwise.run.axes import AXES
from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import Profile, column_at, row_of

WORLD = "world"
"""Axis of the default process group, which has all ranks."""

UNKNOWN = "unknown"
"""Axis where the profile names no process group."""

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
"""Axis by mesh dimension or Megatron group, without the prefixes and suffixes that all of those share. Megatron's distributed
optimizer shards over its data group, but the group itself is of replicas."""

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
"""Bytes of an element by dtype, as the profiler writes it, in lower case without spaces."""

CHANGES_SIZE = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives whose calls have both an input and an output tensor."""


_wire_bytes = lru_cache(maxsize=1 << 12)(wire_bytes)


class Description(NamedTuple):
    """Axis, kind, process group and size of a collective."""

    axis: str
    collective: str
    group: str
    """Name of the process group, "" if the profile has none."""
    size: int
    """Ranks in the group, 0 if unknown."""
    bytes: float
    """Sent by this rank on the wire."""
    payload: float
    """Bytes of the whole tensor."""
    sized: bool
    """Whether `bytes` is known."""


@lru_cache(maxsize=1 << 18)
def axis_of(description: str, name: str = "") -> str:
    """The axis of a process group, or the group's own description if that names no known axis."""
    word = "_".join(description.lower().replace("-", " ").split())
    if word in ("default_pg", "default", "world"):
        return WORLD
    if word in AXES:
        return word
    if word in AXIS_OF:
        return AXIS_OF[word]
    bare = word.removeprefix("mesh_" if word.startswith("mesh_") else "group_")
    if "_parallel" in bare:
        bare = re.sub(r"(_model)?_parallel(_group)?", lambda found: "_model" if found[1] else "", bare)
    bare = bare.removesuffix("_group")
    if bare in _DIMENSIONS:
        return _DIMENSIONS[bare]
    if word and word != "undefined":
        return description.strip()
    return f"group {name}" if name else UNKNOWN


@lru_cache(maxsize=1 << 16)
def collective_of(name: str) -> str:
    """The ledger's collective for the name of a kernel, operator or annotation; "" for any other name."""
    spelled = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    for pattern, word in _COLLECTIVES:
        if pattern.search(spelled):
            return word
    return ""


@lru_cache(maxsize=1 << 10)
def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype as the profiler writes it; 0 for an unknown dtype."""
    return ELEMENT_BYTES.get(re.sub(r"c10::|[\s]", "", dtype.lower()), 0)


def describe(
    profile: Profile, own: Integers, label: Integers, params: Integers, call: Integers
) -> tuple[tuple[Description, ...], Integers]:
    """The distinct descriptions of some collectives, and the index of each collective's. Each is given by four events, -1 for
    none: its own, its label, the event with its `CommParams`, and the call with its shapes."""
    events, comm_params, shapes = profile.events, profile.comm_params, profile.shapes
    if not len(own):
        return (), np.zeros(0, np.int64)
    row, shaped = row_of(comm_params.event, params), row_of(shapes.event, call)
    arguments = (
        comm_params.group, comm_params.description, comm_params.collective, comm_params.dtype, comm_params.ranks,
        comm_params.splits_in, comm_params.elements_in, comm_params.elements_out, comm_params.size,
    )  # fmt: skip
    columns = [
        *(column_at(events.name, event) for event in (own, label, call)),
        column_at(shapes.dims, shaped),
        column_at(shapes.types, shaped),
        *(column_at(column, row) for column in arguments),
    ]
    distinct, which = _distinct(columns)
    texts, named = comm_params.texts, set(column_at(comm_params.group, row).tolist())
    # Asked for where a collective does not name its group.
    alike = _groups_by_axis(profile) if any(at < 0 or not texts[at] for at in named) else {}
    return tuple(_Reader(profile, alike, *line).read() for line in distinct.tolist()), which.reshape(-1)


def _distinct(columns: Sequence[Integers]) -> tuple[Integers, Integers]:
    """The distinct rows of some columns, and each row's. Sorts numbers, which is several times faster than sorting rows."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, at = np.unique(column, return_inverse=True)
        if len(values) > 1:
            key = np.unique(key * len(values) + at.reshape(-1), return_inverse=True)[1].reshape(-1)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return np.stack([column[first] for column in columns], 1), which.reshape(-1)


def _groups_by_axis(profile: Profile) -> dict[str, tuple[str, int]]:
    """Name and size of the group of each axis whose groups all have the same members."""
    members: dict[str, dict[tuple[int, ...], str]] = {}
    for name, group in profile.groups.items():
        members.setdefault(axis_of(group.description, name), {})[group.ranks] = name
    return {axis: (name, len(ranks)) for axis, of in members.items() if len(of) == 1 for ranks, name in of.items()}


@dataclass(slots=True)
class _Reader:
    """One distinct description, before it is read: indices into the profile's tables."""

    profile: Profile
    alike: Mapping[str, tuple[str, int]]
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
    elements_in: int
    elements_out: int
    size: int

    def read(self) -> Description:
        """The description these indices stand for."""
        names = self.profile.events.names
        name = self._text(self.group)
        group = self.profile.groups.get(name)
        own, call = names[self.own], names[self.call] if self.call >= 0 else ""
        # The backend may run another collective than the call, so a kernel's name is the weakest evidence.
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
            name, size = self.alike.get(axis, ("", 0))
        input_bytes = self._input_bytes(collective)
        if not name and size <= 0:
            size = self._size_by_shapes(collective)
        wire = self._wire(collective, size, input_bytes) if input_bytes is not None and size > 0 else None
        if label is not None and labelled:
            wire = _number(label.words[2])
        payload = 0 if input_bytes is None else input_bytes * (size if collective == "all_gather" else 1)
        sized = wire is not None or collective in ("recv", "barrier")
        return Description(axis, collective, name, max(size, 0), float(wire or 0), float(payload), sized)

    def _text(self, at: int) -> str:
        return self.profile.comm_params.texts[at] if at >= 0 else ""

    def _input_bytes(self, collective: str) -> int | None:
        """Bytes of this rank's input, None if unknown."""
        element = element_bytes(self._text(self.dtype)) if self.dtype >= 0 else 0
        sent, received = self.elements_in, self.elements_out
        if element and max(sent, received) > 0:
            return element * (received if collective == "recv" and received > 0 else max(sent, 0) or received)
        return self._input_bytes_by_shapes(collective)

    def _tensors(self) -> list[tuple[int, int]]:
        """Numel and element size of each tensor of the call."""
        dims, types = self.profile.shapes.decode(self.dims), self.profile.shapes.decode(self.types)
        found: list[tuple[int, int]] = []
        for shape, dtype in zip(dims, types, strict=False):
            shapes = shape if shape and isinstance(shape[0], list) else [shape]
            element = element_bytes(str(dtype))  # the type of a list of tensors is not recorded
            if element and all(isinstance(n, int) for one in shapes for n in one):
                found += [(prod(one), element) for one in shapes if one]
        return found

    def _input_bytes_by_shapes(self, collective: str) -> int | None:
        tensors = self._tensors()
        if not tensors:
            return None
        called = self.profile.events.names[self.call]
        # `c10d` operators take the output before the input; annotations have only the input.
        second = called.startswith("c10d::") and collective in CHANGES_SIZE
        if second and len(tensors) < 2:
            return None
        elements, element = tensors[1] if second else tensors[0]
        return elements * element

    def _size_by_shapes(self, collective: str) -> int:
        """Ranks of the group: ratio of output to input for an all-gather or reduce-scatter, else all ranks of the job."""
        tensors = self._tensors()
        if collective in ("all_gather", "reduce_scatter") and len(tensors) >= 2 and self.call >= 0:
            small, large = sorted(elements for elements, _ in tensors[:2])
            return large // small if small else 0
        return 0 if self.profile.groups else max(self.profile.world, 0)

    def _wire(self, collective: str, size: int, input_bytes: int) -> Fraction:
        splits = _numbers(self._text(self.splits)) if collective == "all_to_all" else []
        if len(splits) == size and any(splits):
            index = self._index_in_group()
            if 0 <= index < size:
                return Fraction(input_bytes * (sum(splits) - splits[index]), sum(splits))
        return _wire_bytes(collective, size, input_bytes)

    def _index_in_group(self) -> int:
        group = self.profile.groups.get(self._text(self.group))
        members = list(group.ranks) if group and group.ranks else _numbers(self._text(self.ranks))
        return members.index(self.profile.rank) if self.profile.rank in members else -1


def _numbers(text: str) -> list[int]:
    """The integers of a list as the file writes it; [] if it is truncated or not a list."""
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
