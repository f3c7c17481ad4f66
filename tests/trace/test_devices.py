"""What devices a profile has is decided by its kernels, not by what the file lists."""

from __future__ import annotations

from pathlib import Path

from made_jobs import Host, explained, job_member

from shardwise.ledger import as_dict
from shardwise.report import trace_view

LISTED = '"deviceProperties": [{"id": 3, "name": "NVIDIA H100 80GB HBM3"}], '


def job(on_device: bool) -> list[str]:
    host = Host()
    host.step(0, 0, 100)
    if on_device:
        host.launch("gemm", 5, 10, 50)
    host.span("cpu_op", "aten::mm", 2, 90)
    return host.events


def ranks_figure(folder: Path, before: str, on_device: bool) -> tuple[str, str]:
    answers = explained(folder, {0: (before, job(on_device))})
    return answers.devices[0], {name: note for name, _, note in trace_view.figures(as_dict(answers))}["ranks"]


def test_kernels_without_a_list_of_devices_are_of_a_device(tmp_path: Path) -> None:
    device, note = ranks_figure(tmp_path, "", on_device=True)
    assert "GPU" in device
    assert note == device


def test_a_list_that_lacks_the_device_does_not_make_it_the_host(tmp_path: Path) -> None:
    assert "GPU" in ranks_figure(tmp_path, LISTED, on_device=True)[0]
    assert "H100" in ranks_figure(tmp_path, job_member(0, 1, {}), on_device=True)[0]


def test_a_listed_device_without_kernels_is_not_used(tmp_path: Path) -> None:
    assert ranks_figure(tmp_path, job_member(0, 1, {}), on_device=False) == ("", "host only")
