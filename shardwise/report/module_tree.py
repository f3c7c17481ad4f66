"""The modules of a network as readable lines: indented, down to a depth, with numbered siblings of equal cost in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.report import words

HEADS = ("module", "type", "weights", "forward", "backward", "recomp.", "saved", "time", "share", "FLOP/s")
Row = Mapping[str, Any]


@dataclass
class Line:
    """A module, or several identical ones, with its submodules."""

    level: int
    name: str
    kind: str
    parameters: float
    flops: dict[str, float]
    activations: float
    seconds: float
    children: list[Line] = field(default_factory=list)

    def alike(self, other: Line) -> bool:
        """Whether another module costs the same, apart from its time."""
        return (
            (self.kind, self.parameters, self.flops, self.activations)
            == (other.kind, other.parameters, other.flops, other.activations)
            and len(self.children) == len(other.children)
            and all(mine.name == its.name and mine.alike(its) for mine, its in zip(self.children, other.children, strict=True))
        )  # fmt: skip

    def absorb(self, other: Line) -> None:
        """Add an identical module's costs."""
        self.parameters += other.parameters
        self.activations += other.activations
        self.seconds += other.seconds
        self.flops = {name: self.flops[name] + other.flops[name] for name in self.flops}
        for mine, its in zip(self.children, other.children, strict=True):
            mine.absorb(its)

    def cells(self, total: float) -> list[str]:
        """The table cells of the line; `total` is the total seconds."""
        recomputed = sum(amount for name, amount in self.flops.items() if name.startswith("recompute"))
        done = sum(self.flops.values())
        return [
            "  " * self.level + self.name,
            self.kind,
            _or_dot(self.parameters, words.count),
            *(_or_dot(self.flops.get(which, 0.0), short_flops) for which in ("forward", "backward")),
            _or_dot(recomputed, short_flops),
            _or_dot(self.activations, words.size),
            _or_dot(self.seconds, words.seconds),
            _or_dot(self.seconds / total if total else 0.0, words.percent),
            _or_dot(done / self.seconds if self.seconds else 0.0, short_flops),
        ]


def lines(rows: Sequence[Row], depth: int) -> list[Line]:
    """The tree, flattened, down to a depth; modules that cost nothing are left out."""
    found: dict[str, Line] = {}
    roots: list[Line] = []
    for row in rows:
        name = row["module"]
        outside = not name or name.startswith("(")
        above, _, short = ("", "", name) if outside else name.rpartition(".")
        seconds = sum(row["seconds"].values())
        line = Line(
            0, short or row["type"], row["type"], row["parameters"], dict(row["flops"]), row["activations"], seconds
        )
        found[name] = line
        (roots if outside else found[above].children).append(line)
    return [line for root in roots for line in _flat(root, 0, depth)]


def _flat(line: Line, level: int, depth: int) -> list[Line]:
    line.level = level
    costs = line.parameters or line.activations or line.seconds or any(line.flops.values())
    if not costs or level > depth:
        return []
    return [line] + [each for child in _folded(line.children) for each in _flat(child, level + 1, depth)]


def _folded(children: Sequence[Line]) -> list[Line]:
    """Numbered siblings that cost the same, folded into one line: `0-11`."""
    groups: list[tuple[Line, list[str]]] = []
    for child in children:
        last = groups[-1] if groups else None
        if last and child.name.isdigit() and last[1][-1].isdigit() and _one_of(last[0], len(last[1])).alike(child):
            last[0].absorb(child)
            last[1].append(child.name)
        else:
            groups.append((child, [child.name]))
    for line, names in groups:
        line.name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
    return [line for line, _ in groups]


def _one_of(line: Line, count: int) -> Line:
    """The cost of one of `count` identical modules."""
    flops = {name: amount / count for name, amount in line.flops.items()}
    children = [_one_of(child, count) for child in line.children]
    return Line(0, line.name, line.kind, line.parameters / count, flops, line.activations / count, 0.0, children)


def short_flops(amount: float) -> str:
    """FLOPs without the word, for a column of them."""
    return words.flops(amount, "")


def _or_dot(value: float, text: Any) -> str:
    return text(value) if value else "·"
