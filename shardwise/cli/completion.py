"""`shardwise completion`: the shell asks this verb for completions, so that it knows every verb, option, key, preset and chip.

eval "$(shardwise completion bash)"        # in ~/.bashrc; the same with zsh
shardwise completion fish | source         # in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from shardwise.run.config import all_keys

HELP = """Print shell completion. For bash put eval "$(shardwise completion bash)" into ~/.bashrc, for zsh the same with zsh into
~/.zshrc, for fish `shardwise completion fish | source` into config.fish."""

SCRIPTS = {
    "bash": """_shardwise() {
  local IFS=$'\\n'
  COMPREPLY=($(shardwise completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  [[ ${#COMPREPLY[@]} -eq 0 ]] && compopt -o default
}
complete -F _shardwise shardwise
""",
    "zsh": """_shardwise() {
  local -a found
  found=("${(@f)$(shardwise completion zsh --line "${LBUFFER}" 2>/dev/null)}")
  if [[ -n "${found[1]}" ]]; then compadd -S '' -Q -- $found; else _files; fi
}
compdef _shardwise shardwise
""",
    "fish": """complete -c shardwise -a '(shardwise completion fish --line (commandline -cp) 2>/dev/null)'
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")
    parser.add_argument("--line", help="print the completions of this line (called by the shells)")


def execute(args: argparse.Namespace) -> int:
    """Print the script, or the completions of a line."""
    if args.line is None:
        print(SCRIPTS[args.shell], end="")
        return 0
    typed = args.line.split(" ")
    # Bash treats the text before an equals sign as a separate word.
    cut = typed[-1].rpartition("=")[0] + "=" if args.shell == "bash" and "=" in typed[-1] else ""
    print("\n".join(word.removeprefix(cut) for word in candidates(typed)))
    return 0


def candidates(words: list[str]) -> list[str]:
    """The completions of the last word."""
    from shardwise.cli.main import VERBS

    last = words[-1]
    if len(words) <= 2:
        found = [*VERBS, "--help", "--version"]
    elif words[1] not in VERBS:
        found = []
    elif "=" in last:
        key = last.partition("=")[0]
        found = [f"{key}={value}" for value in _values(key.removeprefix("--"))]
    else:
        parser = argparse.ArgumentParser()
        importlib.import_module(VERBS[words[1]][0]).add_arguments(parser)
        parser = _inner(parser, words[2:-1])
        found = _options(parser._actions) if last.startswith("-") else _choices(parser._actions)
    return sorted(word for word in found if word.startswith(last))


def _inner(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the verb inside of a verb, as in `shardwise data build`, if one was typed."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return next((action.choices[word] for word in words if word in action.choices), parser)
    return parser


def _options(actions: Sequence[argparse.Action]) -> list[str]:
    """The options of a verb, and the keys of a run if it takes one."""
    found = [word for action in actions for word in action.option_strings if word.startswith("--")]
    if any(action.dest == "run" for action in actions):
        found += [f"--{key}=" for key in all_keys()] + ["--layout=auto"]
    return found


def _choices(actions: Sequence[argparse.Action]) -> list[str]:
    """The choices of a verb's positional arguments; the shell completes files itself."""
    return [str(word) for action in actions if not action.option_strings for word in action.choices or ()]


def _values(key: str) -> list[str]:
    """The values of a key, if it has a fixed list of words."""
    if key == "layout":
        return ["auto"]
    if key == "model.preset":
        from shardwise.run import PRESETS

        return list(PRESETS)
    if key == "cluster.chip":
        from shardwise.hardware.chips import CHIPS

        return list(CHIPS)
    kind: Any = all_keys()[key].type if key in all_keys() else None
    if get_origin(kind) is Literal:
        return [str(word).lower() if isinstance(word, bool) else str(word) for word in get_args(kind)]
    return ["true", "false"] if kind is bool else []
