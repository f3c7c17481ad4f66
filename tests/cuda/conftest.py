"""Shared by the tests of a GPU."""

from __future__ import annotations

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
"""Without a GPU each worker would collect hundreds of tests that are skipped."""


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """PyTorch compiles one function for at most eight cases in a process, of all tests together; the next would run as written."""
    torch._dynamo.reset()
