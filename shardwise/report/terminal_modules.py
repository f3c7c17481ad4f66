"""The cost of each module of a network, as a tree in the terminal. Layers of equal cost are one row; the JSON has all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shardwise.report import words
from shardwise.report.module_tree import short_flops

ROOT = "model"
Row = Mapping[str, Any]


def merged(ranks: Sequence[Sequence[Row] | None], chosen: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of some ranks, usually one per pipeline stage, merged into one network."""
    found: dict[str, dict[str, Any]] = {}
    for rank in chosen:
        for row in ranks[rank] or ():
            before = found.get(row["module"])
            found[row["module"]] = dict(row) if before is None else _sum([before, row])
    names = sorted(found, key=lambda name: _order(name, list(found)))
    return [found[name] for name in names]


def _order(name: str, known: list[str]) -> tuple[Any, ...]:
    """Sort key: the network first, its layers by number, phases of the step last; otherwise in the given order."""
    if name.startswith("("):
        return 2, known.index(name)
    first, _, rest = name.partition(".")
    number = int(rest.split(".")[0]) if first == "layers" and rest else -1
    place = {ROOT: 0, "embed": 1, "positions": 2, "embed_norm": 3, "layers": 4, "norm": 5, "head": 6}.get(first, 4)
    return (0 if name == ROOT else 1), place, number, known.index(name)


def _sum(rows: Sequence[Row]) -> dict[str, Any]:
    total: dict[str, Any] = {"module": rows[0]["module"]}
    for key in ("parameters", "held", "activations"):
        total[key] = sum(row[key] for row in rows)
    for key in ("flops", "seconds"):
        names = dict.fromkeys(name for row in rows for name in row[key])
        total[key] = {name: sum(row[key].get(name, 0.0) for row in rows) for name in names}
    return total


def folded(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows, with layers of equal cost summed into one."""
    layers: dict[str, list[Row]] = {}
    for row in rows:
        parts = row["module"].split(".")
        if parts[0] == "layers" and len(parts) > 1:
            layers.setdefault(parts[1], []).append(row)
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for layer, inside in layers.items():
        kind = tuple((row["module"].split(".", 2)[2:], row["parameters"], str(row["flops"])) for row in inside)
        kinds.setdefault(tuple(map(str, kind)), []).append(layer)
    result, done = [], set()
    for row in rows:
        parts = row["module"].split(".")
        if parts[0] != "layers" or len(parts) == 1:
            result.append(dict(row))
            continue
        alike = next(group for group in kinds.values() if parts[1] in group)
        if alike[0] not in done and parts[1] == alike[0]:
            done.add(alike[0])
            for at in range(len(layers[alike[0]])):
                whole = _sum([layers[layer][at] for layer in alike])
                rest = ".".join(whole["module"].split(".")[2:])
                whole["module"] = f"layers.{_span(alike)}" + (f".{rest}" if rest else "")
                result.append(whole)
    return result


def _span(layers: Sequence[str]) -> str:
    """Abbreviated layer numbers: 0-3, or 0,2,5."""
    numbers = [int(layer) for layer in layers]
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    shown = [str(number) for number in numbers[:3]]
    return ",".join(shown + (["…"] if len(numbers) > 3 else []))


def module_table(rows: Sequence[Row], peak: float, depth: int = 4) -> Table:
    """The tree, indented by depth; each row includes its submodules."""
    table = Table(box=None, pad_edge=False, header_style="dim", collapse_padding=True)
    table.add_column("module", no_wrap=True)
    for head in ("weights", "forward", "recompute", "backward", "saved", "time", "share", "FLOP/s", "of peak"):
        table.add_column(head, justify="right", no_wrap=True)
    total = sum(_seconds(row) for row in rows if row["module"] == ROOT or row["module"].startswith("("))
    for row in rows:
        level = 0 if row["module"] == ROOT or row["module"].startswith("(") else row["module"].count(".") + 1
        level -= row["module"].startswith("layers.")
        # `layers` itself is a list, not a module that runs; other modules may cost nothing.
        costs = row["parameters"] or row["activations"] or any(row["flops"].values()) or _seconds(row)
        if row["module"] != "layers" and level < depth and costs:
            name = row["module"] if level < 2 else row["module"].rpartition(".")[2]
            cells = _cells(row, total, peak)
            table.add_row(Text("  " * level + name, style="" if level else "bold"), *cells)
    return table


def _cells(row: Row, total: float, peak: float) -> list[Text]:
    flops, seconds = row["flops"], _seconds(row)
    backward = flops.get("backward_input", 0.0) + flops.get("backward_weight", 0.0)
    speed = sum(flops.values()) / seconds if seconds else 0.0
    return [
        _or_dot(row["parameters"], words.count),
        *(_or_dot(flops.get(which, 0.0), short_flops) for which in ("forward", "recompute")),
        _or_dot(backward, short_flops),
        _or_dot(row["activations"], words.size),
        _or_dot(seconds, words.seconds),
        _or_dot(seconds / total if total else 0.0, words.percent),
        _or_dot(speed, short_flops),
        _or_dot(speed / peak if peak else 0.0, words.percent),
    ]


def _seconds(row: Row) -> float:
    return sum(row["seconds"].values())


def _or_dot(value: float, text: Callable[[float], str]) -> Text:
    return Text(text(value)) if value else Text("·", style="dim")
