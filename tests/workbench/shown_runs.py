"""What the workbench shows of random runs beside what `shardwise plan --json` prints of them: 300 runs are turned by mouse and by
keys, at all widths, in the light and in the dark, and every number, message and control is compared.

    python tests/workbench/shown_runs.py [--runs 300] [--seed 7] [--seconds S] [--out FILE] [--only CASE …]

`--out` records each run (`tests/chaos/recorded.py`), and one that the file has is not turned again. Only what is wrong is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(each) for each in (HERE.parents[1], HERE.parent, HERE, HERE.parent / "chaos")]

from chromium import Browser, browser  # noqa: E402
from hands import By, push, settled, shown_value, turn  # noqa: E402
from random_runs import BASES, KEYS, another_value, campaign, given_of  # noqa: E402
from served import Served, served  # noqa: E402

from shardwise.cli.main import main as command  # noqa: E402
from shardwise.workbench.controls import SLIDERS, value_at  # noqa: E402

WIDTHS = (360, 480, 768, 1024, 1366, 1920, 2560)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1,
         "min": 60, "h": 3600, "days": 86400, "k": 1e3, "M": 1e6, "T": 1e12, "%": 0.01}  # fmt: skip
STATE = """(() => {
  const text = (place) => Array.from(document.querySelectorAll(place), (e) => e.textContent);
  return {
    quantities: Array.from(document.querySelectorAll("#results [data-quantity]"),
      (e) => [e.dataset.quantity, JSON.parse(e.dataset.value), e.textContent, !!e.closest("#compared")]),
    controls: Array.from(document.querySelectorAll("form [data-key]"), (e) => [e.dataset.key, e.type,
      e.type === "checkbox" ? String(e.checked) : e.type === "range" ? e.dataset.values.split(",")[e.value] : e.value,
      e === document.activeElement]),
    problems: text("#problems p"),
    hash: location.hash.slice(1),
    wide: document.documentElement.scrollWidth,
  };
})()"""


class Page:
    """A page of the workbench that began with a run."""

    def __init__(self, base: str, bench: Served, page: Browser) -> None:
        self.arguments, self.bench, self.page = BASES[base], bench, page
        self.file = next((each for each in self.arguments if not each.startswith("--")), None)
        self.beside = dict(each[2:].split("=", 1) for each in self.arguments if each.startswith("--"))
        self.given = given_of(base).given
        self.touched: set[str] = set()

    def set(self, changes: dict[str, str], source: random.Random, anew: bool) -> dict[str, str]:
        """Turn the controls, with the mouse and with keys in turn; gives what the page was told. `anew`: a control that shows the
        value already gets another."""
        push(self.page, "[data-action=reset]", source.choice(["mouse", "keyboard"]))
        settled(self.page)
        told: dict[str, str] = {}
        hasty = source.random() < 0.5
        for at, (key, value) in enumerate(changes.items()):
            by: By = "mouse" if at % 2 else "keyboard"
            slides = key in SLIDERS and value in map(str, SLIDERS[key]) and source.random() < 0.5
            if not hasty:
                settled(self.page)
            if anew and shown_value(self.page, key) == value:
                value = another_value(KEYS[key], value)
            if turn(self.page, key, value, by, slides):
                told[key] = value
                self.touched.add(key)
        settled(self.page)
        return {key: value for key, value in told.items() if self.given.get(key) != value}

    def compare(self, told: dict[str, str], width: int) -> str:
        """What differs between the page and the command, or nothing; raises what else is wrong with the page."""
        state = self.page.js(STATE)
        assert dict(parse_qsl(state["hash"], keep_blank_values=True)) == told, (state["hash"], told)
        assert state["wide"] <= width, f"{state['wide']} pixels wide in a window of {width}"
        keys = self.keys(told)
        beside = keys if self.file is None or "model.preset" in told else self.beside | told
        code, plan, errors = printed(beside, self.file_for(told))
        if code == 2:
            return _messages(state["problems"], errors) or _asked(state["controls"], told)
        if state["problems"]:
            return f"the command plans it; the page says {state['problems']}"
        return _quantities([each for each in state["quantities"] if not each[3]], plan) or _resolved(
            state["controls"], plan["run"]
        )

    def keys(self, told: dict[str, str]) -> dict[str, str]:
        """Every key of the run: another preset brings its own network along."""
        kept = {k: v for k, v in self.given.items() if not ("model.preset" in told and k.startswith("model."))}
        return kept | told

    def file_for(self, told: dict[str, str]) -> str | None:
        return None if "model.preset" in told else self.file

    def command(self, by: By) -> dict[str, str]:
        """The keys of the command that the page gives."""
        push(self.page, "[data-action=command]", by)
        text = self.page.until("globalThis.copied || document.getElementById('said').textContent")
        words = shlex.split(text)
        assert words[:2] == ["shardwise", "plan"], text
        return dict(each.removeprefix("--").split("=", 1) for each in words[2:])


@contextlib.contextmanager
def opened(base: str, page: Browser) -> Iterator[Page]:
    """A workbench that begins with one of the bases, in a browser."""
    with served("workbench", *BASES[base]) as bench:
        page.open(bench.address)
        # What a button copies is kept for whoever reads it: a browser without a window has no clipboard.
        page.js("navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }; 0")
        yield Page(base, bench, page)
        page.open("about:blank", "true")  # it asks nothing more
        assert not page.complaints, page.complaints
        hosts = {urlsplit(each).netloc for each in page.requests if not each.startswith(("data:", "blob:", "about:"))}
        assert hosts == {f"127.0.0.1:{bench.port}"}, hosts
        page.requests.clear()


def printed(keys: dict[str, str], file: str | None) -> tuple[int, Any, list[str]]:
    """Exit code, JSON and messages of `shardwise plan`."""
    out, err = io.StringIO(), io.StringIO()
    arguments = [*([file] if file else []), "--json", *(f"--{key}={value}" for key, value in keys.items())]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command(["plan", *arguments])
    return code, json.loads(out.getvalue()) if code < 2 else None, err.getvalue().splitlines()


def at_path(content: Any, path: str) -> Any:
    """The value at a path such as memory.stages[0].parameters."""
    for name in re.findall(r"[^.\[\]]+", path):
        content = content[int(name)] if isinstance(content, list) else content[name]
    return content


def _messages(shown: list[str], printed: list[str]) -> str:
    """Each message of the command is on the page, with its key."""
    plain = [re.sub(r"^(shardwise: )?(error: )?", "", line) for line in printed if line.strip()]
    if len(shown) != len(plain):
        return f"{len(shown)} messages shown, {len(plain)} printed: {shown} {plain}"
    for page, line in zip(shown, plain, strict=True):
        if page.partition(": ")[2] not in line and page not in line:
            return f"shown {page!r}, printed {line!r}"
    return ""


def _quantities(shown: list[list[Any]], plan: Any) -> str:
    """Every marked number is that of the command, in its value and in the text that people read; none of importance is missing."""
    paths = [path for path, *_ in shown]
    needed = {"step_seconds", "memory.peak", "mfu", "tokens_per_s", "cost.usd", "devices"}
    needed |= {f"breakdown.{name}" for name, taken in plan["breakdown"].items() if taken > 1e-6 * plan["step_seconds"]}
    needed |= {
        f"traffic.{axis}.{name}" for axis, each in plan["traffic"].items() if isinstance(each, dict) for name in each
    }
    if missing := needed - set(paths):
        return f"not shown: {sorted(missing)}"
    for path, value, text, _ in shown:
        if at_path(plan, path) != value:
            return f"{path} is {at_path(plan, path)!r}, shown as {value!r}"
        if isinstance(value, str):
            if not value.startswith(text) and (value or text != "custom"):
                return f"{path} is {value!r}, its text {text!r}"
        elif not _reads(path, float(value), text):
            return f"{path} is {value!r}, its text {text!r}"
    return ""


def _reads(path: str, value: float, text: str) -> bool:
    """Whether a text says a number, as exactly as it has digits."""
    if text == "\u2013":
        return value == 0
    if text == "<0.1%":
        return 0 < value < 0.001
    found = re.fullmatch(r"(\$)?([\d,]+(?:\.(\d+))?)\s?(\S*)( .*)?", text)
    if found is None:
        return False
    dollars, number, decimals, unit, rest = found.groups()
    scale = UNITS.get(unit, 1e9 if unit == "B" and (dollars or rest) else 1)
    if unit == "B" and (dollars or (rest or "").endswith("/s")):
        scale = 1e9
    if path.startswith("memory.stages"):
        scale = 2**30
    if path == "cost.days":
        value *= 86400
    apart = abs(float(number.replace(",", "")) * scale - value)
    return apart <= (0.51 * 10 ** -len(decimals or "")) * scale + 1e-9 * abs(value)


def _resolved(controls: list[list[Any]], run: dict[str, Any]) -> str:
    """Every control shows the run that was planned, but for the one that is being turned."""
    for key, kind, value, active in controls:
        wanted = value_at(run, key)
        if kind == "range":
            known = [str(each) for each in SLIDERS[key] if each <= float(wanted)]
            wanted = known[-1] if known else str(SLIDERS[key][0])
        if not active and value != wanted and not (KEYS[key].type is float and float(value or "nan") == float(wanted)):
            return f"the control of {key} shows {value!r}, the run has {wanted!r}"
    return ""


def _asked(controls: list[list[Any]], told: dict[str, str]) -> str:
    """The controls show what was asked, also of a run that has a mistake."""
    for key, kind, value, _ in controls:
        if kind != "range" and key in told and value != told[key]:
            return f"the control of {key} shows {value!r}, asked was {told[key]!r}"
    return ""


def accessible(page: Browser) -> list[str]:
    """Serious faults that axe finds."""
    if not page.js("typeof axe === 'object'"):
        page.js(files("axe_core_python").joinpath("axe.min.js").read_text("utf-8") + "; 0")
    found = page.js("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
    return [
        f"{v['id']}: {[n['target'] for n in v['nodes']][:3]}" for v in found if v["impact"] in ("serious", "critical")
    ]


def compared(page: Page, changes: dict[str, str], seed: str, look: bool, anew: bool = False) -> str:
    """One run: "planned", "refused", or what is wrong."""
    source = random.Random(seed)
    width, dark = source.choice(WIDTHS), source.random() < 0.5
    page.page.viewport(width, 900, dark)
    try:
        told = page.set(changes, source, anew)
        wrong = page.compare(told, width)
        if not wrong and look:
            page.page.js("globalThis.copied = ''")
            given, wanted = page.command(source.choice(["mouse", "keyboard"])), page.keys(told)
            wrong = f"the command has {given}, the run {wanted}" if given != wanted else ""
            wrong = wrong or "; ".join(accessible(page.page))
            page.page.js("document.getElementById('said').textContent = ''")
        wrong = wrong or "; ".join(page.page.complaints)
    except Exception as e:
        return f"{width} px: {type(e).__name__}: {e}"
    state = page.page.js("document.getElementById('results').dataset.state")
    return f"{width} px: {wrong}" if wrong else {"planned": "planned", "wrong": "refused"}[state]


def main() -> int:
    """Turn what is left of the campaign and say what was wrong."""
    from recorded import Recorded

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", type=int, nargs="*", help="these runs, by number")
    args = parser.parse_args()
    runs, done, began = campaign(args.seed, args.runs), Recorded(args.out, args.seed), time.monotonic()
    left = [n for n in range(len(runs)) if ((n,) not in done.said if args.only is None else n in args.only)]
    touched: set[str] = set()
    with browser() as page:
        for base in dict.fromkeys(runs[n][0] for n in left):
            if time.monotonic() - began > args.seconds:
                break
            with opened(base, page) as bench:
                for n in (n for n in left if runs[n][0] == base):
                    if time.monotonic() - began > args.seconds:
                        break
                    said = compared(bench, runs[n][1], f"{args.seed} {n}", look=n % 5 == 0)
                    page.complaints.clear()
                    done.add((n,), said)
                    if said not in ("planned", "refused"):
                        print(f"\r{n} ({base}): {said}\n    {runs[n][1]}", flush=True)
                    print(f"\r{len(done.said)} of {len(runs)}", end="", file=sys.stderr, flush=True)
                touched |= bench.touched
    count = Counter(said if said in ("planned", "refused") else "wrong" for said in done.said.values())
    print(f"\n{dict(count)}; {len(touched)} of {len(KEYS)} controls turned now", file=sys.stderr)
    return int(count["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
