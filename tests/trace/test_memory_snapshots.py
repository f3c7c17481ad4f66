"""Snapshots of the CUDA allocator: owners, curve and peak against a simulation that knows them; and what must not be let in."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.run.problems import UserError
from shardwise.trace.memory.history import explain_snapshot
from shardwise.trace.memory.snapshot import read_profiled, read_snapshots

H200 = Path(__file__).parent / "data" / "h200"
FORWARD = [
    dict(filename="/home/me/model.py", line=10, name="forward"),
    dict(filename="/x/torch/nn/modules/module.py", line=1, name="_call_impl"),
]
STEP = [
    dict(filename="/x/torch/optim/adamw.py", line=5, name="step"),
    dict(filename="/home/me/train.py", line=3, name="main"),
]
MAKE = [dict(filename="/home/me/model.py", line=4, name="__init__")]
KIB = 1024


class Machine:
    """An allocator that keeps its own books: whose each byte is, moment by moment."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.alive: dict[int, tuple[int, str, list[Any]]] = {}
        self.next, self.reserved, self.clock = 1 << 20, 0, 1_000
        self.books: list[dict[str, int]] = []

    def _event(self, action: str, address: int, size: int, frames: list[Any]) -> None:
        self.clock += 7
        self.trace.append(dict(action=action, addr=address, size=size, stream=0, time_us=self.clock, frames=frames))
        held: dict[str, int] = {}
        for each, owner, _ in self.alive.values():
            held[owner] = held.get(owner, 0) + each
        self.books.append(held)

    def take(self, size: int, owner: str, frames: list[Any]) -> int:
        address, self.next = self.next, self.next + size
        self.reserved += size
        self._event("segment_alloc", address, size, [])
        self.alive[address] = (size, owner, frames)
        self._event("alloc", address, size, frames)
        return address

    def free(self, address: int) -> None:
        size, _, _ = self.alive.pop(address)
        self._event("free_requested", address, size, [])
        self._event("free_completed", address, size, [])

    def dump(self, forget: int = 0) -> dict[str, Any]:
        """What `_dump_snapshot` would write, when only the last entries were kept."""
        segments = [
            dict(device=0, address=address, total_size=size,
                 blocks=[dict(size=size, state="active_allocated", address=address, frames=frames)])
            for address, (size, _, frames) in self.alive.items()
        ]  # fmt: skip
        cached = self.reserved - sum(size for size, _, _ in self.alive.values())
        segments.append(
            dict(device=0, address=1 << 40, total_size=cached, blocks=[dict(size=cached, state="inactive")])
        )
        return dict(segments=segments, device_traces=[self.trace[forget:]])


