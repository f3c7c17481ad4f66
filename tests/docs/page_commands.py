"""Commands of a page, executed: what the page shows under a command is what the command prints.

A `console` block has lines `$ command`, each with its output below. `...` stands for anything within a line, and on a line of
its own for any number of lines, as in doctest; beside it a run of blanks may be of any length, as columns are as wide as what is in
them. A `toml`, `python` or `jsonl` block whose first line is `# NAME` is the file NAME. A command must succeed unless `$ echo $?`
follows. Blocks marked `console large` are for the large tier. `python tests/docs/page_commands.py [--large] PAGE` writes what is
printed now into a page, to be looked over.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.cli.entry import hide_deprecations
from shardwise.cli.main import main, split_overrides
from shardwise.run import UserError, read_run

ROOT = Path(__file__).parents[2]
COLUMNS = "100"
"""The width of the terminal in the pages."""
SHARED = ("LICENSE", "examples")
"""What the commands find of the checkout."""
STARTS_RANKS = ("train", "verify", "profile")


@dataclass
class Command:
    """One command of a page."""

    text: str
    line: int
    """Of the page, from 1; the output begins below it."""
    shown: list[str] = field(default_factory=list)
    """The output that the page shows."""
    large: bool = False
    """Whether it takes too long for the small tier."""


@dataclass
class Section:
    """What a page has under one heading."""

    title: str
    steps: list[Command | tuple[str, str]] = field(default_factory=list)
    """Commands, and files as name and text, in order."""


def sections(page: Path) -> list[Section]:
    """The sections of a page that have commands, in order."""
    found = [Section(page.name)]
    block, kind = None, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if block is None and line.startswith("```"):
            block, kind = [], line.removeprefix("```")
        elif block is None and line.startswith("## "):
            found.append(Section(line.removeprefix("## ")))
        elif block is not None and line == "```":
            if (
                kind in ("toml", "python", "jsonl")
                and block
                and (named := re.fullmatch(r"# ([\w./-]+\.\w+)", block[0]))
            ):
                # JSON has no comments.
                found[-1].steps.append((named[1], "\n".join(block[kind == "jsonl" :]) + "\n"))
            block = None
        elif block is not None:
            block.append(line)
            if kind.startswith("console") and line.startswith("$ "):
                found[-1].steps.append(Command(line.removeprefix("$ "), number, large=kind == "console large"))
            elif kind.startswith("console"):
                last = found[-1].steps[-1]
                assert isinstance(last, Command), f"{page}:{number}: output without a command"
                if last.text.endswith("\\"):
                    last.text, last.line = last.text[:-1] + line.strip(), number
                else:
                    last.shown.append(line)
    assert block is None, f"{page}: a block does not end"
    return [section for section in found if any(isinstance(step, Command) for step in section.steps)]


def starts_ranks(section: Section) -> bool:
    """Whether a command of it starts a process for each rank, which takes seconds."""
    commands = [step.text.split() for step in section.steps if isinstance(step, Command) and not step.large]
    return any(
        len(words) > 1 and words[1] in STARTS_RANKS and "--dry" not in words
        and (words[1] == "profile" or any(word.startswith("--layout.") for word in words))
        for words in commands
    )  # fmt: skip


def pattern(lines: Sequence[str]) -> re.Pattern[str]:
    """What output may look like, where `...` stands for anything."""

    def one(line: str) -> str:
        if line.strip() == "...":
            return r"(?:.*\n)*?"
        text = re.escape(line.rstrip())
        if "..." in line:
            text = re.sub(r"(?:\\ )+", " +", text.replace(r"\.\.\.", ".*?"))
        return text + r"\n"

    return re.compile("".join(map(one, lines)))


def lines_of(output: str) -> list[str]:
    """The lines of an output, without the blanks at the ends of lines and of the whole."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def agrees(shown: Sequence[str], output: str) -> bool:
    """Whether a page shows what a command printed."""
    return pattern(lines_of("\n".join(shown))).fullmatch("".join(line + "\n" for line in lines_of(output))) is not None


