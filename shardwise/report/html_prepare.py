"""A page on data preparation, step by step: documents read, removed and changed, with reasons and examples."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from shardwise.report import words
from shardwise.report.html import Section, cell, key_figures, page, table_of
from shardwise.report.html_charts import small_bar

_COLOR = "#4c78a8"


def preparation_page(title: str, found: dict[str, Any]) -> str:
    """The complete file, from the statistics that `shardwise data prepare` writes."""
    share = found["kept"] / found["documents"] if found["documents"] else 0.0
    tokens = sum(made["tokens"] for made in found["sets"].values())
    figures = [
        ("documents read", words.count(found["documents"]), ""),
        ("kept", words.count(found["kept"]), words.percent(share)),
        ("characters kept", words.count(found["characters_kept"]), ""),
        ("tokens", words.count(tokens), ", ".join(found["sets"])),
    ]
    return page(title, [key_figures(figures), _steps(found), *_reasons(found)], "What became of every document.")


def _steps(found: dict[str, Any]) -> Section:
    rows = []
    most = max(step["removed"] for step in found["steps"]) or 1
    for step in found["steps"]:
        share = words.percent(step["removed"] / step["documents"]) if step["documents"] else words.DASH
        numbers = [words.count(step["documents"]), words.count(step["removed"]), share, words.count(step["changed"])]
        bar = f'<td class="bar">{small_bar(step["removed"] / most, _COLOR)}</td>'
        rows.append([cell(step["kind"]), *(cell(number, "n") for number in numbers), bar])
    heads = ["step", "documents", "removed", "share", "changed", ""]
    table = table_of(heads, rows, numbers_from=1, wide=True)
    return Section("Steps", "In their order; each sees what the one before left.", table)


def _reasons(found: dict[str, Any]) -> Iterator[Section]:
    for step in found["steps"]:
        rows = []
        for reason, entry in step["reasons"].items():
            rows.append([cell(reason), cell(words.count(entry["documents"]), "n")])
            for example in entry["examples"]:
                said = f"<b>{escape(example['id'])}</b> {escape(example['text'])}"
                rows.append([f'<td colspan="2" class="quiet" style="white-space:pre-wrap">{said}</td>'])
        settings = ", ".join(f"{key} = {value}" for key, value in step["settings"].items())
        if rows:
            yield Section(step["kind"], settings, table_of(["reason", "documents"], rows, numbers_from=1, wide=True))
