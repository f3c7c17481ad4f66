"""What the CUDA allocator did: every allocation and release of the recorded steps, and the blocks that stood at their end.

PyTorch offers the same as a pickle, which nobody should open from elsewhere; here it is plain numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

MOST_ENTRIES = 1_000_000


@contextlib.contextmanager
def allocator_history(device: torch.device) -> Iterator[dict[str, Any]]:
    """While it is open, the allocator of a GPU keeps what it does; what is given is filled at the end, and stays empty without
    a GPU."""
    found: dict[str, Any] = {}
    if device.type != "cuda":
        yield found
        return
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MOST_ENTRIES, device=device)
    try:
        yield found
        found.update(_taken(torch.cuda.memory._snapshot(device), device))
    finally:
        torch.cuda.memory._record_memory_history(None, device=device)


def _taken(snapshot: dict[str, Any], device: torch.device) -> dict[str, Any]:
    segments = [
        dict(address=s["address"], bytes=s["total_size"], blocks=[[b["size"], b["state"]] for b in s["blocks"]])
        for s in snapshot["segments"]
        if s["device"] == device.index
    ]
    history = snapshot["device_traces"][device.index or 0]
    return dict(
        peak=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
        segments=segments,
        columns=["action", "address", "bytes", "microseconds"],
        history=[[e["action"], e.get("addr", 0), e["size"], e["time_us"]] for e in history],
    )
