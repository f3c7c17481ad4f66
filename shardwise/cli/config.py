"""`shardwise config`: the resolved run, the schema of all keys, or the chips and presets that a run may name."""

from __future__ import annotations

import argparse
import json

from shardwise.run import UserError, read_planned, read_run, to_dict, to_toml
from shardwise.run.write import schema

HELP = """Print the resolved run as TOML, or with --schema every key with its type, default and meaning; --chips and --presets list
what cluster.chip and model.preset may name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", nargs="?", help="the run, a TOML file")
    lists = parser.add_mutually_exclusive_group()
    lists.add_argument("--schema", action="store_true", help="list every key instead")
    lists.add_argument("--chips", action="store_true", help="list the chips that cluster.chip may name")
    lists.add_argument("--presets", action="store_true", help="list the models that model.preset may name")
    parser.add_argument(
        "--planned", action="store_true", help="as `plan` reads it: precision and batch of the preset where none is set"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def execute(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    if args.schema:
        print(json.dumps(schema(), indent=1) if args.json else _schema_text())
        return 0
    if args.chips or args.presets:
        _print_catalogue(args)
        return 0
    if args.run is None and not args.overrides:
        raise UserError("name a run (a TOML file), or ask for --schema, --chips or --presets")
    planned = read_planned(args.run, args.overrides) if args.planned else None
    run = planned.run if planned else read_run(args.run, args.overrides)
    print(json.dumps(to_dict(run), indent=1) if args.json else to_toml(run), end="\n" if args.json else "")
    return 0


def _print_catalogue(args: argparse.Namespace) -> None:
    from shardwise.cli.machinery import catalogue

    if args.json:
        print(json.dumps(catalogue.chips() if args.chips else catalogue.presets(), indent=1))
        return
    print("\n".join(catalogue.chip_lines() if args.chips else catalogue.preset_lines()))


def _schema_text() -> str:
    lines = []
    section = ""
    for entry in schema():
        head, _, leaf = entry["key"].rpartition(".")
        if head != section:
            section = head
            lines += ["", f"[{section}]"]
        lines.append(f"{leaf} = {json.dumps(entry['default'])}")
        lines.append(f"    {entry['type']}: {entry['meaning']}")
    return "\n".join(lines)
