"""The picture of a plan in the README, drawn from what the command prints. `python tests/docs/plan_picture.py` draws it anew."""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path
from unittest import mock

from rich._export_format import CONSOLE_SVG_FORMAT

from shardwise.cli.main import main
from shardwise.report import terminal

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "plan.svg"
RUN = ROOT / "examples" / "llama3-70b-h100.toml"
WIDTH = 128


def drawn() -> str:
    """The plan as a terminal with colours shows it. Readers' own fonts are named, and none is fetched."""
    console = terminal.Console(
        record=True, width=WIDTH, force_terminal=True, color_system="truecolor", file=io.StringIO()
    )
    with mock.patch.object(terminal, "Console", return_value=console):
        assert main(["plan", str(RUN)]) == 0
    form = re.sub(r"\s*<!--.*?-->|\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code", "DejaVu Sans Mono")
    title = f"shardwise plan {RUN.relative_to(ROOT).as_posix()}"
    return console.export_svg(title=title, code_format=form, unique_id="plan")


def words(picture: str) -> list[str]:
    """What a picture says, line by line, however it is drawn."""
    lines: dict[str, list[str]] = {}
    for y, text in re.findall(r'<text class="plan-r\d+"[^>]* y="([\d.]+)"[^>]*>([^<]*)</text>', picture):
        lines.setdefault(y, []).append(unescape(text).replace("\xa0", " "))
    return ["".join(parts).rstrip() for parts in lines.values()]


if __name__ == "__main__":
    PICTURE.write_text("\n".join(line.rstrip() for line in drawn().splitlines()) + "\n", encoding="utf-8")
