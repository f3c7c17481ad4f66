"""A measured profile of this machine, as `shardwise bench` writes it, and how it corrects the catalogue.

Each measured point has a factor: measured over modelled time. A shape that was not measured takes the factors of the nearest
measured ones, weighted by the distance of their log sizes. So the model sets the form, and the measurements set the level.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.run.problems import Problem, UserError, nearest, unreadable

LAYER = ("hidden", "ffn", "heads", "kv_heads", "head_dim")
"""The sizes that identify a dense layer."""
# The fields of each kind of point: sizes, labels, and `seconds`.
SIZES = {
    "gemm": ("m", "n", "k"),
    "grouped": ("tokens", "n", "k", "experts"),
    "memory": ("bytes",),
    "elementwise": ("bytes",),
    "collective": ("bytes", "size"),
    "attention": ("batch", "heads", "queries", "keys", "head_dim"),
    "decode": ("sequences", "keys", *LAYER),
    "prompt": ("prompts", "tokens", "keys", *LAYER),
    "mixed": ("sequences", "keys", "prompts", "tokens", *LAYER),
    "pick": ("rows", "hidden", "vocab"),
}
LABELS = {
    "gemm": ("dtype",),
    "grouped": ("dtype",),
    "memory": (),
    "elementwise": ("operation", "direction", "dtype"),
    "collective": ("operation",),
    "attention": ("kernel", "direction", "dtype", "causal"),
    "decode": ("weights",),
    "prompt": ("weights",),
    "mixed": ("weights",),
    "pick": ("weights",),
}
VERSION = 2
NEIGHBOURS = 4
# Shapes are corrected in slices of this many, to keep the table of distances small.
SLICE = 50_000


@dataclass(frozen=True)
class Profile:
    """Measured points by kind, each a dict of sizes, labels and `seconds`; and the machine they were measured on."""

    gemm: tuple[dict[str, Any], ...] = ()
    grouped: tuple[dict[str, Any], ...] = ()
    memory: tuple[dict[str, Any], ...] = ()
    elementwise: tuple[dict[str, Any], ...] = ()
    collective: tuple[dict[str, Any], ...] = ()
    attention: tuple[dict[str, Any], ...] = ()
    # Of the serving engine: seconds of a layer in a decode step, with `keys` keys per sequence; seconds of a layer in a
    # prefill step, with `tokens` tokens per prompt and `keys` keys including earlier ones; seconds of a layer in a step with
    # both; and seconds from the last layer to the sampled tokens.
    decode: tuple[dict[str, Any], ...] = ()
    prompt: tuple[dict[str, Any], ...] = ()
    mixed: tuple[dict[str, Any], ...] = ()
    pick: tuple[dict[str, Any], ...] = ()
    machine: str = ""  # the name its maker or driver uses
    chip: str = ""  # its name in the catalogue
    torch: str = ""
    date: str = ""
    threads: float = 0  # PyTorch threads on a CPU
    kernel_seconds: float = 0  # of a tiny operation, many launched back to back
    launch: float = 0  # host seconds for each kernel that the planner counts in a training step; 0: not measured
    overhead: float = 0  # host seconds of a training step besides launches
    layer_overhead: float = 0  # and per layer of a rank, once a step: its optimizer
    device_bytes: float = 0  # memory of the device as its driver reports it
    library_bytes: float = 0  # of these, taken by the driver, kernel code and CUDA graphs once an engine is ready
    serve_step: float = 0  # host seconds of a decode step
    serve_sequence: float = 0  # and per sequence
    serve_mixed: float = 0  # host seconds of a step with prompts
    serve_layer: float = 0  # and per layer, which is launched kernel by kernel
    serve_token: float = 0  # and per prompt token
    serve_arrive: float = 0  # seconds from a client to the engine and back, over HTTP
    serve_error: float = 0  # relative error of the plan of a load on a network whose shape was not measured
    to_host_gbs: float = 0  # GB/s from the device to pinned host memory, and back
    to_device_gbs: float = 0
    host_update_gbs: float = 0  # GB/s that the host's threads read and write while they update optimizer state
    disk_gbs: float = (
        0  # GB/s of the disk of the working directory, the mean of writing and reading a file, past the page cache
    )
    _factors: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed once and cached."""
        if key not in self._factors:
            self._factors[key] = make()
        return self._factors[key]

    def points(self, kind: str, labels: tuple[Any, ...]) -> list[dict[str, Any]]:
        """The points of a kind with these labels."""
        return self.once(
            (kind, labels),
            lambda: [p for p in getattr(self, kind) if tuple(p[label] for label in LABELS[kind]) == labels],
        )

    def measures(self, kind: str, dtype: str) -> bool:
        """Whether there are points of a kind in this dtype."""
        return any(point["dtype"] == dtype for point in getattr(self, kind))

    def factor(
        self, kind: str, labels: tuple[Any, ...], subject: Any, sizes: tuple[Any, ...], model: Callable[..., Any]
    ) -> Any:
        """Measured over modelled time at `sizes`, where `model(subject, *sizes)` is the modelled time of a chip or cluster without
        its profile; 1 where nothing was measured."""
        plain = replace(subject, profile=None)
        places, logs = self.once((kind, labels, plain), lambda: self._measured(kind, labels, partial(model, plain)))
        if not len(logs):
            return 1.0
        shape = np.broadcast_shapes(*(np.shape(size) for size in sizes))
        flat = [np.broadcast_to(np.log2(np.maximum(size, 1.0)), shape).ravel() for size in sizes]
        wanted = np.stack(flat, axis=-1)
        slices = [_interpolate(places, logs, wanted[at : at + SLICE]) for at in range(0, len(wanted), SLICE)]
        return np.exp(np.concatenate(slices)).reshape(shape)

    def _measured(self, kind: str, labels: tuple[Any, ...], model: Callable[..., Any]) -> tuple[Any, Any]:
        if not (points := self.points(kind, labels)):
            return np.zeros((0, 0)), np.zeros(0)
        sizes = [np.array([float(p[name]) for p in points]) for name in SIZES[kind]]
        seconds = np.array([float(p["seconds"]) for p in points])
        return np.log2(np.stack(sizes, axis=-1)), np.log(seconds / model(*sizes))