def trained(steps: int = 3, layers: int = 4, seed: int = 0) -> Machine:
    """A machine after some steps of training."""
    rng, machine = random.Random(seed), Machine()
    sizes = [rng.randrange(1, 9) * 4 * KIB for _ in range(layers)]
    for size in sizes:
        machine.take(size, "parameters", MAKE)
    for step in range(steps):
        saved, gradients = [], []
        for size in sizes:
            saved.append(machine.take(3 * size, "activations", FORWARD))
            machine.free(machine.take(2 * size, "temporary", FORWARD))
        for size in reversed(sizes):
            scratch = machine.take(size // 2, "temporary", [])
            gradients.append(machine.take(size, "gradients", []))
            machine.free(saved.pop())
            machine.free(scratch)
        if step == 0:
            for size in sizes:
                machine.take(2 * size, "optimizer", STEP)
        machine.free(machine.take(512, "temporary", STEP))
        for gradient in gradients:
            machine.free(gradient)
    return machine


def written(path: Path, found: Any) -> Path:
    path.write_bytes(pickle.dumps(found))
    return path


@pytest.mark.parametrize("seed", range(3))
def test_every_byte_has_the_owner_that_made_it(seed: int, tmp_path: Path) -> None:
    machine = trained(seed=seed)
    (snapshot,) = read_snapshots(written(tmp_path / "a.pickle", machine.dump()))
    history = explain_snapshot(snapshot)
    top = max(machine.books, key=lambda held: sum(held.values()))
    assert history.peak == sum(top.values())
    assert history.owners == top
    totals = [sum(values) for values in zip(*history.curve.values(), strict=True)]
    assert max(totals) == history.peak
    assert len(history.times) <= 400
    assert history.reserved_peak == machine.reserved
    assert history.fragmentation == 1 - history.peak / history.reserved
    assert any(place == "model.py:10 forward" and owner == "activations" for owner, place, _, _ in history.places)
    assert sum(size for _, _, size, _ in history.places) == history.peak  # few places here: none is left out


def test_a_history_that_lost_its_beginning(tmp_path: Path) -> None:
    """A ring buffer keeps the last events: what was there before is known by what is there at the end or is freed."""
    machine = trained()
    whole = explain_snapshot(read_snapshots(written(tmp_path / "a.pkl", machine.dump()))[0])
    step = (len(machine.trace)) * 2 // 3  # the last step
    part = explain_snapshot(read_snapshots(written(tmp_path / "b.pkl", machine.dump(step)))[0])
    tops = machine.books[step:]
    assert part.peak == max(sum(held.values()) for held in tops)
    assert part.owners["parameters"] == whole.owners["parameters"]
    assert part.owners["optimizer"] == max(held["optimizer"] for held in tops)
    assert part.reserved_peak == whole.reserved_peak


def test_a_block_that_waits_to_be_freed_counts_once(tmp_path: Path) -> None:
    """Its free was requested, and another stream still uses it: the history and the end both list it."""
    machine = Machine()
    machine.take(4 * KIB, "parameters", MAKE)
    pending = machine.take(16 * KIB, "temporary", FORWARD)
    size, _, frames = machine.alive.pop(pending)
    machine._event("free_requested", pending, size, [])
    found = machine.dump()
    blocks = [dict(size=size, state="active_awaiting_free", address=pending, frames=frames)]
    found["segments"][-1] = dict(device=0, address=pending, total_size=size, blocks=blocks)
    history = explain_snapshot(read_snapshots(written(tmp_path / "a.pickle", found))[0])
    assert history.peak == 20 * KIB
    assert history.allocations == 2
    assert history.fragmentation == 0


class Danger:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({"segments": [], "device_traces": [Danger()]}), "asks for posix.system"),
        (pickle.dumps([1, 2]), "_dump_snapshot writes one"),
        (b"\x80\x05nothing", "is not a snapshot"),
        (pickle.dumps({"segments": [{"device": 0}], "device_traces": [[]]}), "cannot be read"),
        (pickle.dumps({"segments": [], "device_traces": []}), "no device"),
        (b"", "is not a snapshot"),
    ],
)
def test_what_is_refused(content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    assert main(["trace", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_the_verb_compares_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path / "before.pickle", trained(layers=3).dump())
    after = written(tmp_path / "after.pickle", trained(layers=4).dump())
    assert main(["trace", str(after), "--against", str(before), "--json", "--html", str(tmp_path / "page.html")]) == 0
    (said,) = json.loads(capsys.readouterr().out)["memory_snapshots"]
    rows = {row["name"]: row for row in said["against"]["differences"]}
    assert rows["peak"]["second"] == said["peak"]
    assert rows["peak"]["second"] > rows["peak"]["first"]
    assert rows["activations"]["second"] == said["owners"]["activations"]
    page = (tmp_path / "page.html").read_text()
    assert page.count("<polygon") >= 4
    assert main(["trace", str(after), "--against", str(before), "--fail-above", "1"]) == 1
    shown = capsys.readouterr().out
    assert "activations" in shown
    assert "model.py:10 forward" in shown
    assert main(["trace", str(after), "--against", str(tmp_path / "nowhere")]) == 2


def test_a_plan_stands_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text("[model]\nlayers = 2\nhidden = 64\nheads = 4\n[train]\nseq_len = 32\nglobal_batch = 2\n")
    path = written(tmp_path / "a.pickle", trained().dump())
    assert main(["plan", str(run), "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["memory"]["stages"]
    assert main(["trace", str(path), "--against", str(run), "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["memory_snapshots"]
    rows = {row["name"]: row["first"] for row in said["against"]["differences"]}
    assert rows["parameters"] == stage["parameters"]
    assert rows["temporary"] == stage["logits"] + stage["gathered"] + stage["buffers"]
    assert rows["peak"] == pytest.approx(sum(stage.values()) - stage["workspace"])


def test_a_profile_with_memory_is_compared_with_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = trained()
    history = [[e["action"], e["addr"], e["size"], e["time_us"]] for e in machine.trace]
    profile = tmp_path / "profile"
    shutil.copytree(H200, profile)
    (profile / "memory").mkdir()
    with gzip.open(profile / "memory" / "rank-00000.json.gz", "wt") as file:
        json.dump(dict(owners={}, allocator=dict(history=history, segments=[], marks=[], owners=[])), file)
    old = H200 / "ranks" / "rank-00000.json.gz"
    assert main(["trace", str(profile), "--against", str(old), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["against"]["passed"]
    assert "against" not in said["memory_snapshots"][0]
    snapshot = written(tmp_path / "a.pickle", machine.dump())
    assert main(["trace", str(snapshot), "--against", str(old)]) == 2
    assert "has no memory to compare with" in capsys.readouterr().err


def test_what_profile_records(tmp_path: Path) -> None:
    """The same history without stacks, and with marks of passes and layers and the owners of what stays."""
    machine = trained()
    history = [[e["action"], e["addr"], e["size"], e["time_us"]] for e in machine.trace]
    marks: list[list[Any]] = []
    for event in machine.trace:
        if event["action"] == "alloc":
            which = {"forward": "forward", "step": "optimizer", "__init__": "other", "": "backward"}[
                event["frames"][0]["name"] if event["frames"] else ""
            ]
            marks.append([event["time_us"] - 3, which, "layers.1" if which == "forward" else ""])
    dump = machine.dump()
    segments = [
        dict(address=s["address"], bytes=s["total_size"], blocks=[[b["size"], b["state"]] for b in s["blocks"]])
        for s in dump["segments"]
    ]
    owners = [[address, owner] for address, (_, owner, _) in machine.alive.items()]
    path = tmp_path / "rank-00003.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(dict(owners={}, allocator=dict(history=history, segments=segments, marks=marks, owners=owners)), file)
    snapshot = read_profiled(path, 3)
    assert snapshot is not None
    history = explain_snapshot(snapshot)
    top = max(machine.books, key=lambda held: sum(held.values()))
    assert history.owners == top
    assert history.layers == {"layers.1": top["activations"]}
    with gzip.open(path, "wt") as file:
        json.dump(dict(owners={}, allocator={}), file)
    assert read_profiled(path, 3) is None


def test_a_damaged_file_of_profile(tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    text = packer.compress(b'{"allocator": {"history": [') + packer.flush(zlib.Z_FULL_FLUSH)
    path = tmp_path / "rank-00000.json.gz"
    path.write_bytes(text + b"\xff" * 64)
    with pytest.raises(UserError, match="is not the memory of a profiled rank"):
        read_profiled(path, 0)
