"""When a step's passes are replayed: decided by looking, at a device that is played here; `tests/cuda` has a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.run import run_from_dict
from shardwise.train import cuda_graph
from shardwise.train.cuda_graph import MEASURED, WARM_UP, GraphedPasses, attach, same_shapes


class Clock:
    """Host and device: launching takes the host some time, and the device is done some time after it."""

    def __init__(self, launching: float, behind: float) -> None:
        self.now, self.launching, self.behind, self.done = 0.0, launching, behind, 0.0

    def passes(self, batch: object) -> str:
        self.now += self.launching
        self.done = self.now + self.behind
        return "launched"

    def synchronize(self) -> None:
        self.now = max(self.now, self.done)


def played(monkeypatch: pytest.MonkeyPatch, clock: Clock, wanted: Any) -> tuple[GraphedPasses, list[str]]:
    train = SimpleNamespace(cuda_graph=wanted)
    train_state: Any = SimpleNamespace(run=SimpleNamespace(train=train), passes=clock.passes)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
    monkeypatch.setattr(cuda_graph.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(GraphedPasses, "_captured", lambda self, batch: "recorded")
    made = GraphedPasses(train_state, lambda _: None)
    return made, [made(object()) for _ in range(WARM_UP + MEASURED + 2)]  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("launching", "behind", "wanted", "recorded"),
    [
        (0.040, 0.0005, "auto", True),  # the device was done as soon as the host
        (0.040, 0.450, "auto", False),  # the host was far ahead
        (8.0, 0.080, "auto", False),  # ahead by all that the queue takes: a hundredth of the step, but no small time
        (0.004, 0.001, "auto", False),  # some of a short step
        (0.040, 0.450, True, True),
    ],
)
def test_it_is_recorded_where_the_host_is_slower(
    monkeypatch: pytest.MonkeyPatch, launching: float, behind: float, wanted: Any, recorded: bool
) -> None:
    made, done = played(monkeypatch, Clock(launching, behind), wanted)
    launched = WARM_UP + (MEASURED if wanted == "auto" else 0) if recorded else len(done)
    assert done == ["launched"] * launched + ["recorded"] * (len(done) - launched)
    assert made.off is not recorded
    assert len(made.host_slower) == (MEASURED if wanted == "auto" else 0)


def test_batches_are_alike_if_one_fits_in_the_place_of_the_other() -> None:
    def batch(*shape: int, documents: bool = False) -> list[dict[str, torch.Tensor]]:
        made = dict(tokens=torch.zeros(shape, dtype=torch.int64))
        return [made | dict(documents=torch.zeros(shape))] if documents else [made]

    assert same_shapes(batch(2, 8), batch(2, 8))
    assert not same_shapes(batch(2, 8), batch(2, 4))
    assert not same_shapes(batch(2, 8), batch(2, 8, documents=True))
    assert not same_shapes(batch(2, 8), batch(2, 8) * 2)


def test_a_cpu_replays_nothing() -> None:
    run = run_from_dict(dict(train=dict(dtype="bfloat16")))
    train_state: Any = SimpleNamespace(run=run, device=torch.device("cpu"), replay=None)
    attach(train_state)
    assert train_state.replay is None
