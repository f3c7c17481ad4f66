"""Every line of `mended.md` names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_line_has_its_test() -> None:
    lines = (TESTS / "mended.md").read_text().splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| ") and "`" in line]
    assert len(rows) > 40
    for met, held in rows:
        file = None
        for path, name in re.findall(r"`(?:([\w/]+\.py)(?:::)?)?(test_\w+)?`", held):
            if path:
                file = TESTS / path if not path.startswith("benchmarks/") else TESTS.parent / path
                assert file.exists(), (met, path)
            if name:
                assert file is not None, met
                assert re.search(rf"^def {name}\(", file.read_text(), re.M), (met, name)
        assert file is not None, met
