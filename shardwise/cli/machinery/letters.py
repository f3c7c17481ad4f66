"""What stands for a letter that the terminal cannot show: without UTF-8, × is x and not a question mark."""

from __future__ import annotations

import codecs

NAME = "shardwise-plain"
PLAIN = {
    "×": "x",
    "–": "-",
    "−": "-",
    "→": "->",
    "…": "...",
    "µ": "u",
    "·": ".",
    "€": "EUR",
    "ᵀ": "T",
    "─": "-",
    "━": "-",
    "│": "|",
    "■": "#",
    "□": ".",
    "•": "*",
}


def plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler of a stream: each letter by one or more that every terminal has. Bars keep their length."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(c, "#" if "▀" <= c <= "▟" else "?") for c in letters), error.end


def register() -> None:
    """Make the handler known by its name."""
    codecs.register_error(NAME, plain)
