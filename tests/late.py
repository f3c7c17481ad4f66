"""Packages that take a second to import. Every worker collects every test, and few run those that need one: it is imported when it
is first used."""

from __future__ import annotations

from typing import Any

import pytest


class Late:
    """Stands for a package until somebody asks for a part of it. Where it is not installed, the test that asks is skipped."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, part: str) -> Any:
        if part.startswith("_"):  # pytest looks at every name of a module whether it is a test
            raise AttributeError(part)
        return getattr(pytest.importorskip(self.name), part)
