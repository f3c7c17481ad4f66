"""Selects what reports show of an explained profile, once for terminal and page: rows sorted by cost, per step and rank, with
identical layers summed.

The explanation is plain data (`ledger.as_dict` of `trace.answers.Explanation`): times in nanoseconds, ranks as keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from shardwise.ledger import CATEGORIES
from shardwise.report import words
from shardwise.report.pick import ordered
from shardwise.run.axes import AXES
from shardwise.run.problems import counted

Explained = Mapping[str, Any]
_LAYER = re.compile(r"\b(layers|h|blocks?)\.(\d+)\b")


def steps_of(explained: Explained, ranks: Iterable[int]) -> int:
    """Number of steps of these ranks, added up; without steps the full window of a rank counts as one."""
    counts, usual = explained.get("step_counts", {}), max(1, len(explained["steps"]))
    return max(1, sum(counts.get(rank, usual) for rank in ranks))


def per_step(explained: Explained, ranks: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Quantities of each rank, as the mean of its steps."""
    steps = {rank: steps_of(explained, [rank]) for rank in ranks}
    return {rank: {name: value / steps[rank] for name, value in row.items()} for rank, row in ranks.items()}


def slowest(explained: Explained) -> int:
    """The slowest rank; the first of several equally slow ones."""
    spans = {rank: row["span"] / steps_of(explained, [rank]) for rank, row in explained["ranks"].items()}
    return min(spans, key=lambda rank: (-spans[rank], rank), default=0)


def share(explained: Explained, name: str) -> float:
    """Mean over the ranks of one activity's share of the time."""
    parts = [row[name] / row["span"] for row in explained["ranks"].values() if row["span"]]
    return fmean(parts) if parts else 0.0


def figures(explained: Explained) -> list[tuple[str, str, str]]:
    """The key numbers."""
    profiled, world, steps = explained["seen"], explained["world"], explained["steps"]
    numbers = ", ".join(map(str, steps[:6])) + (" …" if len(steps) > 6 else "")
    devices = sorted({name for name in explained["devices"].values() if name})
    lost = share(explained, "exposed_communication") + share(explained, "idle")
    axes = axis_rows(explained)
    most = max(axes, key=lambda row: row.exposed, default=None)
    causes = idle_by_cause(explained)
    seen = f"step{'s' * (len(steps) > 1)} {numbers}" if steps else "the whole file"
    found = [
        ("step", words.seconds(explained["step_time"] / 1e9),
         f"rank {slowest(explained)}, the slowest; {seen}"),
        ("ranks", f"{len(profiled)} of {world}" if world else str(len(profiled)), ", ".join(devices) or "host only"),
        ("compute", words.percent(share(explained, "compute")), "of the time, mean of the ranks"),
        ("exposed comms", words.percent(share(explained, "exposed_communication")),
         f"most of it {most.axis} {most.collective.replace('_', ' ')}" if most and most.exposed else "none"),
        ("idle", words.percent(share(explained, "idle")),
         f"most of it: {max(causes, key=lambda name: causes[name])}" if any(causes.values()) else "none"),
        ("exposed or idle", f"{words.digits(lost * max(world, len(profiled)) * 24)} h",
         "of device time per day, all ranks"),
    ]  # fmt: skip
    used = explained["flops"]["utilisation"]
    if used:
        found.append(("MFU", words.percent(fmean(used.values())), _known_flops(explained)))
    peaks = [(curve["peak"], rank) for rank, curves in explained["memory"].items() for curve in curves]
    if peaks:
        peak, rank = max(peaks)
        found.append(("memory", words.size(peak), f"peak allocated, rank {rank}"))
    return found


def _known_flops(explained: Explained) -> str:
    """The MFU's FLOP convention, and the fraction of kernel time whose FLOPs are known."""
    flops = explained["flops"]
    known = fmean(flops["known"].values()) if flops.get("known") else 1.0
    if known > 0.995:
        return str(flops["convention"])
    missing = f"knows {words.percent(known)} of the time of GEMMs and attention; the rest has no shapes and counts as 0"
    return f"{missing}; {flops['convention']}"


