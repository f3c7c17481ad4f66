"""Divides time among labels: the time from one switch to the next belongs to the label that was switched to, so the labels' times
add up to the total. On a GPU a switch is an event in the stream, read when the profile ends: nothing waits for it."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

import torch

Label = TypeVar("Label")


class Clock(Generic[Label]):
    """Runs from `start` to `stop`."""

    def __init__(self, device: torch.device, first: Label) -> None:
        self.on_gpu, self.label, self.first = device.type == "cuda", first, first
        self.seconds: dict[Label, float] = {}
        self._then = 0.0
        self._events: list[tuple[Label, torch.cuda.Event]] = []

    def start(self) -> None:
        """Start the clock at the first label."""
        self.label = self.first
        if self.on_gpu:
            torch.cuda.synchronize()
            self._events = [(self.label, _event())]
        self._then = time.perf_counter()

    def switch(self, label: Label) -> None:
        """From now on time belongs to this label."""
        if self.on_gpu:
            self._events.append((label, _event()))
        else:
            now = time.perf_counter()
            self.seconds[self.label] = self.seconds.get(self.label, 0.0) + now - self._then
            self._then = now
        self.label = label

    def stop(self) -> None:
        """Stop the clock."""
        self.switch(self.first)
        if self.on_gpu:
            torch.cuda.synchronize()
            for (label, event), (_, following) in zip(self._events, self._events[1:], strict=False):
                passed = event.elapsed_time(following) / 1e3
                self.seconds[label] = self.seconds.get(label, 0.0) + passed
            self._events = []

    @property
    def total(self) -> float:
        """Seconds of all labels."""
        return sum(self.seconds.values())


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
