"""The pages do what they say: every command of a `console` block is executed, and prints what the page shows under it."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_commands import ROOT, Command, Section, Terminal, agrees, execute, problems, sections, starts_ranks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = [(page, section) for page in PAGES for section in sections(page)]
TASKS = "docs/tasks.md"


def group_of(section: Section) -> str:
    """Of sections beside the README's, of which the small tier draws some."""
    return "pages with ranks" if starts_ranks(section) else "pages"


class Reader:
    """Someone who follows the pages from the top, each in a folder of its own."""

    def __init__(self, folders: pytest.TempPathFactory, large: bool) -> None:
        self._folders, self._large = folders, large
        self._terminals: dict[Path, Terminal] = {}
        self._problems: dict[tuple[Path, str], list[str]] = {}

    def read(self, page: Path, title: str) -> list[str]:
        """What is wrong in a section. Those before it are executed first, as a task may need what another left, but those that
        start ranks leave nothing."""
        terminal = self._terminals.setdefault(page, Terminal(self._folders.mktemp(page.stem)))
        for section in sections(page):
            if starts_ranks(section) and section.title != title:
                continue
            if (page, section.title) not in self._problems:
                done = execute(section, terminal, self._large)
                self._problems[page, section.title] = problems(page.relative_to(ROOT).as_posix(), done)
            if section.title == title:
                break
        return self._problems[page, title]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Reader:
    return Reader(tmp_path_factory, request.config.option.large)


@pytest.mark.parametrize(
    ("page", "section"),
    [
        pytest.param(page, section, marks=[pytest.mark.drawn(group=group_of(section))] * (page != PAGES[0]))
        for page, section in SECTIONS
    ],
    ids=[f"{page.stem}: {section.title}" for page, section in SECTIONS],
)
def test_commands_print_what_the_page_shows(page: Path, section: Section, reader: Reader) -> None:
    wrong = reader.read(page, section.title)
    assert not wrong, "\n\n".join(
        [*wrong, f"python tests/docs/page_commands.py {page.relative_to(ROOT)} writes it anew"]
    )


def test_a_block_for_the_large_tier_is_not_all_that_a_section_has() -> None:
    for page, section in SECTIONS:
        assert any(isinstance(step, Command) and not step.large for step in section.steps), f"{page}: {section.title}"


def test_the_page_of_tasks_has_ten_and_shows_what_each_command_prints() -> None:
    tasks = sections(ROOT / TASKS)
    assert len(tasks) == 10
    for task in tasks:
        assert any(isinstance(step, Command) and step.shown for step in task.steps), task.title


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (["step 35.0 s"], "step 35.0 s  \n\n", True),
        (["step 35.0 s"], "step 35.1 s\n", False),
        (["step 35.0 s"], "step 35.0 s\nand more\n", False),
        (["step ... s, fits"], "step 12.5 s, fits\n", True),
        (["step ... s, fits"], "step 12.5 s, does not fit\n", False),
        (["step ... s"], "step 1\n2 s\n", False),
        (["first", "...", "last"], "first\nlast\n", True),
        (["first", "...", "last"], "first\n1\n2\nlast\n", True),
        (["first", "...", "last"], "first\n1\n2\n", False),
        ([], "", True),
        ([], "a warning\n", False),
    ],
)
def test_a_page_that_shows_something_else_is_found(shown: list[str], printed: str, same: bool) -> None:
    assert agrees(shown, printed) is same


def test_a_failure_that_the_page_does_not_show_is_found() -> None:
    failed = (Command("shardwise plan big.toml", 3), "", 1)
    assert problems("page", [failed]) == ["page:3: $ shardwise plan big.toml\nexit code 1"]
    assert not problems("page", [failed, (Command("echo $?", 4, ["1"]), "1\n", 1)])
