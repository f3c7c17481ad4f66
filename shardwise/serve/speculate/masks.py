"""The tokens that grammars allow next, also after draft tokens: a draft that is not allowed is rejected, and the rows after it are
not used."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from shardwise.serve.request import Grammar


def allowed_words(grammar: Grammar, words: int) -> np.ndarray:
    """The bits of the tokens that may come next."""
    found = np.zeros(words, np.int32)
    told = np.asarray(grammar.allowed()).view(np.int32).ravel()[:words]
    found[: len(told)] = told
    return found


def masks_along(grammar: Grammar, drafts: Items[int], words: int) -> np.ndarray:
    """Masks of the next token, and of the token after each draft [1 + drafts, words]; all bits are set after a draft that is not
    allowed. The grammar itself does not advance."""
    found = np.full((1 + len(drafts), words), -1, np.int32)
    found[0] = allowed_words(grammar, words)
    if drafts:
        grammar = grammar.copy()
    for place, token in enumerate(drafts):
        if not (0 <= token < 32 * words and found[place, token // 32] >> (token % 32) & 1):
            break
        grammar.accept(token)
        found[place + 1] = allowed_words(grammar, words)
    return found
