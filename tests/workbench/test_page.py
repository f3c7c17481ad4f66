"""The workbench in a real browser: its parts, by mouse and by keyboard; nothing leaves the machine. That it shows what
is planned is in test_shown_runs.py."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import pytest
from base_runs import BASE, CHOICES
from chromium import CHROMIUM, Browser, browser
from hands import settled
from served import Served, served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def bench() -> Iterator[Served]:
    with served("workbench", *(f"--{key}" for key in BASE)) as page:
        yield page


@pytest.fixture(scope="module")
def page(bench: Served) -> Iterator[Browser]:
    with browser() as found:
        found.viewport(1366, 900)
        found.open(bench.address)
        yield found
        assert not found.complaints
        hosts = {urlsplit(each).netloc for each in found.requests if not each.startswith(("data:", "blob:", "about:"))}
        assert hosts == {f"127.0.0.1:{bench.port}"}


def change(page: Browser, keys: dict[str, str]) -> None:
    """Turn controls, back to the first run and on from there."""
    page.js("document.querySelector('[data-action=reset]').click()")
    settled(page)
    for key, value in keys.items():
        page.js(
            f"(() => {{ const e = document.getElementById({json.dumps(key)}); "
            f"if (e.type === 'checkbox') e.checked = {json.dumps(value)} === 'true'; else e.value = {json.dumps(value)}; "
            "e.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
    settled(page)


def shown(page: Browser) -> dict[str, Any]:
    """What each marked element of the plan says, by path."""
    return page.js(
        "Object.fromEntries(Array.from(document.querySelectorAll('#results [data-quantity]'), "
        "(e) => [e.dataset.quantity, JSON.parse(e.dataset.value)]))"
    )


def test_controls_work_by_keyboard_and_mouse(bench: Served, page: Browser) -> None:
    change(page, {})
    page.js("document.getElementById('layout.shard').focus()")
    page.press("ArrowUp", 38)
    settled(page)
    assert page.js("location.hash") == "#layout.shard=16"
    page.press("Tab", 9)  # to the slider beside it
    assert page.js("document.activeElement.type + document.activeElement.dataset.key") == "rangelayout.shard"
    page.press("ArrowRight", 39)
    settled(page)
    assert page.js("document.getElementById('layout.shard').value") == "32"
    page.click("[id='layout.async_tensor']")
    settled(page)
    assert "layout.async_tensor=true" in page.js("location.hash")
    page.click("[data-key='layout.tensor'][type=range]")
    settled(page)
    assert page.js("document.getElementById('layout.tensor').value") == "8"  # the middle of 1 to 64
    # The address holds the view.
    before = shown(page)
    page.open("about:blank", "true")
    page.open(bench.address + "#layout.shard=32&layout.async_tensor=true&layout.tensor=8")
    settled(page)
    assert shown(page) == before


def test_the_timeline_follows_the_numbers(page: Browser) -> None:
    for pipeline, label in (("2", "Timeline, 2 ranks"), ("1", "Timeline, 1 rank")):
        change(page, {"layout.pipeline": pipeline})
        page.until(
            f"(document.querySelector('#timeline canvas') || document.body).getAttribute('aria-label') === '{label}'"
        )


def test_a_mistake_is_a_sentence_beside_its_control(page: Browser) -> None:
    change(page, {"layout.tensor": "3"})
    assert "3" in page.js("document.getElementById('problems').textContent")
    assert page.js("document.querySelector('.row.wrong [data-key]').dataset.key").startswith(
        ("layout.", "model.", "train.")
    )


@pytest.mark.parametrize(("width", "dark"), [(360, True), (768, False), (2560, True)])
def test_it_fits_every_screen(page: Browser, width: int, dark: bool) -> None:
    change(page, {})
    page.viewport(width, 900, dark)
    assert page.js("document.documentElement.scrollWidth") <= width
    page.viewport(1366, 900)


@pytest.mark.parametrize(
    "dark",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.large("faults of contrast in the dark; the small tier looks in the light")
        ),
    ],
)
def test_everybody_can_use_it(page: Browser, dark: bool) -> None:
    change(page, {})
    page.viewport(1366, 900, dark)
    page.js(files("axe_core_python").joinpath("axe.min.js").read_text("utf-8") + "; 0")
    found = page.js("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
    grave = [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in found if v["impact"] in ("serious", "critical")]
    assert not grave
    page.viewport(1366, 900)


def test_every_choice_of_the_drawn_runs_is_a_control(page: Browser) -> None:
    keys = page.js("Array.from(document.querySelectorAll('[data-key]'), (e) => e.dataset.key)")
    assert set(CHOICES) <= set(keys)


@pytest.mark.drawn(group="browser")
def test_a_chip_is_a_change_and_layouts_stand_side_by_side(bench: Served, page: Browser) -> None:
    change(page, {})
    page.click("[data-action=pin]")
    page.until("document.querySelectorAll('.chip').length && !document.querySelector('#changes.late')")
    before = shown(page)["step_seconds"]
    page.click(".chip:not(.over)")
    settled(page)
    page.until("!document.querySelector('#changes.late')")
    after = page.js("JSON.parse(document.querySelector('#figures [data-quantity=step_seconds]').dataset.value)")
    assert after < before
    # The kept layout and the new one, and both in the address.
    both = "Array.from(document.querySelectorAll('#compared [data-quantity=step_seconds]'), (e) => JSON.parse(e.dataset.value))"
    assert page.js(both) == [before, after]
    assert "pin=" in page.js("location.hash")
    address = page.js("location.href")
    page.open("about:blank", "true")
    page.open(address)
    settled(page)
    page.until("document.querySelectorAll('#compared [data-quantity=step_seconds]').length === 2")
    assert page.js(both) == [before, after]
    page.until("document.querySelectorAll('#ranking .use').length")
    best = page.js("document.querySelector('#ranking .use').getAttribute('aria-label')")
    page.click("#ranking .use")
    settled(page)
    assert "Use " + page.js("document.getElementById('headline').textContent") == best
    page.js("location.hash = ''")
    settled(page)


@pytest.mark.drawn(group="browser")
def test_a_search_that_another_tab_ends_is_told(bench: Served, page: Browser) -> None:
    """It said "Searching…" for ever."""
    change(page, {"model.preset": "llama3-405b", "cluster.nodes": "1024"})
    remark = "document.querySelector('#ranking .remark').textContent"
    page.until(f"{remark}.startsWith('Searching')")
    bench.ask("/api/ranking", {"changes": {"train.global_batch": "0"}})
    page.until(f"{remark}.startsWith('Another tab')")
    change(page, {})  # what was found for these keys before is asked for again
    page.until(f"{remark}.includes('layouts of this model')")


def test_the_mesh_tells_what_a_rank_holds(page: Browser) -> None:
    change(page, {})
    page.js("document.getElementById('mesh').scrollIntoView()")
    page.until("document.querySelector('#mesh .held').textContent.includes('Rank 0')")
    page.js("document.querySelector('#mesh canvas').focus()")
    page.press("ArrowRight", 39)
    told = page.js("document.querySelector('#mesh .held').textContent")
    assert "Rank 1, machine 0" in told
    assert "part 2 of 4 of each matrix" in told
    for shift in itertools.count():  # the page may still be scrolling when the mouse gets there
        x, y = page.middle("#mesh canvas")
        page.move(x + shift % 5, y)
        if page.js("!document.querySelector('#mesh .held').textContent.includes('Rank 1,')"):
            break
        assert shift < 1000, page.complaints


def test_files_and_pictures_are_downloaded(page: Browser) -> None:
    change(page, {})
    for action, end in (("run", ".toml"), ("page", ".html"), ("picture", ".png")):
        page.js(f"document.querySelector('[data-action={action}]').click()")
        page.until(f"document.getElementById('said').textContent === 'run{end} is downloaded'")
