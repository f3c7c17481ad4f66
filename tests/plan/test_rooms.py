"""The rooms of `plan/` stand on each other: none imports one above it, or one beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import shardwise.plan

FLOORS = {"cost": 0, "trainer": 1, "time": 2, "plan": 3, "search": 4, "serving": 4, "published": 5}


def test_no_room_imports_upward() -> None:
    root = Path(shardwise.plan.__file__).parent
    rooms = set()
    for path in root.rglob("*.py"):
        room = path.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("shardwise.plan."):
                other = module.split(".")[2]
                assert other == room or FLOORS[other] < FLOORS[room], f"{path.name} imports {module}"
                rooms.add(room)
    assert rooms == set(FLOORS)