def categories(explained: Explained) -> dict[int, dict[str, int]]:
    """Time of each rank in the ledger's categories; they add up to its span."""
    known = ordered(
        (name for row in explained["categories"].values() for name, took in row.items() if took), CATEGORIES
    )
    return {rank: {name: row.get(name, 0) for name in known} for rank, row in explained["categories"].items()}


@dataclass(frozen=True)
class AxisRow:
    """Communication of one axis and collective in a step, mean over the ranks that took part."""

    axis: str
    collective: str
    ranks: int
    messages: float
    bytes: float
    seconds: float
    exposed: float
    waiting: float
    """Share of its summed time spent waiting for the last rank to arrive."""
    bandwidth: float
    """Bus bandwidth in bytes per second, without waiting; 0 if sizes are unknown."""


def axis_rows(explained: Explained) -> list[AxisRow]:
    """Communication by axis and collective, in the order of the axes."""
    rows = []
    for each in explained["axes"]:
        ranks = list(each["ranks"].values())
        if not ranks:
            continue
        total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        divisor = steps_of(explained, each["ranks"])
        rows.append(
            AxisRow(
                each["axis"], each["collective"], len(ranks), total["messages"] / divisor, total["bytes"] / divisor,
                total["time"] / divisor / 1e9, total["exposed"] / divisor / 1e9,
                total["wait"] / total["summed"] if total["summed"] else 0.0,
                total["bytes"] * 1e9 / total["timed"] if total["timed"] else 0.0,
            )
        )  # fmt: skip
    places = {axis: at for at, axis in enumerate(ordered((row.axis for row in rows), AXES))}
    return sorted(rows, key=lambda row: (places[row.axis], -row.exposed, row.collective))


def most_exposed(rows: Sequence[AxisRow], most: int) -> list[AxisRow]:
    """At most `most` rows, those with the most exposed time, in their original order."""
    chosen = {id(row) for row in sorted(rows, key=lambda row: (-row.exposed, -row.seconds))[:most]}
    return [row for row in rows if id(row) in chosen]


def idle_by_cause(explained: Explained) -> dict[str, float]:
    """Idle seconds per step by cause, mean of the ranks, longest first."""
    rows, steps = list(explained["idle"].values()), steps_of(explained, explained["idle"])
    names = dict.fromkeys(name for row in rows for name in row)
    means = {name: sum(row.get(name, 0) for row in rows) / steps / 1e9 for name in names}
    return dict(sorted(((name, value) for name, value in means.items() if value), key=lambda pair: -pair[1]))


@dataclass(frozen=True)
class ModuleRow:
    """Device time of a module, or summed over the modules of one name in several layers: per step, mean of the ranks."""

    name: str
    layers: int
    passes: Mapping[str, float]
    share: float
    kernels: float
    speed: float
    """FLOP/s while its kernels ran; 0 if shapes are unknown."""

    @property
    def seconds(self) -> float:
        """Seconds of all passes."""
        return sum(self.passes.values())


def module_rows(explained: Explained) -> list[ModuleRow]:
    """Modules by device time, longest first."""
    folded: dict[str, list[Mapping[str, Any]]] = {}
    for row in explained["modules"]["rows"]:
        folded.setdefault(_LAYER.sub(r"\1.*", row["module"]), []).append(row)
    divisor = steps_of(explained, explained["seen"])
    everything = sum(sum(row["passes"].values()) for row in explained["modules"]["rows"]) or 1
    found = []
    for name, rows in folded.items():
        passes = {key: sum(row["passes"].get(key, 0) for row in rows) for key in rows[0]["passes"]}
        took, flops = sum(passes.values()), sum(row["flops"] for row in rows)
        found.append(
            ModuleRow(
                name, len(rows), {key: value / divisor / 1e9 for key, value in passes.items()}, took / everything,
                sum(row["kernels"] for row in rows) / divisor, flops * 1e9 / took if took else 0.0,
            )
        )  # fmt: skip
    return sorted(found, key=lambda row: -row.seconds)


