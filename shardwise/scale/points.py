"""Finished runs as points of parameters, tokens and loss; read from CSV files."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.run.problems import Problem, UserError, nearest, unreadable
from shardwise.scale.minimize import Array

FLOPS_PER_TOKEN = 6.0
"""Training FLOPs per parameter and token, forward and backward: C = 6 N D (Kaplan et al. 2020, section 2.1), as all laws here."""
_SHOWN = 8


@dataclass(frozen=True)
class Points:
    """Runs as arrays. `unique` is the tokens of the data set, fewer than `tokens` where a run repeats it."""

    params: Array
    tokens: Array
    loss: Array
    names: tuple[str, ...]
    unique: Array

    @property
    def flops(self) -> Array:
        """FLOPs of training."""
        return FLOPS_PER_TOKEN * self.params * self.tokens

    def __len__(self) -> int:
        return len(self.params)

    def chosen(self, mask: Array | np.ndarray) -> Points:
        """The points where the mask is true, or at these indices."""
        names = tuple(np.array(self.names, dtype=object)[mask])
        return Points(self.params[mask], self.tokens[mask], self.loss[mask], names, self.unique[mask])

    def beside(self, other: Points) -> Points:
        """These points followed by others."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("params", "tokens", "loss", "unique"))
        params, tokens, loss, unique = map(np.concatenate, pairs)
        return Points(params, tokens, loss, self.names + other.names, unique)


def groups(values: Array, apart: float) -> list[np.ndarray]:
    """Groups of indices whose values differ by no more than `apart` in their logarithm, in ascending order."""
    order = np.argsort(values)
    found: list[list[int]] = []
    start = -np.inf
    for at, value in zip(order, np.log(values[order]), strict=True):
        if value > start + apart:
            found.append([])
            start = value
        found[-1].append(int(at))
    return [np.array(group) for group in found]


def make_points(
    params: Sequence[float] | Array,
    tokens: Sequence[float] | Array,
    loss: Sequence[float] | Array,
    names: Sequence[str] | None = None,
    unique: Sequence[float] | Array | None = None,
) -> Points:
    """Points from lists; without names they are numbered from 1."""
    arrays = [np.asarray(values, dtype=np.float64) for values in (params, tokens, loss)]
    named = tuple(names) if names is not None else tuple(f"point {at + 1}" for at in range(len(arrays[0])))
    seen = arrays[1] if unique is None else np.minimum(np.asarray(unique, dtype=np.float64), arrays[1])
    return Points(arrays[0], arrays[1], arrays[2], named, seen)


def read_csv(path: str | Path, loss: str, where: Mapping[str, str], params: str = "params") -> Points:
    """The points of a CSV file: columns `params`, `tokens` or `flops`, and the loss; others name a point or select rows."""
    rows, columns = _rows(Path(path))
    place = str(path)
    problems = [_missing(column, columns, place) for column in (params, loss, *where) if column not in columns]
    if not {"tokens", "flops"} & set(columns):
        problems.append(Problem("has neither a column tokens nor a column flops", where=place))
    if problems:
        raise UserError(*problems)
    chosen = [
        (line, row) for line, row in rows if all((row[key] or "").strip() == value for key, value in where.items())
    ]
    if not chosen:
        wanted = ", ".join(f"{key} = {value}" for key, value in where.items())
        raise UserError(Problem(f"no row has {wanted}{_values(rows, where)}" if where else "has no rows", where=place))
    numbers: dict[str, list[float]] = {}
    for column in (params, "tokens" if "tokens" in columns else "flops", loss, "unique_tokens"):
        if column in columns:
            numbers[column] = [_number(row[column], column, line, place, problems) for line, row in chosen]
    if problems:
        more = [Problem(f"and {len(problems) - _SHOWN} more like these", where=place)] if len(problems) > _SHOWN else []
        raise UserError(*problems[:_SHOWN], *more)
    size = np.array(numbers[params])
    tokens = (
        np.array(numbers["tokens"]) if "tokens" in numbers else np.array(numbers["flops"]) / (FLOPS_PER_TOKEN * size)
    )
    names = [(row.get("name") or "").strip() or f"line {line}" for line, row in chosen]
    return make_points(size, tokens, numbers[loss], names, numbers.get("unique_tokens"))


def _rows(path: Path) -> tuple[list[tuple[int, dict[str, str]]], list[str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [column.strip() for column in reader.fieldnames or []]
            reader.fieldnames = columns
            return [(reader.line_num, row) for row in reader], columns
    except OSError as e:
        raise unreadable(e, where=path) from None
    except (UnicodeDecodeError, csv.Error) as e:
        raise UserError(Problem(f"is not a CSV file of UTF-8 text: {e}", where=str(path))) from None


def _missing(column: str, columns: Sequence[str], place: str) -> Problem:
    known = nearest(column, columns) or f"; there are {', '.join(columns)}" if columns else ""
    return Problem(f'has no column "{column}"{known}', where=place)


def _values(rows: Sequence[tuple[int, dict[str, str]]], where: Mapping[str, str]) -> str:
    """The values of a column in which the wanted value was not found."""
    for key, value in where.items():
        found = sorted({(row[key] or "").strip() for _, row in rows})
        if value not in found:
            return f"; {key} is {', '.join(found[:_SHOWN])}{' …' if len(found) > _SHOWN else ''}"
    return ""


def _number(text: str | None, column: str, line: int, place: str, problems: list[Problem]) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        problems.append(Problem(f'line {line}: {column} is "{text or ""}", not a number above 0', where=place))
    return value
