"""Keep lines that are sentences, and pages that have enough of them (Raffel et al. 2020, section 2.2, "C4")."""

from __future__ import annotations

import re

from shardwise.data.prepare.words import Document

ENDS = (".", "?", "!", '"', "'")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")


def c4_quality(
    document: Document,
    *,
    citations: bool = True,
    terminal: bool = True,
    fewest_sentences: int = 5,
    fewest_words: int = 3,
    longest_word: int = 1000,
    lorem_ipsum: bool = True,
    javascript: bool = True,
    braces: bool = True,
    policy: bool = True,
) -> str:
    """Section 2.2 of Raffel et al. 2020 with the additions of its published code: citations are cut out, and lines about cookies
    or with a very long word are removed. Changes the text to the kept lines. -1 switches off a limit, false a rule."""
    sentences = 0
    kept = []
    for line in document.lines:
        line = line.strip()
        words = line.split()
        if longest_word != -1 and len(line) > longest_word and max(map(len, words)) > longest_word:
            continue
        if citations and "[" in line:
            line = _CITATION.sub("", line)
        if terminal and (not line.endswith(ENDS) or line.endswith("...")):
            continue
        if len(words) < fewest_words:
            continue
        lower = line.lower()
        if lorem_ipsum and "lorem ipsum" in lower:
            return "lorem ipsum"
        if javascript and "javascript" in lower:
            continue
        if braces and "{" in line:
            return "a curly bracket"
        if policy and any(phrase in lower for phrase in POLICY):
            continue
        if fewest_sentences != -1:
            sentences += document.vocabulary.sentences(line)
        kept.append(line)
    if sentences < fewest_sentences:
        return "too few sentences"
    document.text = "\n".join(kept).strip()
    return ""


def c4_paragraphs(document: Document, *, fewest: int = 3, shortest: int = 200) -> str:
    """mC4 (Xue et al. 2021, section 3.1): at least three lines of 200 characters or more."""
    lengths = sorted(map(len, document.text.split("\n")), reverse=True)
    if len(lengths) < fewest or (fewest and lengths[fewest - 1] < shortest):
        return "too few long lines"
    return ""
