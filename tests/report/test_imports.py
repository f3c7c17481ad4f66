"""The report stands on the ledger, the figures of a load, the axes and the words of messages alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import shardwise.report

ALLOWED = {
    "shardwise.ledger",
    "shardwise.run.axes",
    "shardwise.run.problems",
    "shardwise.schedules.serving.figures",
}


def test_the_report_imports_only_what_stands_below_it() -> None:
    for path in Path(shardwise.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                top = name.split(".")[0]
                own = name in ALLOWED or name.startswith("shardwise.report")
                assert own or top in sys.stdlib_module_names or (top == "rich" and path.stem.startswith("terminal")), (
                    path,
                    name,
                )