# The keys of a profile besides its points.
TEXTS = tuple(f.name for f in fields(Profile) if f.type == "str")
NUMBERS = tuple(f.name for f in fields(Profile) if f.type == "float")
KEYS = (*TEXTS, *NUMBERS, *SIZES)


def _interpolate(places: Any, logs: Any, wanted: Any) -> Any:
    """The logarithm of the factor at `wanted`: the mean of the nearest points, weighted by the inverse square of distance."""
    distance = ((wanted[:, None, :] - places[None, :, :]) ** 2).sum(axis=-1)
    count = min(NEIGHBOURS, len(logs))
    near = np.argpartition(distance, count - 1, axis=1)[:, :count]
    weight = 1.0 / (np.take_along_axis(distance, near, axis=1) + 1e-6)
    return (weight * logs[near]).sum(axis=1) / weight.sum(axis=1)


def load_profile(path: str | Path) -> Profile:
    """Reads a profile; all its problems are reported at once."""
    where = str(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(Problem("there is no such profile; `shardwise bench` writes one", where=where)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(error, where=where) from None
    except (ValueError, RecursionError) as error:  # Python reads no integer of more than 4,300 digits
        raise UserError(Problem(f"is not JSON: {error}", where=where)) from None
    if not isinstance(content, dict):
        raise UserError(Problem("has to be one JSON object", where=where))
    version = content.pop("version", VERSION)
    if version != VERSION:
        reason = f"is {version!r}, but this version of Shardwise reads {VERSION}; measure again with `shardwise bench`"
        raise UserError(Problem(reason, "version", where))
    problems = [Problem(f"unknown key{nearest(key, KEYS)}", key, where) for key in content if key not in KEYS]
    for kind in SIZES:
        problems += _check(kind, content.get(kind, []), where)
    problems += [Problem("has to be a text", key, where) for key in TEXTS if not isinstance(content.get(key, ""), str)]
    problems += [
        Problem("has to be a number, 0 or above", key, where) for key in NUMBERS if not _number(content.get(key, 0))
    ]
    if not problems and not any(content.get(kind) for kind in SIZES):
        problems.append(Problem("holds no measurements; `shardwise bench` makes them", where=where))
    if problems:
        raise UserError(*problems)
    values: dict[str, Any] = {key: tuple(value) if key in SIZES else value for key, value in content.items()}
    return Profile(**values)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def dump_profile(profile: Profile) -> dict[str, Any]:
    """The profile as `load_profile` reads it."""
    return {"version": VERSION} | {key: getattr(profile, key) for key in KEYS}


def _check(kind: str, points: Any, where: str) -> list[Problem]:
    """The problems of the points of one kind."""
    if not isinstance(points, list):
        return [Problem("has to be a list of points", kind, where)]
    problems = []
    for index, point in enumerate(points):
        key = f"{kind}[{index}]"
        if not isinstance(point, dict):
            problems.append(Problem("has to be an object", key, where))
            continue
        for name in (*SIZES[kind], "seconds"):
            value = point.get(name)
            if not _number(value) or value == 0:
                problems.append(Problem("has to be a number above 0", f"{key}.{name}", where))
        problems += [Problem("is missing", f"{key}.{label}", where) for label in LABELS[kind] if label not in point]
    return problems
