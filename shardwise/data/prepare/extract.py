"""Extract text from pages, and identify its language. Both use libraries of the extra `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.data.prepare.words import Document
from shardwise.run.problems import Problem, UserError, install


def html(*, precision: bool = True) -> Callable[[Document], str]:
    """Extract the main text of an HTML page, by trafilatura (Barbaresi 2021). Documents that are not known to be pages, such as
    rows of JSONL, are read as HTML too; records of WET files and texts are left as they are. `precision` prefers losing text to
    keeping menus."""
    try:
        from trafilatura import extract
    except ModuleNotFoundError:
        raise UserError(Problem(f"needs trafilatura: {install('prepare')}", "steps.html")) from None

    def rule(document: Document) -> str:
        if document.meta.get("form") == "text":
            return ""
        try:
            found = extract(
                document.text, favor_precision=precision, include_comments=False, deduplicate=False, fast=False
            )
        except Exception as e:  # the library raises whatever its parsers do
            return f"HTML that cannot be parsed ({type(e).__name__})"
        if not found:
            return "no text in the page"
        document.text = found
        return ""

    return rule


def language(*, keep: Sequence[str], least: float = 0.65) -> Callable[[Document], str]:
    """Keep texts in the languages `keep` (ISO 639-1), by py3langid, whose probability must be at least `least`. Only the first
    20,000 characters are used."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ModuleNotFoundError:
        raise UserError(Problem(f"needs py3langid: {install('prepare')}", "steps.language")) from None
    identifier: Any = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    unknown = [name for name in keep if name not in identifier.labels]
    if unknown:
        raise UserError(
            Problem(f'"{unknown[0]}" is no language that py3langid knows, such as en or de', "steps.language.keep")
        )
    wanted = frozenset(keep)

    def rule(document: Document) -> str:
        found, probability = identifier.classify(document.text[:20_000])
        if found not in wanted:
            return f"language {found}"
        if probability < least:
            return f"language {found} not certain"
        document.meta["language"] = found
        return ""

    return rule
