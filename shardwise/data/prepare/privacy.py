"""Replaces personal data: e-mail addresses and public IP addresses as in FineWeb (Penedo et al. 2024, section 3.7), and on request
telephone and card numbers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

from shardwise.data.prepare.words import Document
from shardwise.run.problems import Problem, UserError

_NAME = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_EMAIL = re.compile(rf"\b{_NAME}(?:\.{_NAME})*@(?:{_LABEL}\.)+{_LABEL}")
_RUN = re.compile(r"[\w!#$%&'*+/=?^`{|}~.@-]+")
"""The characters of an address. Only runs with an "@" are searched: in a long run without one, such as base64, the search for an
address would start anew at every "+" and "/"."""
_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_IP = re.compile(rf"(?<![\d.]){_BYTE}(?:\.{_BYTE}){{3}}(?![\d.]*\d)")
_PHONE = re.compile(
    r"(?<![\w.])(?<!\d[ .-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)[ .-]?|\d{2,4}[ .-])\d{3,4}[ .-]\d{3,4}(?!\w|[ .-]\d)"
)
_CARD = re.compile(r"(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)")

EMAIL, IP, PHONE, CARD = "email@example.com", "192.0.2.1", "555-0100", "0000000000000000"
"""The replacements: names and numbers that are reserved for examples (RFC 2606, RFC 5737)."""


def _email(run: re.Match[str]) -> str:
    return _EMAIL.sub(EMAIL, run[0]) if "@" in run[0] else run[0]


def _public(found: re.Match[str]) -> str:
    try:
        return IP if ipaddress.ip_address(found[0]).is_global else found[0]
    except ValueError:  # a leading zero is not allowed in an address
        return found[0]


def _card(found: re.Match[str]) -> str:
    """Replace a number whose check digit is right (Luhn)."""
    digits = [int(letter) for letter in found[0] if letter.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return CARD if (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 and any(digits) else found[0]


_MASKS: dict[str, Callable[[str], str]] = {
    "email": lambda text: _RUN.sub(_email, text) if "@" in text else text,
    "ip": lambda text: _IP.sub(_public, text),
    "card": lambda text: _CARD.sub(_card, text),  # before telephones: part of a card looks like one
    "phone": lambda text: _PHONE.sub(PHONE, text),
}


def privacy(*, kinds: Sequence[str] = ("email", "ip")) -> Callable[[Document], str]:
    """Replace personal data of some kinds: "email", "ip" (public addresses), "phone", "card"."""
    unknown = [kind for kind in kinds if kind not in _MASKS]
    if unknown:
        raise UserError(Problem(f'"{unknown[0]}" is not known: {", ".join(_MASKS)}', "steps.privacy.kinds"))
    masks = [mask for kind, mask in _MASKS.items() if kind in kinds]

    def rule(document: Document) -> str:
        text = document.text
        for mask in masks:
            text = mask(text)
        document.text = text
        return ""

    return rule
