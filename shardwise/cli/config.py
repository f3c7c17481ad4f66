"""`shardwise config`: prints the resolved run, the schema of all keys, or the chips and presets that a run may name."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from shardwise.hardware.chips import ALIASES, CHIPS, Chip
from shardwise.run import PRESETS, UserError, read_planned, read_run, to_dict, to_toml
from shardwise.run.presets import pretraining
from shardwise.run.write import schema

HELP = """Print the resolved run as TOML. --schema prints every key with its type, default and meaning; --chips and --presets list
the names that cluster.chip and model.preset accept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", nargs="?", help="the run, a TOML file")
    lists = parser.add_mutually_exclusive_group()
    lists.add_argument("--schema", action="store_true", help="list every key instead")
    lists.add_argument("--chips", action="store_true", help="list the names for cluster.chip")
    lists.add_argument("--presets", action="store_true", help="list the names for model.preset")
    parser.add_argument(
        "--planned", action="store_true", help="as `plan` reads it: precision and batch from the preset if not set"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Print the requested listing."""
    listings = {"schema": (schema, schema_lines), "chips": (chips, chip_lines), "presets": (presets, preset_lines)}
    for name, (data, lines) in listings.items():
        if getattr(args, name):
            print(json.dumps(data(), indent=1) if args.json else "\n".join(lines()))
            return 0
    if args.run is None and not args.overrides:
        raise UserError("name a run (a TOML file), or ask for --schema, --chips or --presets")
    planned = read_planned(args.run, args.overrides) if args.planned else None
    run = planned.run if planned else read_run(args.run, args.overrides)
    print(json.dumps(to_dict(run), indent=1) if args.json else to_toml(run), end="\n" if args.json else "")
    return 0


def schema_lines() -> list[str]:
    """Every key with its default, type and meaning, by section."""
    lines = []
    section = ""
    for entry in schema():
        head, _, leaf = entry["key"].rpartition(".")
        if head != section:
            section = head
            lines += ["", f"[{section}]"]
        lines.append(f"{leaf} = {json.dumps(entry['default'])}")
        lines.append(f"    {entry['type']}: {entry['meaning']}")
    return lines


def chips() -> list[dict[str, Any]]:
    """Every chip with its figures; speeds are per second, sizes in bytes."""
    hidden = ("profile", "clock", "lender")
    names: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        names.setdefault(name, []).append(alias)
    plain = [{k: v for k, v in asdict(chip).items() if k not in hidden} for chip in CHIPS.values()]
    return [chip | {"aliases": names.get(chip["name"], [])} for chip in plain]


def presets() -> list[dict[str, Any]]:
    """Every preset: its parameters, its resolved `[model]`, and the keys of `[train]` used to plan it."""
    from shardwise.plan.cost.flops import parameters

    found = []
    for name in PRESETS:
        model = read_run(None, [f"model.preset={name}"]).model
        counted = parameters(model)
        sizes = {"parameters": counted.total, "active_parameters": counted.active}
        found.append({"name": name} | sizes | {"model": asdict(model), "train": pretraining(name)})
    return found


def chip_lines() -> list[str]:
    """The chips, one per line, and the aliases of their names."""
    from shardwise.report import words

    rows = [["chip", "16 bits", "fp8", "GiB", "memory", "inside", "between", "devices", "$/h"]]
    for chip in CHIPS.values():
        numbers = (_tera(chip, "bfloat16", "float16"), _tera(chip, "fp8"), f"{chip.memory / 2**30:.3g}")
        links = (f"{speed / 1e9:,.4g}" for speed in (chip.hbm, chip.intra, chip.inter))
        price = f"{chip.price:.2f}" if chip.price else words.DASH
        rows.append([chip.name, *numbers, *links, str(chip.devices_per_node), price])
    called = [f"{chip['name']}: {', '.join(chip['aliases'])}" for chip in chips() if chip["aliases"]]
    return [*_lined_up(rows), "", *CHIP_NOTES.splitlines(), "", "Also called:", *called]


def preset_lines() -> list[str]:
    """The presets, one per line."""
    from shardwise.report import words

    rows = [["preset", "size", "active", "layers", "hidden", "heads", "experts", "sequence", "batch"]]
    for entry in presets():
        model, train = entry["model"], entry["train"]
        active = words.count(entry["active_parameters"]) if entry["active_parameters"] != entry["parameters"] else ""
        sizes = [str(model[name]) for name in ("layers", "hidden", "heads")]
        batch = words.count(train["seq_len"] * train["global_batch"])
        experts = str(model["experts"] or "")
        rows.append(
            [entry["name"], words.count(entry["parameters"]), active, *sizes, experts, str(train["seq_len"]), batch]
        )
    return [*_lined_up(rows), "", *PRESET_NOTES.splitlines()]


CHIP_NOTES = """16 bits, fp8: dense TFLOP/s. memory, inside, between: GB/s of the memory, and
of a device and direction inside of a machine and between machines. devices: in
a machine. $/h: of a device. cluster.chip may also be a TOML file that describes
a chip (docs/planning.md)."""
PRESET_NOTES = """sequence, batch: tokens that `plan` takes where a run sets neither precision
nor batch."""


def _tera(chip: Chip, *dtypes: str) -> str:
    from shardwise.report import words

    best = max(chip.peak.get(dtype, 0.0) for dtype in dtypes)
    return words.digits(best / 1e12) if best else words.DASH


def _lined_up(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if not at else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
