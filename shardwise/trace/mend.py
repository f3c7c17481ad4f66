"""Profiles of real programs hold what JSON forbids: `nan` and `inf` where a bandwidth was divided by nothing, Windows paths with
single backslashes, names cut in the middle of a letter. Each is replaced by something harmless of the same length, so that
bytes keep their places.
"""

from __future__ import annotations

import codecs
import re

_STRING_OR_NO_NUMBER = re.compile(
    rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)|(?<![\w.])[-+]?(?:nan|inf|infinity)(?:\(\w*\))?(?![\w.])',
    re.IGNORECASE | re.DOTALL,
)
_IN_STRING = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\|[\x00-\x1f]')
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
    return _STRING_OR_NO_NUMBER.sub(_mend_token, text)


def _mend_token(found: re.Match[bytes]) -> bytes:
    token = found[0]
    if not token.startswith(b'"'):
        return b'""'.ljust(len(token))
    return _IN_STRING.sub(_mend_escape, token) if token.endswith(b'"') and len(token) > 1 else token


def _mend_escape(found: re.Match[bytes]) -> bytes:
    sequence = found[0]
    return sequence if len(sequence) > 1 else (b"/" if sequence == b"\\" else b" ")
