"""A measured profile of this machine, as `shardwise bench` writes it, and how it corrects the catalogue.

Each measured point gives a factor: measured over modelled time. A shape that was not measured takes the factors of the
nearest measured ones, weighted by distance in the logarithm of its sizes, so the model's form stays and its level is this
machine's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.run.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from shardwise.hardware.chips import Chip
    from shardwise.hardware.cluster import Cluster

# What each kind of point holds: numbers that are sizes, then words, then `seconds`.
SIZES = {
    "gemm": ("m", "n", "k"),
    "memory": ("bytes",),
    "collective": ("bytes", "size"),
    "attention": ("batch", "heads", "queries", "keys", "head_dim"),
}
WORDS = {
    "gemm": ("dtype",),
    "memory": (),
    "collective": ("operation",),
    "attention": ("kernel", "direction", "dtype", "causal"),
}
NEIGHBOURS = 4
# Shapes are corrected in slices of this many, to keep the table of distances small.
SLICE = 50_000


@dataclass(frozen=True)
class Profile:
    """Measured points by kind, each a dict of sizes, words and `seconds`; and what was measured."""

    gemm: tuple[dict[str, Any], ...] = ()
    memory: tuple[dict[str, Any], ...] = ()
    collective: tuple[dict[str, Any], ...] = ()
    attention: tuple[dict[str, Any], ...] = ()
    machine: str = ""
    _factors: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def gemm_factor(self, chip: Chip, m: Any, n: Any, k: Any, dtype: str, count: Any = 1) -> Any:
        """What the measured products say about one; many products in a kernel count as one of as many more rows."""
        from shardwise.hardware.gemm import gemm_seconds

        plain = replace(chip, profile=None)
        sizes = (np.multiply(m, count), n, k)
        return self._factor("gemm", (dtype,), plain, sizes, lambda m, n, k: gemm_seconds(plain, m, n, k, dtype))

    def memory_factor(self, chip: Chip, bytes: Any) -> Any:
        """What the measured copies say about one."""
        from shardwise.hardware.bandwidth import memory_seconds

        plain = replace(chip, profile=None)
        return self._factor("memory", (), plain, (bytes,), lambda moved: memory_seconds(plain, moved))

    def attention_factor(
        self,
        chip: Chip,
        batch: Any,
        heads: Any,
        queries: Any,
        keys: Any,
        head_dim: Any,
        causal: bool,
        kernel: str,
        direction: str,
        dtype: str,
    ) -> Any:
        """What the measured attention kernels say about one."""
        from shardwise.hardware.attention import attention_seconds

        plain = replace(chip, profile=None)
        return self._factor(
            "attention",
            (kernel, direction, dtype, causal),
            plain,
            (batch, heads, queries, keys, head_dim),
            lambda *each: attention_seconds(plain, *each, None, causal, kernel, direction, dtype),  # type: ignore
        )

    def collective_factor(self, cluster: Cluster, operation: str, bytes: Any, size: Any, stride: Any = 1) -> Any:
        """What the measured collectives say about one. They were measured inside a machine: a group that leaves it is
        not corrected."""
        from shardwise.hardware.collectives import collective_seconds

        plain = replace(cluster, profile=None)
        factor = self._factor(
            "collective",
            (operation,),
            plain,
            (bytes, size),
            lambda moved, ranks: collective_seconds(plain, operation, moved, ranks),  # type: ignore[arg-type]
        )
        return np.where(cluster.spans(size, stride) > 1, 1.0, factor)

    def _factor(
        self, kind: str, words: tuple[Any, ...], subject: Any, sizes: tuple[Any, ...], model: Callable[..., Any]
    ) -> Any:
        """Measured over modelled time at `sizes`, for the chip or cluster `subject` that `model` is of."""
        key = (kind, words, subject)
        if key not in self._factors:
            self._factors[key] = self._measured(kind, words, model)
        places, logs = self._factors[key]
        if not len(logs):
            return 1.0
        shape = np.broadcast_shapes(*(np.shape(size) for size in sizes))
        flat = [np.broadcast_to(np.log2(np.maximum(size, 1.0)), shape).ravel() for size in sizes]
        asked = np.stack(flat, axis=-1)
        pieces = [_interpolate(places, logs, asked[at : at + SLICE]) for at in range(0, len(asked), SLICE)]
        return np.exp(np.concatenate(pieces)).reshape(shape)

    def _measured(self, kind: str, words: tuple[Any, ...], model: Callable[..., Any]) -> tuple[Any, Any]:
        points = [p for p in getattr(self, kind) if tuple(p[word] for word in WORDS[kind]) == words]
        if not points:
            return np.zeros((0, 0)), np.zeros(0)
        sizes = [np.array([float(p[name]) for p in points]) for name in SIZES[kind]]
        seconds = np.array([float(p["seconds"]) for p in points])
        return np.log2(np.stack(sizes, axis=-1)), np.log(seconds / model(*sizes))


def _interpolate(places: Any, logs: Any, asked: Any) -> Any:
    """The logarithm of the factor at `asked`: that of the nearest places, weighted by the inverse square of distance."""
    distance = ((asked[:, None, :] - places[None, :, :]) ** 2).sum(axis=-1)
    count = min(NEIGHBOURS, len(logs))
    near = np.argpartition(distance, count - 1, axis=1)[:, :count]
    weight = 1.0 / (np.take_along_axis(distance, near, axis=1) + 1e-6)
    return (weight * logs[near]).sum(axis=1) / weight.sum(axis=1)


def load_profile(path: str | Path) -> Profile:
    """Read a profile; everything wrong with it is said at once."""
    where = str(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(Problem("there is no such profile; `shardwise bench` writes one", where=where)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"cannot be read: {error}", where=where)) from None
    except json.JSONDecodeError as error:
        raise UserError(Problem(f"is not JSON: {error}", where=where)) from None
    if not isinstance(content, dict):
        raise UserError(Problem("has to be one JSON object", where=where))
    known = [f.name for f in fields(Profile) if not f.name.startswith("_")]
    problems = [Problem(f"unknown key{nearest(key, known)}", key, where) for key in content if key not in known]
    for kind in SIZES:
        problems += _check(kind, content.get(kind, []), where)
    if not isinstance(content.get("machine", ""), str):
        problems.append(Problem("has to be a name", "machine", where))
    if problems:
        raise UserError(*problems)
    kinds: dict[str, Any] = {kind: tuple(content.get(kind, [])) for kind in SIZES}
    return Profile(**kinds, machine=content.get("machine", ""))


def _check(kind: str, points: Any, where: str) -> list[Problem]:
    """What is wrong with the points of one kind."""
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
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                problems.append(Problem("has to be a number above 0", f"{key}.{name}", where))
        problems += [Problem("is missing", f"{key}.{word}", where) for word in WORDS[kind] if word not in point]
    return problems
