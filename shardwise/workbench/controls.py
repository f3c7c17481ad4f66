"""The controls of the page: every key that affects the plan of a training run, made from its declaration. The most used ones are
at the top with sliders; the rest are folded away by section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, Literal, get_args, get_origin

from shardwise.hardware.chips import ALIASES, CHIPS
from shardwise.run import AXES, PRESETS
from shardwise.run.config import SECTIONS, all_keys
from shardwise.run.sections.declare import Key
from shardwise.workbench.question import FILES, text_of

FIRST: dict[str, tuple[str, ...]] = {
    "Model": ("model.preset", "objective.kind", "adapter.kind"),
    "Batch": ("train.global_batch", "train.seq_len", "train.microbatch", "train.dtype", "train.fp8", "train.optimizer"),
    "Cluster": ("cluster.chip", "cluster.nodes", "cluster.devices_per_node"),
    "Layout": (
        *(f"layout.{axis}" for axis in AXES),
        "layout.zero",
        "layout.schedule",
        "layout.chunks",
        "layout.recompute",
        "layout.context_method",
        "layout.async_tensor",
    ),
}
"""Keys that are always visible."""
WITHOUT_EFFECT = ("name", "layout.auto", "layout.fixed", "cluster.rendezvous", *FILES)
"""Keys that the page does not offer: they are names or files, or start a search, for which there is a button."""


def _powers(first: int, last: int) -> list[int]:
    return [2**n for n in range(first, last + 1)]


SLIDERS: dict[str, list[int]] = {
    **{f"layout.{axis}": _powers(0, 12) for axis in AXES},
    "layout.tensor": _powers(0, 6),
    "layout.pipeline": _powers(0, 6),
    "layout.context": _powers(0, 8),
    "layout.chunks": list(range(1, 17)),
    "train.global_batch": _powers(3, 15),
    "train.seq_len": _powers(9, 20),
    "train.microbatch": [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64],
    "cluster.nodes": _powers(0, 13),
    "cluster.devices_per_node": [0, 1, 2, 4, 8, 16, 32, 64, 72],
}
"""Values that a slider and the arrow keys step through; any other can be typed."""


def offered() -> list[Key]:
    """The keys that are controls, with their full names."""
    keys = all_keys()
    return [
        replace(key, name=name)
        for name, key in keys.items()
        if name not in WITHOUT_EFFECT and not name.startswith("serve.")
    ]


def panel(run: Mapping[str, Any]) -> str:
    """All controls with the values of a resolved run, as HTML."""
    keys = {key.name: key for key in offered()}
    first = [name for names in FIRST.values() for name in names]
    parts = []
    for title, names in FIRST.items():
        rows = "".join(_row(keys[name], value_at(run, name)) for name in names if name in keys)
        parts.append(f"<fieldset><legend>{title}</legend>{rows}</fieldset>")
    for section in SECTIONS:
        rest = [key for name, key in keys.items() if name.startswith(section + ".") and name not in first]
        if rest:
            rows = "".join(_row(key, value_at(run, key.name)) for key in rest)
            parts.append(f"<details><summary>more of [{section}]</summary><div>{rows}</div></details>")
    return "".join(parts)


def value_at(run: Mapping[str, Any], name: str) -> str:
    """The value of a key in a resolved run, as the controls write it."""
    section, _, leaf = name.partition(".")
    value = run[section][leaf]
    return ",".join(map(text_of, value)) if isinstance(value, list) else text_of(value)


def choices(key: Key) -> Sequence[str]:
    """The options of a key; empty if any value can be typed."""
    if key.name == "model.preset":
        return ["", *PRESETS]
    if key.name == "cluster.chip":
        return ["", *CHIPS, *sorted(ALIASES)]
    if get_origin(key.type) is Literal:
        return [text_of(choice) for choice in get_args(key.type)]
    return []


def _row(key: Key, value: str) -> str:
    """A label with its control."""
    section, _, leaf = key.name.replace("_", " ").partition(".")
    leaf = section if leaf == "kind" else leaf
    label, marked = escape(leaf), f'data-key="{key.name}" id="{key.name}"'
    tip = escape(f"{key.name}: {key.meaning}")
    named = f'<label for="{key.name}" data-tip="{tip}">{label}</label>'
    if key.type is bool:
        checked = " checked" if value == "true" else ""
        return f'<div class="row">{named}<input type="checkbox" {marked}{checked}></div>'
    if offers := choices(key):
        known = offers if value in offers else [value, *offers]
        none = "own shape" if key.name == "model.preset" else "–"
        options = "".join(
            f'<option value="{escape(each)}"{" selected" * (each == value)}>{escape(each or none)}</option>'
            for each in known
        )
        return f'<div class="row">{named}<select {marked}>{options}</select></div>'
    if key.type not in (int, float):
        return f'<div class="row">{named}<input type="text" {marked} value="{escape(value)}" maxlength="500"></div>'
    limits = f' min="{key.least:g}"' if key.least is not None else ""
    limits += f' max="{key.most:g}"' if key.most is not None else ""
    kind = ' step="any"' if key.type is float else ""
    number = f'<input type="number" {marked} value="{escape(value)}"{limits}{kind}>'
    if key.name not in SLIDERS:
        return f'<div class="row">{named}{number}</div>'
    values = SLIDERS[key.name]
    at = max((n for n, each in enumerate(values) if each <= float(value)), default=0)
    slider = (
        f'<input type="range" data-key="{key.name}" data-values="{",".join(map(str, values))}" min="0" '
        f'max="{len(values) - 1}" value="{at}" aria-label="{label}, slider" aria-valuetext="{escape(value)}">'
    )
    return f'<div class="row slide">{named}{number}{slider}</div>'