_NOISE = re.compile(
    r"\bvoid\s+|\b(?:at::native|at::detail|at|c10|std|cutlass::gemm::kernel|thrust::cuda_cub|cub|internal)::"
    r"|\((?:anonymous namespace|lambda)\)::|\(anonymous namespace\)|(?<=>)\s+(?=>)"
)


def short_kernels(names: Sequence[str], most: int) -> list[str]:
    """Names of kernels without namespaces and parameters, each of at most `most` characters. Different names stay different: their
    common part is left out, else they are numbered."""
    plain = [_plain_kernel(name) for name in names]
    found = [words.shortened(name, most) for name in plain]
    alike: dict[str, dict[str, int]] = {}
    for name, full, short in zip(names, plain, found, strict=True):
        alike.setdefault(short, {}).setdefault(full if len(full) > most else name, len(alike[short]))
    for at, (name, full, short) in enumerate(zip(names, plain, found, strict=True)):
        group = alike[short]
        if len(group) > 1:
            found[at] = _told_apart(full if full in group else name, list(group), most)
    taken: dict[str, dict[str, int]] = {}
    for at, (name, short) in enumerate(zip(names, found, strict=True)):
        number = taken.setdefault(short, {}).setdefault(name, len(taken[short]))
        if number:
            mark = f" #{number + 1}"
            found[at] = words.shortened(short, most - len(mark)) + mark
    return found


def _plain_kernel(name: str) -> str:
    """The name without namespaces and, outside of templates, without parameters."""
    plain = _NOISE.sub("", name)
    return plain.split("(")[0] if "<" not in plain.split("(")[0] else plain


def _told_apart(name: str, others: Sequence[str], most: int) -> str:
    """The beginning of a name, then the part from just before the first character that differs from another name."""
    differs = max((_common(name, other) for other in others if other != name), default=0)
    head = most // 3
    room = most - head - 1
    begin = max(head, min(differs - 4, len(name) - room))
    part = name[begin:]
    return name[:head] + ("…" if begin > head else "") + (part if len(part) <= room else part[: room - 1] + "…")


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def memory_curves(explained: Explained, most: int = 8) -> list[tuple[int, Mapping[str, Any]]]:
    """One curve for each of the ranks with the highest peaks."""
    chosen = [
        (rank, max(curves, key=lambda curve: curve["peak"])) for rank, curves in explained["memory"].items() if curves
    ]
    return sorted(sorted(chosen, key=lambda pair: -pair[1]["peak"])[:most], key=lambda pair: pair[0])


def pipeline_of(explained: Explained) -> Mapping[str, Any] | None:
    """The pipeline and step with the largest bubble."""
    return max(explained["pipelines"], key=bubble_share, default=None)


def executed(explained: Explained, step: Mapping[str, Any]) -> tuple[str, str]:
    """A step's schedule, ranks and microbatches in words, and the range of the bubble over pipelines and steps."""
    shares = sorted(map(bubble_share, explained["pipelines"]))
    ranks, microbatches = counted(len(step["ranks"]), "rank"), counted(step["microbatches"], "microbatch")
    name = f"{step['schedule'] or 'an unknown schedule'}, {ranks}, {microbatches}"
    return name, f"{words.percent(shares[0])} to {words.percent(shares[-1])}"


def bubble_share(step: Mapping[str, Any]) -> float:
    """The share of the ranks' time that is bubble."""
    total = step["window"] * len(step["ranks"])
    return sum(rank["bubble"] for rank in step["ranks"].values()) / total if total else 0.0


def remarks(explained: Explained) -> list[str]:
    """Remarks on stragglers, clocks, and what the profiles lack."""
    found = [
        f"rank {each['rank']} is a straggler ({each['reason']}): {words.seconds(each['excess'] / 1e9)} a step, "
        f"{words.percent(each['share'])}; {each['evidence']}"
        for each in explained["stragglers"]
    ]
    moved = {rank: clock["offset"] for rank, clock in explained["clocks"].items() if clock["offset"]}
    if moved:
        far = max(moved, key=lambda rank: abs(moved[rank]))
        length = words.seconds(abs(moved[far]) / 1e9)
        found.append(f"clocks of {len(moved)} ranks were aligned with the others, rank {far} by the most: {length}")
    return [*found, *explained["unseen"]]
