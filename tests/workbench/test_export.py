"""The workbench as a file: opened from disk it knows the neighbourhood of its run, and asks nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chromium import CHROMIUM, browser

from shardwise.cli.main import main
from shardwise.workbench.answer import answer
from shardwise.workbench.question import base_of

KEYS = ["model.preset=llama3-8b", "cluster.chip=h100", "cluster.nodes=1", "layout.shard=8"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.drawn(group="browser")
def test_an_exported_page_plans_from_disk(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["workbench", *(f"--{key}" for key in KEYS), "--export", str(file)]) == 0
    assert file.stat().st_size < 1_000_000
    base = base_of(None, KEYS)

    def expected(changes: dict[str, str]) -> float:
        return answer(base, changes).best.account.step_seconds

    with browser() as page:
        page.viewport(1366, 900)
        page.open(file.as_uri())

        def turned(key: str, value: str) -> float:
            page.js(
                f"(() => {{ const e = document.getElementById({json.dumps(key)}); e.value = {json.dumps(value)}; "
                "e.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
            page.until("!document.getElementById('results').dataset.asking")
            return page.js("JSON.parse(document.querySelector('[data-quantity=step_seconds]').dataset.value)")

        assert turned("layout.zero", "1") == expected({"layout.zero": "1"})
        # Each change by itself: the one before is taken back.
        assert turned("layout.recompute", "full") == expected({"layout.recompute": "full"})
        assert page.js("document.getElementById('layout.zero').value") == "3"
        before = turned("train.dtype", "bfloat16")
        assert turned("model.preset", "gpt2-355m") == before
        assert "plans around its run" in page.js("document.getElementById('problems').textContent")
        page.js("document.querySelector('[data-action=reset]').click()")
        page.until("document.querySelectorAll('.chip').length && document.querySelectorAll('#ranking .use').length")
        page.js("document.querySelector('#ranking .use').click()")
        page.until("!document.getElementById('results').dataset.asking")
        assert page.js("document.getElementById('problems').textContent") == ""
        assert not page.complaints
        assert not [each for each in page.requests if not each.startswith(("file:", "data:", "about:", "blob:"))]
