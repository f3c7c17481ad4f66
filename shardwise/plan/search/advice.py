"""What a search reports besides its ranking: why no layout is legal, why none fits and what would fit, and which single change of a
layout would gain the most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from shardwise.hardware import find_chip
from shardwise.ledger import Memory
from shardwise.plan.cost.job import GIB, job_of
from shardwise.plan.search.screen import Group, Space
from shardwise.plan.search.screened import LayoutIndex
from shardwise.plan.search.simulate import simulate
from shardwise.plan.search.space import Sizes, divisors, with_choices
from shardwise.plan.time.step import prepare, step_time
from shardwise.plan.trainer.memory import memory_of, memory_that_fits
from shardwise.run import Problem, Run, UserError, counted
from shardwise.run.axes import LOOPED, RANK_AXES
from shardwise.run.rules.check import broken_rules

MOST_DEVICES = 200_000
LEANEST = 8
"""Groups whose layout with the least memory is counted to the byte."""
LEAST_GAIN = 0.0005
"""A change that gains less is not called faster: it would be printed as 0.0 %."""
TRIES = 100
"""Device counts tried between one that is too small and one that is enough."""


def counts_of(run: Run, devices: Sequence[int] | None, keep: int, max_microbatch: int) -> tuple[list[int], int]:
    """The device counts to search on, and the devices per node. Raises `UserError` with everything wrong in the arguments."""
    problems: list[Problem] = []
    if devices is not None and not isinstance(devices, Iterable):
        raise UserError(Problem(f"{devices!r} is not a list of numbers of devices", "devices"))
    numbers = [("keep", keep), ("max_microbatch", max_microbatch), *(("devices", count) for count in devices or ())]
    if wrong := [(key, value) for key, value in numbers if not isinstance(value, Integral)]:
        raise UserError(*(Problem(f"{value!r} is not a whole number", key) for key, value in wrong))
    per_node = run.cluster.devices_per_node
    if not run.layout.auto:
        problems.append(Problem('is given; write layout = "auto" to search for one', "layout"))
    try:
        chip = find_chip(run.cluster.chip or "cpu")
        per_node = per_node or chip.devices_per_node
        if run.train.dtype not in chip.peak:
            problems.append(Problem(f"{chip.name} does not compute in {run.train.dtype}; it has {', '.join(chip.peak)}",
                                    "train.dtype"))  # fmt: skip
    except UserError as error:
        problems += [Problem(p.message, p.key or "cluster.chip", p.where) for p in error.problems]
    if keep < 1:
        problems.append(Problem(f"{counted(keep, 'layout')} to keep: it has to be at least 1", "keep"))
    if max_microbatch < 0:
        problems.append(Problem(f"is {max_microbatch}, but has to be at least 0 (no limit)", "max_microbatch"))
    elif max_microbatch and run.train.microbatch:
        what = f"limits what the search chooses, but train.microbatch is given ({run.train.microbatch}): set that to 0 to open it"
        problems.append(Problem(what, "max_microbatch"))
    per_node = per_node or 1
    counts = [run.cluster.nodes * per_node] if devices is None else list(dict.fromkeys(devices))
    if not counts:
        problems.append(Problem("names no number of devices", "devices"))
    for count in counts:
        if count < 1 or (count > per_node and count % per_node):
            what = f"not whole machines of {per_node}: {counted(count, 'device')}"
            problems.append(Problem(what, "devices"))
        elif count > MOST_DEVICES:
            problems.append(
                Problem(f"{count:,} devices are more than the {MOST_DEVICES:,} this search is made for", "devices")
            )
    if problems:
        raise UserError(*problems)
    return counts, per_node


def nothing_legal(run: Run, counts: Sequence[int], per_node: int) -> UserError:
    """Why no layout is legal: the rules that the nearest layout breaks."""
    count = counts[-1]
    broken = min((_broken(run, trial, count, per_node) for trial in _trials(run, count)), key=len, default=[])
    head = f"no layout of {run.name} is legal on {counted(count, 'device')} of {per_node} a machine"
    if run.layout.fixed:
        head += f" with {', '.join(run.layout.fixed)} fixed"
    return UserError(
        Problem(head, "layout"), *(Problem(f"the nearest layout breaks a rule: {b.reason}", b.key) for b in broken)
    )


def _trials(run: Run, count: int) -> Iterator[Sizes]:
    """Sizes that split the devices left by the fixed axes over one or two free axes."""
    lay, fixed = run.layout, run.layout.fixed
    given = {name: getattr(lay, name) if name in fixed else 1 for name in Sizes._fields if name != "microbatch"}
    used = int(np.prod([value for name, value in given.items() if name != "expert"]))
    rest = max(1, count // used)
    free = [name for name in ("shard", "replicate", "tensor", "pipeline", "context") if name not in fixed]
    for one in divisors(rest) if free else [1]:
        for first in free or [""]:
            for second in free or [""]:
                trial = dict(given)
                if first:
                    trial[first] *= one
                    trial[second] *= rest // one
                yield Sizes(**trial, microbatch=run.train.microbatch or 1)


def _broken(run: Run, size: Sizes, count: int, per_node: int) -> list[Any]:
    chosen = {} if "schedule" in run.layout.fixed else {"schedule": "1f1b"}
    return list(broken_rules(with_choices(run, size, chosen, count, per_node)))


def leanest(space: Space) -> list[tuple[Group, LayoutIndex]]:
    """The layout with the least screened memory of each of the `LEANEST` best groups, the least first."""
    found = sorted(((*group.leanest(), group) for group in space.groups), key=lambda one: one[0])
    return [(group, index) for need, index, group in found[:LEANEST] if np.isfinite(need)]


def nothing_there(space: Space) -> str:
    """Why a space has no layout in the result, in a sentence."""
    if not space.count:
        return f"no layout is legal on {counted(space.devices, 'device')}"
    lean, need = _leanest(space)
    return _too_large(lean, need, space.devices)


def _leanest(space: Space) -> tuple[Run, Memory]:
    group, index = leanest(space)[0]
    lean = group.run_at(index)
    return lean, memory_of(lean, job_of(lean))


def _too_large(lean: Run, space: Memory, count: int) -> str:
    sizes = ", ".join(f"{axis} {getattr(lean.layout, axis)}" for axis in RANK_AXES
                      if getattr(lean.layout, axis) > 1)  # fmt: skip
    return (
        f"nothing fits on {counted(count, 'device')}: the leanest layout ({sizes or 'one device'}, zero {lean.layout.zero}, "
        f"recompute {lean.layout.recompute}) needs {space.peak / GIB:.1f} GiB of the {space.capacity / GIB:.1f} that "
        "a device has to spare"
    )


def nothing_fits(run: Run, spaces: Sequence[Space]) -> UserError:
    """What fills the memory of the layout that needs the least, and how many devices would suffice."""
    every = [(*_leanest(one), one) for one in spaces]
    lean, space, where = min(every, key=lambda found: found[1].peak)
    owners = max(space.ranks, key=lambda rank: sum(rank.values()))
    parts = sorted(owners.items(), key=lambda item: -item[1])
    filled = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size >= 0.01 * space.peak)
    enough = smallest_count(run, where.devices, where.per_node)
    hint = (
        f"{counted(enough, 'device')} ({counted(enough // where.per_node, 'machine')}) would do"
        if enough
        else "no number of devices that was tried would do"
    )
    return UserError(
        Problem(_too_large(lean, space, where.devices), "cluster.nodes"),
        Problem(f"that is in GiB: {filled}", "cluster.nodes"),
        Problem(hint, "cluster.nodes"),
    )


def smallest_count(run: Run, above: int, per_node: int) -> int:
    """The fewest devices, in whole nodes, on which the layouts with the least memory fit; 0 where none was found."""
    lean: dict[str, Any] = dict(zero=3, recompute="full", schedule="1f1b", context_method="ring", async_tensor=False)
    free = {name: value for name, value in lean.items() if name not in run.layout.fixed}
    layout = replace(run.layout, **free, fixed=(*run.layout.fixed, *free))
    run = replace(run, layout=layout, train=replace(run.train, microbatch=run.train.microbatch or 1))

    def fits(count: int) -> bool:
        runs = (group.run_at(index) for group, index in leanest(Space(run, count, per_node)))
        return any(memory_of(one, job_of(one)).fits for one in runs)

    low, high = above, 2 * max(above, per_node)
    while high <= MOST_DEVICES and not fits(high):
        low, high = high, 2 * high
    if high > MOST_DEVICES:
        return 0
    step = max(per_node, (high - low) // TRIES // per_node * per_node)
    start = low // per_node * per_node + per_node
    return next((count for count in range(start, high, step) if fits(count)), high)


def next_changes(layouts: Sequence[tuple[Group, LayoutIndex, float]]) -> list[str]:
    """The gain of the best change of one key for each layout, given the seconds of its step. Devices that a smaller axis frees go
    to the data-parallel ranks. Where no fitting change is faster, one that needs up to twice the memory is named, since that is
    what more memory would buy; the sentence on such a change, or on a slower one, says so first."""
    asked: dict[tuple[Group, str, int], list[tuple[int, LayoutIndex, str]]] = {}
    for n, (group, index, _) in enumerate(layouts):
        for there, where, what in _neighbours(group, index):
            asked.setdefault((there, where.schedule, where.chunks), []).append((n, where, what))
    screened: list[list[_Change]] = [[] for _ in layouts]
    for (group, _, _), found in asked.items():
        for (seconds, need), (n, where, what) in zip(evaluate(group, [w for _, w, _ in found]), found, strict=True):
            if need <= 2 * group.space.capacity and np.isfinite(seconds):
                screened[n].append(_Change(seconds, need, group, where, what))
    likely = [_likely(changes) for changes in screened]
    places = dict.fromkeys((one.group, one.layout) for some in likely for one in some)
    simulated: dict[tuple[Group, LayoutIndex], float] = {}
    for space in dict.fromkeys(group.space for group, _ in places):
        here = [place for place in places if place[0].space is space]
        simulated |= zip(here, simulate(here), strict=True)
    every = [[one._replace(seconds=simulated[one.group, one.layout]) for one in some] for some in likely]
    return [_advice(seconds, changes) for (_, _, seconds), changes in zip(layouts, every, strict=True)]


class _Change(NamedTuple):
    """A layout that differs in one key: its step seconds, its screened bytes, and a description of the change."""

    seconds: float
    need: float
    group: Group
    layout: LayoutIndex
    what: str


def _likely(changes: list[_Change]) -> list[_Change]:
    """The two fastest screened changes that may fit, and the fastest of the others."""
    ordered = sorted(changes, key=lambda one: one.seconds)
    fits = [one for one in ordered if one.need <= one.group.space.capacity]
    return [*fits[:2], *[one for one in ordered if one.need > one.group.space.capacity][:1]]


def _advice(seconds: float, changes: list[_Change]) -> str:
    """The sentence for a layout whose step takes `seconds`."""
    ordered = sorted(changes, key=lambda one: one.seconds)
    faster = [one for one in ordered if seconds / one.seconds - 1 >= LEAST_GAIN]
    told = []
    for one in faster:
        run = one.group.run_at(one.layout)
        memory = memory_of(run, job_of(run))
        told.append(sentence(one.what, seconds / one.seconds, memory))
        if memory.fits:
            return told[-1]
    if told:
        return told[0]
    for one in ordered:
        run = one.group.run_at(one.layout)
        return sentence(one.what, seconds / one.seconds, memory_of(run, job_of(run)))
    return ""


def sentence(what: str, gain: float, memory: Memory) -> str:
    """The gain and the memory of a change. If it does not fit or is no faster, the sentence says so first."""
    peak, capacity = memory.peak, memory.capacity
    need = f"needs {peak / GIB:.1f} GiB" + ("" if memory.fits else f", {(peak - capacity) / GIB:.1f} GiB too many")
    same = abs(gain - 1) < LEAST_GAIN
    wrong = [*["does not fit"] * (not memory.fits), *["no faster"] * same, *["slower"] * (gain < 1 and not same)]
    brings = "" if same else f"{100 * (gain - 1):+.1f}%, "
    return f"{' and '.join(wrong)}: {what}: {brings}{need}".removeprefix(": ")


def change_that_fits(run: Run) -> str:
    """For a layout that does not fit, the fastest change of one key that makes it fit; empty where there is none."""
    fitting = []
    for what, changed in _changed(run):
        if not any(broken_rules(changed)) and (memory := memory_that_fits(changed, job := job_of(changed))):
            fitting.append((step_time(prepare(job)).seconds, what, memory))
    if not fitting:
        return ""
    seconds, what, memory = min(fitting, key=lambda one: one[0])
    gain = step_time(prepare(job_of(run))).seconds / seconds
    return f"makes it fit: {what}: {100 * (gain - 1):+.1f}%, needs {memory.peak / GIB:.1f} GiB"


def _changed(run: Run) -> Iterator[tuple[str, Run]]:
    """Runs with one key changed so that a rank holds less, each with its description. Axes grow at the cost of data ranks."""
    lay, micro = run.layout, run.train.microbatch
    keys: list[tuple[str, dict[str, Any]]] = [("zero", dict(zero=n)) for n in range(lay.zero + 1, 4)]
    if lay.recompute != "full":
        keys += [("recompute", dict(recompute=word, recompute_budget=0.0)) for word in ("attention", "full")]
    pairs = [(axis, data) for axis in ("tensor", "context", "pipeline") for data in ("replicate", "shard")]
    for axis, data in (*pairs, ("shard", "replicate")):
        size, spare = getattr(lay, axis), getattr(lay, data)
        keys += [(axis, {axis: size * n, data: spare // n}) for n in divisors(spare)[1:]]
    if run.model.experts:
        keys += [("expert", dict(expert=n)) for n in divisors(run.model.experts) if n > lay.expert]
    for key, values in keys:
        yield f"{key} {getattr(lay, key)} → {values[key]}", replace(run, layout=replace(lay, **values))
    for fewer in divisors(micro)[:-1]:
        yield f"microbatch {micro} → {fewer}", replace(run, train=replace(run.train, microbatch=fewer))


def evaluate(group: Group, indices: list[LayoutIndex]) -> list[tuple[float, float]]:
    """Screened seconds and bytes of layouts of one group and schedule."""
    rows = np.unique([index.row for index in indices])
    where = {row: n for n, row in enumerate(rows.tolist())}
    (one,) = group.screen([indices[0][:2]], rows)
    return [(float(one.seconds[p.method, where[p.row]]), float(one.memory[where[p.row]])) for p in indices]


def _neighbours(group: Group, index: LayoutIndex) -> Iterator[tuple[Group, LayoutIndex, str]]:
    """Layouts that differ in one key, each with a description of the change."""
    space, chosen = group.space, group.choices_at(index)
    size = group.sizes_at(index)
    found = [
        _moved(space, size, chosen, {key: value}, key)
        for key, values in vars(space.choices).items()
        for value in values
    ]
    for schedule, chunks in group.schedules:
        key = "schedule" if schedule != index.schedule else "chunks"
        found.append(_moved(space, size, chosen, dict(schedule=schedule, chunks=chunks), key))
    found += [_moved(space, changed, chosen, {}, key, size) for key, changed in _resized(space, size)]
    # A change that makes no difference leads back to the same index.
    yield from (one for one in found if one is not None and one[:2] != (group, index))


def _resized(space: Space, size: Sizes) -> Iterator[tuple[str, Sizes]]:
    """Sizes that differ in one axis; a data-parallel axis changes to compensate."""
    for key in ("tensor", "context", "pipeline", "shard"):
        for value in space.values(key):
            for other in ("shard", "replicate"):
                whole = getattr(size, key) * getattr(size, other)
                if other != key and whole % value == 0:
                    yield key, size._replace(**{key: value, other: whole // value})
    for key in ("expert", "microbatch"):
        for value in space.values(key):
            yield key, size._replace(**{key: value})


def _moved(
    space: Space, size: Sizes, chosen: dict[str, Any], change: dict[str, Any], key: str, before: Sizes | None = None
) -> tuple[Group, LayoutIndex, str] | None:
    """The group and index of a changed layout and a description of the change, or None where the space does not have it."""
    wanted = chosen | change
    found = space.find(size, wanted)
    if found is None:
        return None
    old, new = (getattr(before, key), getattr(size, key)) if before is not None else (chosen[key], wanted[key])
    of = f" of {wanted['chunks']} chunks" if key == "schedule" and new in LOOPED else ""
    return *found, f"{key} {_word(old)} → {_word(new)}{of}"


def _word(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
