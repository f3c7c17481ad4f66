"""Shared by the tests of a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """PyTorch compiles one function for at most eight cases in a process, of all tests together; the next would run as written."""
    if torch.cuda.is_available():
        torch._dynamo.reset()
