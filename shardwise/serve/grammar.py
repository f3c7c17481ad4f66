"""Structured outputs: JSON of a schema, a regular expression, one of several choices, or a context-free grammar.

llguidance follows the text byte by byte and computes which tokens may come next. The engine asks for the mask before each token
and reports the sampled token. A draft that is not allowed is rejected, and the rows after it are not used. llguidance was chosen
because it needs neither torch nor a download, computes a mask in some 50 µs whatever the schema, and refuses what it does not
support instead of ignoring it. Its work is bounded, so that a schema cannot stop the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.data.tokenizer import Tokenizer
from shardwise.run import UserError
from shardwise.run.problems import install
from shardwise.serve.request import Grammar

_BEFORE = "\x02"
Kind = Literal["json", "regex", "choice", "grammar"]
# The model may choose the whitespace in JSON, but must not be able to write whitespace forever.
_JSON = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\r\n]{0,32}"}
_LIMITS = {
    "max_items_in_row": 500,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


@dataclass(frozen=True)
class Form:
    """The form an answer must have: a kind, and the schema, expression, choices or grammar (in Lark's notation)."""

    kind: Kind
    value: Any


class TokenGrammar:
    """The state of a form along one answer: the engine's `Grammar`."""

    def __init__(self, matcher: Any, vocab: int, form: Form) -> None:
        self._matcher, self.form = matcher, form
        self._words = np.zeros((vocab + 31) // 32, dtype=np.int32)

    def allowed(self) -> NDArray[np.int32]:
        """One bit for each token that may come next, in an array that the next call overwrites. Once the form is complete, or
        where its limits are reached, only the tokens that end an answer are allowed."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words

    def accept(self, token: int) -> None:
        """Advance by a token."""
        self._matcher.consume_token(token)

    def copy(self) -> TokenGrammar:
        """A copy in the same state."""
        return TokenGrammar(self._matcher.deep_copy(), 32 * len(self._words), self.form)


class Grammars:
    """Builds grammars over the vocabulary of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Iterable[int]) -> None:
        """`vocab` is the model's vocabulary size, `ends` are the tokens that end an answer."""
        self._source = tokenizer
        self._vocab = vocab
        self._ends = sorted(token for token in ends if 0 <= token < vocab)

    def make(self, form: Form, count: int) -> tuple[TokenGrammar, ...]:
        """One grammar for each of `count` answers; raises `UserError` with the mistake in the form."""
        library = _library()
        grammar = _grammar(library, form)
        limits = library.LLParserLimits(**_LIMITS)
        matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise UserError(f"cannot be followed: {matcher.get_error().strip()[:500]}")
        matchers = [matcher, *(matcher.deep_copy() for _ in range(count - 1))]
        return tuple(TokenGrammar(each, self._vocab, form) for each in matchers)

    @cached_property
    def _tokenizer(self) -> Any:
        library = _library()
        return library.LLTokenizer(
            library.TokenizerWrapper(_Vocabulary(self._source, self._vocab)), eos_token=self._ends
        )


class _Vocabulary:
    """A tokenizer with the interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.eos_token_id = tokenizer.end
        self.bos_token_id = None
        names = {token: name for token in range(vocab) if (name := tokenizer.name(token))}
        self.special_token_ids = list(names)
        self.tokens = [names[token].encode() if token in names else tokenizer.piece(token) for token in range(vocab)]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text in the middle of another. A control character is put before it, which merges with nothing: at the
        beginning of a text, sentencepiece would insert a space."""
        tokens = self._encode(_BEFORE + text.decode("utf-8", errors="replace"))
        for at in range(min(4, len(tokens)), -1, -1):
            if b"".join(self.tokens[token] for token in tokens[at:]) == text:
                return tokens[at:]
        return [token for byte in text if (token := self._bytes.get(byte)) is not None]

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """Single-byte tokens, for text that the tokenizer does not reproduce exactly."""
        return {piece[0]: token for token, piece in enumerate(self.tokens) if len(piece) == 1}


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise UserError(
            f"answers of a given form need llguidance, which is not installed: {install('serve')}"
        ) from None
    return llguidance


def _grammar(library: Any, form: Form) -> str:
    """The form in llguidance's notation."""
    matcher = library.LLMatcher
    try:
        if form.kind == "json":
            return matcher.grammar_from_json_schema(json.dumps(form.value), overrides=_JSON)
        if form.kind == "regex":
            return matcher.grammar_from_regex(form.value)
        if form.kind == "choice":
            return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, form.value)))
        return matcher.grammar_from_lark(form.value)
    except ValueError as e:
        raise UserError(f"cannot be read: {str(e)[:500]}") from None


def allowed_words(grammar: Grammar, words: int) -> np.ndarray:
    """The bits of the tokens that may come next."""
    found = np.zeros(words, np.int32)
    told = np.asarray(grammar.allowed()).view(np.int32).ravel()[:words]
    found[: len(told)] = told
    return found


def masks_along(grammar: Grammar, drafts: Sequence[int], words: int) -> np.ndarray:
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
