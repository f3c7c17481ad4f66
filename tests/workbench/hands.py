"""A person at the workbench: controls are turned with the mouse and with keys alone, as Chromium gets them from a hand."""

from __future__ import annotations

import json
from typing import Literal

from chromium import Browser

By = Literal["mouse", "keyboard"]
CONTROL = 2


def settled(page: Browser) -> None:
    """Wait for the answer to the last question."""
    page.until("!document.getElementById('results').dataset.asking")


def shown_value(page: Browser, key: str) -> str:
    """What the control of a key shows, as a command line would write it."""
    return page.js(
        f"(() => {{ const e = document.getElementById({json.dumps(key)}); "
        "return e.type === 'checkbox' ? String(e.checked) : e.value; })()"
    )


def turn(page: Browser, key: str, value: str, by: By, slider: bool = False) -> bool:
    """Give a control a value by hand; whether it had another before, so that the page heard of it."""
    place = f"[id='{key}']"
    unfold(page, place, by)
    kind = page.js(f"document.querySelector({json.dumps(place)}).type")
    if slider:
        return _slide(page, key, value, by)
    if kind == "checkbox":
        return _toggle(page, key, value, by)
    if kind == "select-one":
        return _choose(page, key, value, by)
    if by == "mouse":
        page.click_at(*reached(page, place), 3)  # all of it is selected
    else:
        tab_to(page, place)
        page.call("Input.dispatchKeyEvent", type="keyDown", key="a", modifiers=CONTROL, commands=["selectAll"])
        page.call("Input.dispatchKeyEvent", type="keyUp", key="a", modifiers=CONTROL)
    before = shown_value(page, key)
    if not value:
        page.press("Delete", 46)
    for letter in value:
        page.press(letter, ord(letter.upper()) if letter.isalnum() else 0, letter)
    assert shown_value(page, key) == value, f"{key} shows {shown_value(page, key)} after {value} was typed by {by}"
    return bool(value or before)


def _toggle(page: Browser, key: str, value: str, by: By) -> bool:
    place, turned = f"[id='{key}']", False
    for _ in range(5):  # an answer that arrives meanwhile may turn it too
        if shown_value(page, key) == value:
            return turned
        if by == "mouse":
            page.click_at(*reached(page, place))
        else:
            tab_to(page, place)
            page.press(" ", 32, " ")
        turned = True
    raise AssertionError(f"{key} is not turned to {value} by {by}")


def _choose(page: Browser, key: str, value: str, by: By) -> bool:
    """A click opens the list of options; its rows are a window of the browser's own, which the arrow keys walk through."""
    place = f"[id='{key}']"
    if shown_value(page, key) == value:
        return False
    if by == "mouse":
        page.click_at(*reached(page, place))
    else:
        tab_to(page, place)
    options = page.js(f"Array.from(document.querySelector({json.dumps(place)}).options, (each) => each.value)")
    assert value in options, f"{key} does not offer {value}"
    if by == "mouse":
        page.until(f"document.querySelector({json.dumps(place)}).matches(':open')")
    step = options.index(value) - options.index(shown_value(page, key))
    for _ in range(abs(step)):
        page.press(*(("ArrowDown", 40) if step > 0 else ("ArrowUp", 38)))
    if by == "mouse":
        page.press("Enter", 13, "\r")
    assert shown_value(page, key) == value, f"{key} shows {shown_value(page, key)}; {value} was chosen by {by}"
    return step != 0  # an answer that arrived meanwhile may have brought the value


def _slide(page: Browser, key: str, value: str, by: By) -> bool:
    place = f"[data-key='{key}'][type=range]"
    element = f"document.querySelector({json.dumps(place)})"
    values = page.js(f"{element}.dataset.values").split(",")
    wanted, now = values.index(value), int(page.js(f"{element}.value"))
    if now == wanted:
        return False
    if by == "mouse":
        x, y = reached(page, place)
        width, thumb = page.js(f"{element}.clientWidth"), 16
        places = [x + (width - thumb) * (at / (len(values) - 1) - 0.5) for at in (now, wanted)]
        page.drag(places[0], places[1], y)
    else:
        tab_to(page, place)
        for _ in range(abs(wanted - now)):
            page.press(*(("ArrowRight", 39) if wanted > now else ("ArrowLeft", 37)))
    assert page.js(f"{element}.value") == str(wanted), f"the slider of {key} is not moved to {value} by {by}"
    assert shown_value(page, key) == value
    return True


def unfold(page: Browser, place: str, by: By) -> None:
    """Open the section that a control is folded into, if it is."""
    if page.js(f"document.querySelector({json.dumps(place)}).checkVisibility()"):
        return
    summary = f"details:has({place}) > summary"
    if by == "mouse":
        page.click_at(*reached(page, summary))
    else:
        tab_to(page, summary)
        page.press("Enter", 13, "\r")
    page.until(f"document.querySelector({json.dumps(place)}).checkVisibility()")


def reached(page: Browser, place: str) -> tuple[float, float]:
    """The middle of an element, where the mouse meets it and nothing that covers it."""
    x, y = page.middle(place)
    element = f"document.querySelector({json.dumps(place)})"
    assert page.js(
        f"(() => {{ const e = {element}, met = document.elementFromPoint({x}, {y}); return e === met || e.contains(met); }})()"
    ), f"{place}: the mouse meets another element"
    return x, y


def tab_to(page: Browser, place: str) -> None:
    """Come to an element with the tabulator, from the one before it."""
    page.js(
        "(() => { const all = Array.from(document.querySelectorAll('input, select, button, summary, a[href], canvas[tabindex]'))"
        f".filter((e) => e.checkVisibility() && !e.disabled), e = document.querySelector({json.dumps(place)}); "
        "const before = all[all.indexOf(e) - 1]; if (before) before.focus(); else document.activeElement.blur(); })()"
    )
    page.press("Tab", 9)
    assert page.js(f"document.activeElement === document.querySelector({json.dumps(place)})"), f"{place}: Tab misses it"


def push(page: Browser, place: str, by: By) -> None:
    """A button."""
    if by == "mouse":
        page.click_at(*reached(page, place))
    else:
        tab_to(page, place)
        page.press("Enter", 13, "\r")
