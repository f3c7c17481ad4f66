"""Time by module leaves out what is spent on messages: carried, and waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.labels import label
from shardwise.measure.module_time import module_times


def event(name: str, own: float, *children: Any) -> Any:
    made = SimpleNamespace(
        name=name, self_cpu_time_total=own, cpu_children=children, cpu_parent=None, is_async=False, is_user_annotation=False,
        device_type="DeviceType.CPU", use_device=None, kernels=[], sequence_nr=-1, scope=0, thread=1,
    )  # fmt: skip
    for child in children:
        child.cpu_parent = made
    return made


def everything(top: Any) -> list[Any]:
    return [top, *(each for child in top.cpu_children for each in everything(child))]


@pytest.mark.parametrize("labelled", [False, True])
def test_what_waits_for_its_message_is_no_time_of_the_module(labelled: bool) -> None:
    call: Any = event("c10d::allreduce_", 40.0)
    if labelled:
        call = event(label("message", "tensor", "all_reduce", 8), 3.0, call)
    gather = event("_AllGatherSequence", 500.0, event("aten::empty", 2.0), call, event("aten::copy_", 5.0))
    module = event(label("module", "layers.0"), 7.0, event("aten::mm", 100.0), gather)
    assert module_times(everything(module)) == {"layers.0": {"forward": pytest.approx(107e-6)}}
