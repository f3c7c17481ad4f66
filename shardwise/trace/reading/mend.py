"""Profiles of real programs hold what JSON forbids: `nan` and `inf` where a bandwidth was divided by nothing, Windows paths with
single backslashes, names cut in the middle of a letter. Each is replaced by something harmless of the same length, so that
bytes keep their places.
"""

from __future__ import annotations

import codecs
import re

_STRING_OR_NO_NUMBER = re.compile(
    rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)|[-+]?\b(?:nan|inf|infinity)\b(?:\(\w*\))?', re.IGNORECASE | re.DOTALL
)
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_BAD_ESCAPE = re.compile(rb'\\(?:[^"\\/bfnrtu]|u(?![0-9a-fA-F]{4}))', re.DOTALL)
_LONE_BYTE = re.compile("[\udc80-\udcff]")


def mend(text: bytes) -> bytes:
    """The text with what JSON forbids replaced; nothing else changes, nor does its length."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        letters, used = codecs.utf_8_decode(
            text, "surrogateescape", False
        )  # a letter cut off by the end may still be whole
        text = _LONE_BYTE.sub("?", letters).encode("utf-8") + text[used:]
    small = text.lower()
    if b"nan" in small or b"inf" in small or _BAD_ESCAPE.search(text):
        return _STRING_OR_NO_NUMBER.sub(_mend_token, text)
    return text


def _mend_token(found: re.Match[bytes]) -> bytes:
    token = found[0]
    if not token.startswith(b'"'):
        return b'""'.ljust(len(token))
    whole = b"\\" in token and len(token) > 1 and token.endswith(b'"')
    return _ESCAPE.sub(_mend_escape, token) if whole else token


def _mend_escape(found: re.Match[bytes]) -> bytes:
    return found[0] if len(found[0]) > 1 else b"/"
