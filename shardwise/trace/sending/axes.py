"""Whose traffic a message is, and which collective: from what programs write into a profile.

An axis is told by a label of this project's trainer, or else by the description of the process group: this project's words,
the dimensions of a DeviceMesh (torchtitan, FSDP) or Megatron's names. What is neither keeps the group's own name, since a
guess would blame the wrong axis. Collectives have many spellings; here they get those of the ledger.
"""

from __future__ import annotations

import re

from shardwise.ledger import AXIS_OF

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")

WORLD = "world"
"""The group of all ranks that every program has."""

UNKNOWN = "unknown"
"""Traffic of which the profile names no group."""

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
"""Names of mesh dimensions and of Megatron's groups, without the words every one of them has, to axes. Megatron's
distributed optimizer shards over its data group, but copies are what that group is for."""

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
"""Bytes of an element, by the profiler's spellings in small letters and without blanks."""


def axis_of(description: str, name: str = "") -> str:
    """The axis of a process group; where its description is none that is known, what the program called it."""
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
    """The ledger's word for a collective in a kernel's, an operator's or an annotation's name; "" when it is none."""
    spelled = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    for pattern, word in _COLLECTIVES:
        if pattern.search(spelled):
            return word
    return ""


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a type as the profiler writes it; 0 when it is not known."""
    return ELEMENT_BYTES.get(re.sub(r"c10::|[\s]", "", dtype.lower()), 0)
