"""The notebooks of `examples/` run from the first cell to the last, and what they show shows itself."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples/notebooks").glob("*.ipynb"))


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell; gives the value of its last line, where that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.drawn(1)
def test_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    shown = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "notebooks are kept without outputs"
            value = run_cell("".join(cell["source"]), names)
            if value is not None and hasattr(value, "_repr_html_"):
                assert "<" in value._repr_html_()
                shown += 1
    assert shown >= 2
    assert capsys.readouterr().out.strip()


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {"plan", "profile"}
