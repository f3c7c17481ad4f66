"""A small corpus of all sorts of documents, and a recipe with every kind of step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from data_prepare import write_split

RECIPE = """
[[sources]]
name = "web"
paths = ["a.jsonl", "b.jsonl"]

[[sources]]
name = "more"
paths = ["c.jsonl"]
weight = 0.5

[[steps]]
kind = "gopher_repetition"
[[steps]]
kind = "gopher_quality"
[[steps]]
kind = "exact"
[[steps]]
kind = "c4_quality"
[[steps]]
kind = "fineweb_quality"
[[steps]]
kind = "minhash"
[[steps]]
kind = "privacy"
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with 300 documents in three files, and the recipe."""
    write_split(tmp_path / "corpus", 300, 3)
    for path in (tmp_path / "corpus").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def written() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a prepared folder, but for the two that name the folder."""

    def read(folder: Path) -> dict[str, bytes]:
        found = {}
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if path.is_file() and path.name != "plan.json" and name != "data.toml":
                found[name] = path.read_bytes()
        return found

    return read
