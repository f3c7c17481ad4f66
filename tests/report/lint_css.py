"""Checks the syntax of style sheets for `make lint`, which a browser never does: it drops what it cannot read without a word.

CSS ends every open block by itself, so a forgotten brace is found by the rules that then stand inside another rule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinycss2


def problems(css: str) -> Iterator[str]:
    """A sentence for each mistake, with its line."""
    if css.count("{") != css.count("}"):
        yield f"{css.count('{')} blocks are opened and {css.count('}')} closed"
    yield from _rules(tinycss2.parse_stylesheet(css, skip_comments=True, skip_whitespace=True))


def _rules(nodes: list[Any]) -> Iterator[str]:
    for node in nodes:
        if node.type == "error":
            yield f"line {node.source_line}: {node.message}"
        elif node.type == "at-rule" and node.content is not None:
            yield from _rules(tinycss2.parse_rule_list(node.content, skip_comments=True, skip_whitespace=True))
        elif node.type == "qualified-rule":
            for inside in tinycss2.parse_blocks_contents(node.content, skip_comments=True, skip_whitespace=True):
                reason = getattr(inside, "message", "a rule inside a rule")
                if inside.type == "declaration":
                    reason = "".join(
                        f"unexpected {t.serialize()}" for t in inside.value if t.type == "error" or t == ":"
                    )
                if reason:
                    yield f"line {inside.source_line}: {reason} (is a ';', ':' or '}}' missing before it?)"


if __name__ == "__main__":
    found = [f"{path}: {problem}" for path in sys.argv[1:] for problem in problems(Path(path).read_text("utf-8"))]
    print("\n".join(found) or "style sheets are sound")
    sys.exit(bool(found))
