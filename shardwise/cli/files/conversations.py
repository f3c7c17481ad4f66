"""Output of `shardwise data` about a set of conversations: counts, the skipped rows and why, and a few documents with the learned
tokens in colour."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.data.shards import Index, TokenSet

_LONGEST = 2000
"""Most tokens of a sample that are shown."""
_NAMED = 5


def counts(index: Index) -> dict[str, Any]:
    """The counts of a set of conversations, as JSON data."""
    return {
        "kind": index.kind,
        "paired": index.paired,
        "conversations": index.documents // (2 if index.paired else 1),
        "tokens_learned": index.learned,
        "truncated": index.truncated,
        "skipped": index.skipped,
        "skipped_reasons": index.reasons,
    }


def skipped_rows(folder: Path, most: int = _NAMED) -> list[dict[str, Any]]:
    """The first skipped rows, with file, line and reason."""
    from shardwise.data.shards import SKIPPED

    with open(folder / SKIPPED, encoding="utf-8") as file:
        return [json.loads(line) for line in islice(file, most)]


def print_counts(index: Index, folder: Path) -> None:
    """Print the same counts as text."""
    found = counts(index)
    names = {"chat": "conversations", "prompts": "prompts", "preference": "pairs" if index.paired else "answers"}
    print(f"{names[index.kind]:<17}{found['conversations']:,}")
    if index.kind != "prompts":
        share = f", {index.learned / index.tokens:.0%} of all" if index.tokens else ""
        print(f"learned          {index.learned:,} tokens{share}")
    if index.truncated:
        print(f"truncated        {index.truncated:,} documents lost their end")
    if not index.skipped:
        return
    from shardwise.data.shards import SKIPPED

    print(f"skipped          {index.skipped:,} rows, all of them in {folder / SKIPPED}")
    for reason, count in list(index.reasons.items())[:_NAMED]:
        print(f"  {count:>6,} x {reason}")
    for row in skipped_rows(folder):
        print(f"  {row['file']}:{row['line']}: {row['reason']}")


def show_samples(tokens: TokenSet, most: int) -> None:
    """Print the first documents on a terminal: learned tokens in green, context dim."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal or not most:
        return
    tokenizer = tokens.tokenizer()
    for document in range(min(most, tokens.documents)):
        start = int(tokens.ends[document - 1]) if document else 0
        stop = min(int(tokens.ends[document]), start + _LONGEST)
        text = Text()
        for learned, piece in runs(
            tokenizer, tokens.read(start, stop).tolist(), tokens.read_mask(start, stop).tolist()
        ):
            text.append(piece, style="bold green" if learned else "dim")
        title = f"document {document + 1}"
        if tokens.index.kind == "preference":
            title += ", chosen" if tokens.labels[document] else ", rejected"
        console.rule(f"{title}: [bold green]learned[/] [dim]context[/]", align="left")
        console.print(text)


def runs(tokenizer: Any, ids: list[int], mask: list[int]) -> list[tuple[bool, str]]:
    """Tokens as text, grouped in runs with the same mask; special tokens by name."""
    found: list[tuple[bool, bytes]] = []
    for number, (token, learned) in enumerate(zip(ids, mask, strict=True)):
        piece = tokenizer.piece(token, number == 0) or tokenizer.name(token).encode()
        if found and found[-1][0] == bool(learned):
            found[-1] = (bool(learned), found[-1][1] + piece)
        else:
            found.append((bool(learned), piece))
    return [(learned, piece.decode("utf-8", errors="replace")) for learned, piece in found]
