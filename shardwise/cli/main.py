"""The `shardwise` command: finds the verb, runs its module, and prints a user's mistake as a sentence.

Each verb is a module with `HELP`, `add_arguments` and `execute`; only the chosen one is imported, so that help and errors
appear at once. `--section.key=value` anywhere on the line overrides the run, for every verb that takes one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from shardwise.run.problems import EXTRA_OF, UserError, install, nearest

# Verb to (module, description). The descriptions are here so that `--help` imports nothing.
VERBS: dict[str, tuple[str, str]] = {
    "plan": ("shardwise.cli.planning.plan", "predict memory, speed and cost of a run; find its best layout"),
    "workbench": ("shardwise.cli.planning.workbench", "change a run on a page and see its plan at once"),
    "train": ("shardwise.cli.training.train", "train a run, or resume one"),
    "watch": ("shardwise.cli.training.watch", "show runs on a page beside their plan, during training or later"),
    "launch": (
        "shardwise.cli.training.launch",
        "write, submit and follow the job of a run on Slurm, Kubernetes or hosts",
    ),
    "checkpoints": ("shardwise.cli.training.checkpoints", "list the checkpoints of a run, and verify them"),
    "profile": (
        "shardwise.cli.measuring.profile",
        "record a few steps of a run for `shardwise trace`; show the cost by module",
    ),
    "trace": ("shardwise.cli.trace.verb", "explain where the time of a profile went, and what to change first"),
    "verify": (
        "shardwise.cli.measuring.verify",
        "compare a run with its plan; --dry: one rank of a job of any size, without data",
    ),
    "validate": ("shardwise.cli.planning.validate", "predict published measurements and print the errors"),
    "gallery": ("shardwise.cli.planning.gallery", "show tables of papers as published and as planned, side by side"),
    "bench": ("shardwise.cli.measuring.bench", "measure this machine and write a profile for the planner"),
    "serve": ("shardwise.cli.serving.serve", "serve a checkpoint over OpenAI's HTTP API"),
    "load": ("shardwise.cli.serving.load", "measure how fast such a server answers"),
    "generate": ("shardwise.cli.serving.generate", "continue text with a checkpoint"),
    "eval": ("shardwise.cli.serving.eval", "measure loss and perplexity on data sets, and accuracy on questions"),
    "config": ("shardwise.cli.config", "print the resolved run, or all keys, chips and presets"),
    "budget": (
        "shardwise.cli.planning.budget",
        "find the best model for a budget: size, tokens, layout, days and cost",
    ),
    "scale": (
        "shardwise.cli.scale.verb",
        "fit scaling laws to runs; predict the loss of larger ones, with an interval",
    ),
    "data": ("shardwise.cli.files.data", "turn text or conversations into token shards"),
    "quantize": (
        "shardwise.cli.files.quantize",
        "round weights to 8 or 4 bits; print the perplexity before and after",
    ),
    "convert": ("shardwise.cli.files.convert", "convert weights and adapters to and from Hugging Face folders"),
    "doctor": (
        "shardwise.cli.doctor",
        "check what works on this machine, what will fail, and how to fix it",
    ),
    "completion": ("shardwise.cli.completion", "print shell completion for bash, zsh or fish"),
}

_OVERRIDE = re.compile(r"--([A-Za-z_]\w*\.\w+|name|layout)(=.*)?", re.DOTALL)


def overview() -> str:
    """The output of `shardwise --help`."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {what}" for verb, (_, what) in VERBS.items()]
    return "\n".join(
        [
            "usage: shardwise VERB …",
            "",
            "Plan, train and explain large transformer models from one description of the job.",
            "",
            "verbs:",
            *lines,
            "",
            "A run is a TOML file; --section.key=value overrides it (shardwise config --schema lists the keys).",
            "`shardwise VERB --help` explains a verb; `shardwise --version` prints the version.",
        ]
    )


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides of the run, as `key=value`, and the other arguments."""
    overrides, rest = [], []
    waiting = iter(arguments)
    for argument in waiting:
        found = _OVERRIDE.fullmatch(argument)
        if not found:
            rest.append(argument)
        elif found[2]:
            overrides.append(found[1] + found[2])
        else:  # `--train.steps 10`
            value = next(waiting, None)
            overrides.append(found[1] if value is None else f"{found[1]}={value}")
    return overrides, rest


class _Parser(argparse.ArgumentParser):
    """Raises argument errors as user errors, like any other."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; mistakes are raised as `UserError`."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] == "--version":
        from shardwise.cli.machinery.versions import version_lines

        print("\n".join(version_lines()))
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        raise UserError(f'there is no verb "{verb}"{nearest(verb, VERBS) or "; there are " + ", ".join(VERBS)}')
    module = importlib.import_module(VERBS[verb][0])
    overrides, rest = split_overrides(rest)
    parser = _Parser(prog=f"shardwise {verb}", description=module.HELP, allow_abbrev=False)
    module.add_arguments(parser)
    args = parser.parse_args(rest)
    args.overrides, args.arguments = overrides, [verb, *rest]
    if overrides and not hasattr(args, "run"):
        raise UserError(f"shardwise {verb} takes no run, so it has no --{overrides[0].partition('=')[0]}")
    return module.execute(args)


def missing_part(error: ModuleNotFoundError) -> str | None:
    """How to install the extra that a module belongs to, or None."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRA_OF:
        return None
    return f"this verb needs {name}, which is not installed: {install(EXTRA_OF[name])}"


def _memory(error: Exception) -> str | None:
    """The message of an out-of-memory error; None for any other error. PyTorch has a class for GPUs, and none for CPUs."""
    full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not full and not any(
        text in str(error) for text in ("can't allocate memory", "Storage size calculation overflowed")
    ):
        return None
    found = re.search(r"(?:allocate|Unable to allocate) ([\d.]+ \w+)", str(error))
    amount = f" for another {found[1]}" if found else ""
    return f"memory is full{amount}; `shardwise plan` shows what a run needs and which layouts fit"


def _end_output() -> None:
    """Write what stdout still holds. Where that cannot be written it is dropped: Python would complain once more when it flushes at
    exit."""
    try:
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str]) -> int:
    """Run one command; print mistakes as sentences and return the exit code: 0 for success, 2 for a user's mistake."""
    try:
        code = run_command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is a mistake here, and not at exit
        return code
    except UserError as e:
        for problem in e.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        message = missing_part(e)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output closed the pipe
        return 0
    except UnicodeEncodeError as e:
        print(f"error: {e.object[e.start : e.end]!a} cannot be encoded as {e.encoding}", file=sys.stderr)
        return 2
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        print(f"error: {where}{e.strerror or e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        message = _memory(e)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        # A restarted rank may find enough memory: other programs come and go.
        return 1 if "SHARDWISE_AGENT" in os.environ else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        _end_output()
