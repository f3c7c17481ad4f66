"""A fitted scaling law on the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from shardwise.report import words
from shardwise.report.terminal import Console, key_figures, notes, plain_table
from shardwise.run.axes import AXES

_MOST_NAMES = 6


def print_fit(console: Console, found: dict[str, Any]) -> None:
    """Print the content of `scale.store.to_json`."""
    form = found["forms"][found["form"]]
    error = form["held_out_error"]
    figures = [
        ("form", found["form"], found["formula"]),
        ("runs", words.count(found["count"]), _left_out(found["left_out"])),
        ("residual", words.percent(found["residual"]), "median of log loss"),
        (
            "held out",
            words.DASH if error is None else words.percent(error),
            "mean error on the largest runs, fitted without",
        ),
        ("optimum", f"{form['starts_at_the_optimum']} of {form['starts']}", "random starts ended there"),
    ]
    console.print(key_figures(figures))
    console.print()
    table = plain_table("", "value", "low", "high")
    for name, each in form["coefficients"].items():
        table.add_row(name, *(Text(f"{each[key]:.4g}") for key in ("value", "low", "high")))
    console.print(table)
    others = [(name, each["held_out_error"]) for name, each in found["forms"].items() if name != found["form"]]
    said = [
        f"{name} misses the largest runs by {words.percent(missed)}" for name, missed in others if missed is not None
    ]
    for name, each in found["best_size_exponent"].items():
        interval = f"{each['low']:.3f} to {each['high']:.3f}"
        said.append(f"the best size grows with compute to the power {each['value']:.3f} ({interval}) by {name}")
    if found.get("repeats"):
        passes = found["repeats"]
        said.append(
            f"repeated data loses its worth after {passes['data']:.3g} passes, excess parameters after {passes['params']:.3g}"
        )
    console.print(notes([*said, *found["notes"]]))


def _left_out(names: list[str]) -> str:
    if not names:
        return "none left out"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"left out as too far off: {', '.join(names[:_MOST_NAMES])}{more}"


def print_budget(console: Console, found: dict[str, Any]) -> None:
    """Print the result of `shardwise budget`."""
    model, interval = found["model"], ""
    if found["low"] is not None:
        interval = f", 90% between {found['low']:.3f} and {found['high']:.3f}"
    shape = f"{model['layers']} layers of {model['hidden']:,}, {model['heads']} heads, ffn {model['ffn']:,}"
    split = " × ".join(f"{axis} {found['layout'][axis]}" for axis in AXES if found["layout"][axis] > 1) or "one device"
    figures = [
        ("parameters", words.count(found["params"]), shape),
        ("tokens", words.count(found["tokens"]), f"{found['tokens_per_param']:.1f} a parameter; {words.flops(found['flops'])}"),
        ("loss", f"{found['loss']:.3f}", f"by {found['law']}{interval}"),
        ("devices", f"{found['devices']:,} {found['chip']}", f"{split}, {words.percent(found['mfu'])} MFU"),
        ("time", words.seconds(found["days"] * 86400), f"{found['gpu_hours']:,.0f} device-hours"),
        ("cost", words.price(found["cost"]), "of the devices"),
        ("batch", f"{words.count(found['batch_tokens'])} tokens", f"{found['steps']:,} steps, lr {found['lr']:.2g} (Step law)"),
    ]  # fmt: skip
    console.print(key_figures(figures))
    console.print()
    table = plain_table("the same loss with a model", "parameters", "tokens", "compute")
    for each in found["other_sizes"]:
        never = each["compute"] is None
        tokens = "never" if never else words.count(each["tokens"])
        compute = words.DASH if never else f"×{each['compute']:.2f}"
        table.add_row(
            f"{each['factor']:g} times as large",
            Text(words.count(found["params"] * each["factor"])),
            Text(tokens),
            Text(compute),
        )
    console.print(table)
    said = list(found["warnings"])
    if same := found.get("same_loss"):
        one, two = same["trained_alone"], same["with_serving"]
        said.append(
            f"with {words.count(found['serve_tokens'])} tokens served, this loss is cheapest with {words.count(two['params'])} "
            f"parameters on {words.count(two['tokens'])} tokens; without, with {words.count(one['params'])} on "
            f"{words.count(one['tokens'])}"
        )
    console.print(notes(said))


def print_published(console: Console, law: str, rows: list[dict[str, Any]]) -> None:
    """Print known models beside the optimum of the law for the same compute."""
    table = plain_table("", "parameters", "tokens", "the law's", "tokens", "compute needed")
    for row in rows:
        share = row["compute_for_same_loss"]
        numbers = [words.count(row[key]) for key in ("params", "tokens", "best_params", "best_tokens")]
        numbers.append(words.DASH if share is None else words.percent(share))
        table.add_row(row["name"], *map(Text, numbers))
    console.print(table)
    console.print(
        notes(
            [
                f"the law: {law}",
                "compute needed: for the same loss at the law's best size, as a share of what was spent",
            ]
        )
    )
