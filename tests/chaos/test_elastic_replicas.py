"""Replicas that come and go: one is killed while the others train on, and rejoins; all as a loop over them in one process computes
it from who took part. Fifty of them: `python tests/chaos/replicas.py`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import elastic_reference
import numpy as np
import pytest
from replicas import events, heartbeats, kill, records, start, until
from tiny_run import tiny_toml

from shardwise.checkpoint.folder import complete
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.run import read_run
from shardwise.train.faults.ranks import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by what /proc says")

TRAIN: dict[str, Any] = dict(
    seq_len=16, global_batch=6, dtype="float64", steps=100_000, restart_wait=0.0, hang_seconds=16.0, compare_every=0
)


def prepare(folder: Path, layout: dict[str, Any], **train: Any) -> None:
    lay = dict(sync_every=4, outer_momentum=0.5, sync_elastic=True) | layout
    (folder / "run.toml").write_text(tiny_toml(lay, **TRAIN | train))


def whole(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a run's last checkpoint."""
    reader = open_checkpoint(complete(folder / "out")[-1], kind="")
    names = [name for name in reader.names if name.startswith("model/")]
    return {name.removeprefix("model/"): reader.get(name).numpy() for name in names}


def check(folder: Path) -> None:
    """Losses and weights of a run are those that follow from who took part in its exchanges."""
    run = read_run(folder / "run.toml")
    exchanges = events(folder, "exchange")
    losses, weights = elastic_reference.simulated(run, exchanges)
    found = [record for record in records(folder, "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in found] == list(range(1, exchanges[-1]["step"] + 1))
    for record in found:
        expected = losses[record["step"]].values()
        assert any(abs(record["loss"] / one - 1) < 1e-9 for one in expected), (record, expected)
    for name, value in whole(folder).items():
        np.testing.assert_allclose(value, weights[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "victim", "mates"),
    [
        (dict(replicate=3), 0, [0]),  # the one that writes for all
        pytest.param(
            dict(replicate=2, shard=2), 3, [2, 3],
            marks=pytest.mark.large("a replica of two ranks, which die together"),
        ),
    ],
)  # fmt: skip
@pytest.mark.drawn(group="commands")
def test_a_replica_that_is_killed_rejoins_while_the_others_train_on(
    tmp_path: Path, layout: dict[str, Any], victim: int, mates: list[int]
) -> None:
    prepare(tmp_path, layout, global_batch=6 if "shard" not in layout else 8)
    process = start(tmp_path)
    try:
        until(lambda: len(events(tmp_path, "exchange")) > 1, process)
        others = {rank: beat["process"] for rank, beat in heartbeats(tmp_path).items() if rank not in mates}
        until(lambda: kill(tmp_path, victim) is not None, process)
        until(lambda: events(tmp_path, "joined"), process)
        step = events(tmp_path, "joined")[0]["step"]
        until(lambda: events(tmp_path, "exchange")[-1]["step"] > step + 4, process)
        assert {r: b["process"] for r, b in heartbeats(tmp_path).items() if r not in mates} == others
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, (tmp_path / "said").read_text()
    finally:
        process.kill()
    said = (tmp_path / "said").read_text()
    replica = 0 if victim == 0 else 1
    size = layout["replicate"]
    assert f"rank {victim} was killed by SIGKILL; replica {replica} starts again in 0.0 s, the others go on" in said
    assert f"replica {replica} has left behind step" in said
    assert f"{size} of {size} replicas" in said
    # On a busy machine a replica may be back before the others have finished a step without it.
    seen = {record["replicas"] for record in records(tmp_path, "metrics.jsonl") if "loss" in record}
    assert {size} <= seen <= {size - 1, size}
    assert len({event["era"] for event in events(tmp_path, "exchange")}) == 1
    check(tmp_path)


@pytest.mark.drawn(group="commands")
def test_a_machine_that_is_lost_comes_back_while_the_others_train_on(tmp_path: Path) -> None:
    """Two commands stand for two machines of one replica each."""
    prepare(tmp_path, dict(replicate=2), global_batch=4)
    keys = ("--cluster.nodes=2", "--cluster.devices_per_node=1", f"--cluster.rendezvous=127.0.0.1:{free_port()}")
    stays = start(tmp_path, *keys)
    until((tmp_path / "out" / "logs").exists, stays)  # it is the one that listens
    goes = start(tmp_path, *keys)

    def added() -> list[int]:
        return [event["added"] for event in events(tmp_path, "exchange")][-1:] or [[]]

    try:
        until(lambda: added() == [[0, 1]], stays)
        goes.kill()
        until(lambda: added() == [[0]], stays)
        goes = start(tmp_path, *keys)
        until(lambda: added() == [[0, 1]], stays)
        goes.send_signal(signal.SIGTERM)
        assert (goes.wait(120), stays.wait(120)) == (75, 75), (tmp_path / "said").read_text()
    finally:
        goes.kill()
        stays.kill()
    steps = [record["step"] for record in records(tmp_path, "metrics.jsonl") if "loss" in record]
    assert steps == list(range(1, events(tmp_path, "exchange")[-1]["step"] + 1))
    assert len({event["era"] for event in events(tmp_path, "exchange")}) == 1