class Terminal:
    """Executes the commands of a page in one folder, in order. One that starts no ranks stays in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = 0
        for name in SHARED:
            (folder / name).symlink_to(ROOT / name)

    def execute(self, text: str) -> str:
        """Run a command; gives what it printed, and keeps its exit code."""
        if text == "echo $?":
            return f"{self.code}\n"
        words = shlex.split(text)
        with self._inside():
            if words[0] == "shardwise" and "|" not in words and not self._ranks(words[1:]):
                return self._within(lambda: main(words[1:]))
            if words[0] == "python" and words[1].endswith(".py"):
                return self._within(lambda: runpy.run_path(words[1], run_name="__main__").get("code", 0))
            return self._beside(text)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        before, here = os.environ.copy(), Path.cwd()
        os.environ.update(COLUMNS=COLUMNS, OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(self.folder / ".cache"))
        os.chdir(self.folder)
        try:
            yield
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)

    def _ranks(self, words: list[str]) -> bool:
        """Whether a command starts ranks, which need a command of their own around them."""
        if words[0] not in STARTS_RANKS or "--dry" in words:
            return False
        if words[0] == "profile":  # in a process of its own even for one rank
            return True
        overrides, rest = split_overrides(words[1:])
        try:
            return read_run(rest[0], overrides).layout.world > 1
        except UserError:
            return False

    def _within(self, call: Callable[[], int]) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            hide_deprecations()
            self.code = call()
        return said.getvalue()

    def _beside(self, text: str) -> str:
        command = f'shardwise() {{ "{sys.executable}" -m shardwise "$@"; }}\n{text}'
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        done = subprocess.run(
            ["bash", "-c", command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.code = done.returncode
        return done.stdout


def execute(section: Section, terminal: Terminal, large: bool = False) -> list[tuple[Command, str, int]]:
    """Write the files of a section and run its commands; gives each with its output and exit code."""
    done = []
    for step in section.steps:
        if isinstance(step, Command):
            if large or not step.large:
                done.append((step, terminal.execute(step.text), terminal.code))
        else:
            path = terminal.folder / step[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step[1], encoding="utf-8")
    return done


def problems(page: str, done: Sequence[tuple[Command, str, int]]) -> list[str]:
    """What a page shows and a command did not print, and failures that the page does not show."""
    found = []
    for number, (command, output, code) in enumerate(done):
        where = f"{page}:{command.line}: $ {command.text}"
        if not agrees(command.shown, output):
            changes = difflib.unified_diff(command.shown, lines_of(output), "the page", "the command", n=1, lineterm="")
            found.append("\n".join([where, *changes]))
        asked = number + 1 < len(done) and done[number + 1][0].text == "echo $?"
        if code and not asked and command.text != "echo $?":
            found.append(f"{where}\nexit code {code}")
    return found


def written_anew(command: Command, output: str) -> list[str]:
    """The output for the page: as it is shown where it still agrees, else as printed, with the shown lines that are still right."""
    if agrees(command.shown, output):
        return command.shown
    known = [line for line in command.shown if "..." in line and line.strip() != "..."]
    return [next((k for k in known if pattern([k]).fullmatch(line + "\n")), line) for line in lines_of(output)]


def rewrite(page: Path, large: bool) -> None:
    """Write what the commands of a page print into it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    shown: dict[int, tuple[int, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder))
        for section in sections(page):
            for command, output, code in execute(section, terminal, large):
                print(f"{page}:{command.line}: exit code {code}", file=sys.stderr)
                shown[command.line] = (len(command.shown), written_anew(command, output))
    for line, (old, new) in sorted(shown.items(), reverse=True):
        lines[line : line + old] = new
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name != "--large":
            rewrite(Path(name), "--large" in sys.argv)
