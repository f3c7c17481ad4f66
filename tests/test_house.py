"""The house stands: every folder imports only what lies on a floor below its own, no modules import each other in a circle, what
plans and explains needs no torch, and no file is too long to read. All of it is read from the source; nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shardwise"
FLOORS: list[list[str]] = [
    ["files", "labels", "ledger", "schedules", "run", "torch_private"],
    ["hardware", "data", "model", "trace", "report", "scale"],
    ["plan"],
    ["parallel"],
    ["checkpoint"],
    ["train", "serve", "quantize"],
    ["tune", "launch", "evaluate", "workbench"],
    ["measure"],
    ["cli"],
    ["api"],
    ["__main__"],
]
"""From the ground up, as the map in CONTRIBUTING; folders that do not exist yet may stand here."""
ROOMS: list[list[str]] = [
    ["cost"],
    ["trainer"],
    ["time"],
    ["plan"],
    ["serving"],
    ["as_program", "search"],
    ["figures"],
    ["published", "budget"],
]
"""The rooms of `plan/`, from the ground up; `plan`, `as_program` and `figures` are files."""
WITHOUT_TORCH = (
    "files",
    "labels",
    "ledger",
    "run",
    "schedules",
    "plan",
    "hardware",
    "data",
    "trace",
    "report",
    "scale",
    "launch",
    "workbench",
)
LONGEST = 400


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, the package's own left out."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        words = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        if name:
            found[name] = path
    return found


@cache
def imports(name: str) -> list[tuple[str, bool | None]]:
    """What a module imports, and whether it imports it as soon as it is imported itself; None: it only names it, in a string."""
    path = modules()[name]
    found: list[tuple[str, bool | None]] = []

    def target(base: str, part: str) -> str:
        whole = f"{base}.{part}"
        return whole if whole.removeprefix("shardwise.") in modules() else base

    def walk(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            found.extend((target(node.module or "", alias.name), top) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # has no import in it
                continue
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
            walk(child, top and not later and not typing)

    tree = ast.parse(path.read_text())
    walk(tree, True)
    words = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return found + [(word, None) for word in words if word.startswith("shardwise.") and word[10:] in modules()]


def inside(name: str) -> Iterator[tuple[str, bool | None]]:
    """Modules of this package that a module imports."""
    for target, top in imports(name):
        if target.startswith("shardwise."):
            yield target.removeprefix("shardwise."), top


def level(floors: list[list[str]], folder: str) -> int:
    return next(number for number, names in enumerate(floors) if folder in names)


def test_every_folder_has_a_floor() -> None:
    known = {folder for floor in FLOORS for folder in floor}
    assert {name.split(".")[0] for name in modules()} <= known
    rooms = {name.split(".")[1] for name in modules() if name.startswith("plan.")}
    assert rooms <= {room for floor in ROOMS for room in floor}


def upward() -> dict[str, set[str]]:
    """Imports of another folder on the same floor or above, at whatever moment; on the ground floor all may use all."""
    found: dict[str, set[str]] = {}
    for name in modules():
        for target, _ in inside(name):
            own, other = name.split("."), target.split(".")
            if own[0] != other[0]:
                wrong = level(FLOORS, other[0]) >= max(1, level(FLOORS, own[0]))
            elif own[0] == "plan" and len(own) > 1 and len(other) > 1 and own[1] != other[1]:
                wrong = level(ROOMS, other[1]) >= level(ROOMS, own[1])
            else:
                continue
            if wrong:
                found.setdefault(name, set()).add(target)
    return found


def test_nothing_is_imported_from_above() -> None:
    assert not upward()


def imported_with(*names: str) -> set[str]:
    """These modules and all that they import as soon as they are imported themselves."""
    found, new = set[str](), set(names)
    while new:
        found |= new
        new = {target for name in new if name in modules() for target, top in inside(name) if top} - found
    return found


def test_the_command_that_starts_ranks_imports_nothing_that_trains() -> None:
    """The fork server imports that meanwhile, for seconds."""
    found = imported_with("train.processes.check", "train.processes.launch", "tune.source", "train.faults.agent")
    assert "run.config" in found
    assert not found & {"train.step", "train.loop", "parallel.apply", "parallel.shard"}


def test_what_reads_weights_starts_without_device_meshes_and_the_compiler() -> None:
    """They take seconds to import, which a server, `generate` and `convert` would wait for."""
    found = imported_with("checkpoint.weights")
    assert "parallel.inference" in found
    assert not found & {"parallel.mesh", "parallel.tensor", "parallel.overlap"}
    heavy = ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed.fsdp", "torch._inductor")
    assert not {name for name in found for target, top in imports(name) if top and target.startswith(heavy)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """At whatever moment, and be it for their types alone."""
    graph = {name: {target for target, top in inside(name) if top is not None and target != name} for name in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(" -> ".join(e.args[1]))


def test_what_plans_and_explains_needs_no_torch() -> None:
    found = {
        name: target
        for name in modules()
        if name.split(".")[0] in WITHOUT_TORCH
        for target, _ in imports(name)
        if target.split(".")[0] == "torch"
    }
    assert not found


def test_the_package_does_not_patch_itself() -> None:
    assert not [name for name in modules() for target, _ in imports(name) if target.startswith("unittest")]


def test_no_file_is_too_long_to_read() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}


def test_the_map_of_contributing_has_every_folder_on_its_floor() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (.+?) \|", (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = {name: int(floor) for floor, names in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", names)}
    there = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    wanted = {name: floor for floor, names in enumerate(FLOORS, 1) for name in names if name in there or floor == 1}
    assert shown == wanted
