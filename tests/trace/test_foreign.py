"""Profiles of Nsight Systems and of XLA give the answers that the same times give in PyTorch's own format."""

from __future__ import annotations

import gzip
import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main

PID, TID = 4242, 17
STEPS = [(1, 0, 1_000_000), (2, 1_000_000, 1_000_000)]
KERNELS = [  # name, start, length, stream, in each step
    ("sm90_xmma_gemm_bf16", 100_000, 300_000, 7),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)", 350_000, 200_000, 20),
    ("vectorized_elementwise_kernel", 600_000, 50_000, 7),
]
COPY = (700_000, 100_000, 9)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def kineto(path: Path) -> Path:
    """The times as PyTorch writes them."""
    events: list[dict[str, Any]] = []
    for number, begin, length in STEPS:
        events.append(
            dict(
                ph="X",
                cat="user_annotation",
                name=f"ProfilerStep#{number}",
                pid=1,
                tid=1,
                ts=begin / 1e3,
                dur=length / 1e3,
            )
        )
        for name, start, long, stream in KERNELS:
            events.append(dict(ph="X", cat="kernel", name=name, pid=0, tid=stream, ts=(begin + start) / 1e3, dur=long / 1e3,
                               args=dict(device=0, stream=stream)))  # fmt: skip
        start, long, stream = COPY
        events.append(dict(ph="X", cat="gpu_memcpy", name="Memcpy HtoD", pid=0, tid=stream, ts=(begin + start) / 1e3,
                           dur=long / 1e3, args=dict(device=0, stream=stream)))  # fmt: skip
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def report(path: Path, processes: int = 1, version: str = "new") -> Path:
    """The same as `nsys export --type sqlite` writes them; an older version has fewer columns."""
    base = sqlite3.connect(path)
    names: dict[str, int] = {}

    def text(value: str) -> int:
        return names.setdefault(value, len(names) + 1)

    long = "" if version == "old" else ", demangledName INTEGER"
    base.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    base.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                 f"correlationId INTEGER, globalPid INTEGER, shortName INTEGER{long})")  # fmt: skip
    base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                 "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER)")  # fmt: skip
    base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
                 "correlationId INTEGER, nameId INTEGER)")  # fmt: skip
    base.execute(
        "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER)"
    )
    base.execute("CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, smCount INTEGER, totalMemory INTEGER)")
    base.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200', 132, 150000000000)")
    for rank in range(processes):
        process = (PID + rank) << 24
        number = 0
        for step, begin, length in STEPS:
            base.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)",
                (begin, begin + length, f"step {step}", process | TID),
            )
            operator = text(f"aten::mm, seq = {step}, op_id = 9")
            base.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, ?, ?)",
                (begin + 10, begin + 90_000, operator, process | TID),
            )
            for name, start, duration, stream in KERNELS:
                number += 1
                row = [begin + start, begin + start + duration, rank, stream, number, process, text(name)]
                row += [] if version == "old" else [text(name)]
                base.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * len(row))})", row)
                launch = text("cudaLaunchKernel_v7000")
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)",
                             (begin + start - 50_000, begin + start - 45_000, process | TID, number, launch))  # fmt: skip
            start, duration, stream = COPY
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, 4096, 1)",
                         (begin + start, begin + start + duration, rank, stream, 900 + step, process))  # fmt: skip
    base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, value) for value, number in names.items()])
    base.commit()
    base.close()
    return path


def answers(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    assert main(["trace", str(path), "--json", "--no-cache"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("version", ["new", "old"])
def test_a_report_of_nsys(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = answers(capsys, kineto(tmp_path / "a.json"))
    said = answers(capsys, report(tmp_path / "report.sqlite", version=version))
    assert said["ranks"] == same["ranks"]
    assert said["steps"] == [1, 2]
    assert {row["name"]: row["total"] for row in said["kernels"]} == {
        row["name"]: row["total"] for row in same["kernels"]
    }
    assert said["devices"] == {"0": "NVIDIA H200"}
    assert any(row["name"] == "cudaLaunchKernel" and row["count"] == 6 for row in said["calls"])
    (lack,) = said["problems"]
    assert lack.startswith(str(tmp_path / "report.sqlite"))
    assert "no shapes" in lack


def test_a_cuda_graph_keeps_its_device_busy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """nsys records it as a whole, without its kernels; one whose times are unknown is nowhere."""
    before = answers(capsys, report(tmp_path / "report.sqlite"))["ranks"]["0"]
    base = sqlite3.connect(tmp_path / "report.sqlite")
    base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, graphId INTEGER, "
                 "contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER)")  # fmt: skip
    graphs = [(820_000, 940_000, 0, 5, 1, 7, 950, PID << 24), (0, 0, 0, 6, 1, 7, 951, PID << 24)]
    base.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, ?, ?, ?, ?, ?, ?)", graphs)
    base.commit()
    base.close()
    said = answers(capsys, tmp_path / "report.sqlite")
    after = said["ranks"]["0"]
    assert after["compute"] == before["compute"] + 120_000
    assert after["idle"] == before["idle"] - 120_000
    assert [row["total"] for row in said["kernels"] if row["name"].startswith("CUDA graph")] == [120_000]


def test_the_processes_of_a_report_are_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = answers(capsys, report(tmp_path / "report.sqlite", processes=3))
    assert set(said["ranks"]) == {"0", "1", "2"}
    alone = answers(capsys, report(tmp_path / "node-rank5.sqlite"))
    assert set(alone["ranks"]) == {"5"}  # by the name of the file


def lines_of_xla() -> dict[str, list[tuple[str, list[tuple[str, int, int]]]]]:
    """Planes, their lines, their events."""
    streams: dict[str, list[tuple[str, int, int]]] = {
        "Stream #7(MemcpyD2D,Compute)": [],  # named by all that it ever ran
        "Stream #20(Compute)": [],
        "Stream #9(MemcpyH2D)": [],
    }
    place = {int(name[8:].split("(")[0]): name for name in streams}
    for _, begin, _ in STEPS:
        for name, start, long, stream in KERNELS:
            streams[place[stream]].append((name, begin + start, long))
        streams["Stream #9(MemcpyH2D)"].append(("MemcpyH2D", begin + COPY[0], COPY[1]))
    steps = [(str(number), begin, length) for number, begin, length in STEPS]
    modules = [("jit_train_step", 0, 2_000_000)]
    return {
        "/host:CPU": [("python", [("train", 0, 2_000_000)])],
        "/device:GPU:0": [*streams.items(), ("Steps", steps), ("XLA Modules", modules)],
    }  # fmt: skip


def chrome_of_xla(path: Path) -> Path:
    events: list[dict[str, Any]] = []
    for pid, (plane, lines) in enumerate(lines_of_xla().items(), 1):
        events.append(dict(ph="M", pid=pid, name="process_name", args=dict(name=plane)))
        for tid, (name, spans) in enumerate(lines, 1):
            events.append(dict(ph="M", pid=pid, tid=tid, name="thread_name", args=dict(name=name)))
            events += [
                dict(ph="X", pid=pid, tid=tid, name=what, ts=start / 1e3, dur=long / 1e3) for what, start, long in spans
            ]
    text = json.dumps({"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()))
    return path


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def planes_of_xla(path: Path) -> Path:
    """Written with the numbers of xplane.proto, by hand."""
    space = b""
    for plane, lines in lines_of_xla().items():
        names = {name: n for n, name in enumerate(sorted({what for _, spans in lines for what, _, _ in spans}), 1)}
        body = field(2, plane)
        for number, (name, spans) in enumerate(lines, 1):
            began = 500  # events count from the line's own beginning
            events = b"".join(
                field(4, field(1, names[what]) + field(2, (start + 1000 - began) * 1000) + field(3, long * 1000))
                for what, start, long in spans
            )  # fmt: skip
            body += field(3, field(1, number) + field(2, name) + field(3, began) + events)
        for name, number in names.items():
            body += field(4, field(1, number) + field(2, field(1, number) + field(2, name)))
        space += field(1, body)
    path.write_bytes(space)
    return path


@pytest.mark.parametrize("write", [chrome_of_xla, planes_of_xla])
def test_a_profile_of_xla(write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = answers(capsys, kineto(tmp_path / "a.json"))
    name = "host.trace.json.gz" if write is chrome_of_xla else "host.xplane.pb"
    (tmp_path / "jax").mkdir()
    said = answers(capsys, write(tmp_path / "jax" / name))
    assert said["ranks"] == same["ranks"]
    assert said["steps"] == [1, 2]
    assert "XLA records no shapes" in said["problems"][0]
    both = write(tmp_path / "jax" / name).parent
    planes_of_xla(both / "host.xplane.pb")
    chrome_of_xla(both / "host.trace.json.gz")
    assert answers(capsys, both)["ranks"] == same["ranks"]  # a folder that has it twice


def test_collectives_of_a_tpu_are_communication(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, Any]] = [
        dict(ph="M", pid=1, name="process_name", args=dict(name="/device:TPU:0")),
        dict(ph="M", pid=1, tid=2, name="thread_name", args=dict(name="XLA Ops")),
        dict(ph="M", pid=1, tid=3, name="thread_name", args=dict(name="Framework Name Scope")),
        dict(ph="X", pid=1, tid=2, name="fusion.7", ts=0, dur=600),
        dict(ph="X", pid=1, tid=2, name="all-reduce.3", ts=600, dur=400),
        dict(ph="X", pid=1, tid=2, name="while.9", ts=0, dur=1000),  # a loop is the operations in it
        dict(ph="X", pid=1, tid=3, name="layer", ts=0, dur=1000),
    ]
    path = tmp_path / "vm.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"metadata": {"highres-ticks": True}, "traceEvents": events}).encode()))
    (row,) = answers(capsys, path)["ranks"].values()
    assert (row["compute"], row["communication"], row["exposed_communication"]) == (600_000, 400_000, 400_000)


def test_ranks_of_xla_are_in_the_order_of_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not in that of their names as text, where device 10 comes before 2."""
    events: list[dict[str, Any]] = []
    for device in range(12):
        events += [
            dict(ph="M", pid=device + 1, name="process_name", args=dict(name=f"/device:GPU:{device}")),
            dict(ph="M", pid=device + 1, tid=1, name="thread_name", args=dict(name="Stream #1(Compute)")),
            dict(ph="X", pid=device + 1, tid=1, name="fusion", ts=0, dur=100 + device),
        ]
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"metadata": {"highres-ticks": True}, "traceEvents": events}).encode()))
    rows = answers(capsys, path)["ranks"]
    assert {rank: row["compute"] for rank, row in rows.items()} == {str(n): (100 + n) * 1000 for n in range(12)}


def test_pytorch_s_own_files_of_that_name_stay_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host_1.2.pt.trace.json.gz"
    path.write_bytes(gzip.compress(kineto(tmp_path / "a.json").read_bytes()))
    assert not answers(capsys, path)["problems"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.sqlite", b"SQLite format 3\0" + b"\0" * 100, "cannot be read as a report"),
        ("host.xplane.pb", b"\x0a\xff\xff\x03abc", "ends too early"),
        ("host.xplane.pb", field(1, field(2, "/host:CPU")), "without a device"),
    ],
)
def test_broken_ones_get_a_sentence(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["trace", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_a_damaged_trace_of_xla(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its beginning is whole: it is known to be of XLA, and zlib gives up later."""
    whole = gzip.decompress(chrome_of_xla(tmp_path / "whole.trace.json.gz").read_bytes())
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(whole[:-2] + b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(packed + b"\xff" * 64)
    assert main(["trace", str(path)]) == 2
    assert "cannot be read as a profile of XLA" in capsys.readouterr().err


def test_a_database_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other_database(tmp_path / "other.sqlite")
    assert main(["trace", str(tmp_path / "other.sqlite")]) == 2
    assert "not a report of Nsight Systems" in capsys.readouterr().err


def other_database(path: Path) -> None:
    base = sqlite3.connect(path)
    base.execute("CREATE TABLE runs (name TEXT)")
    base.commit()
    base.close()


def test_a_folder_with_files_of_others_is_still_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What another program left there is nobody's mistake; a broken profile is said, and the rest is read."""
    kineto(tmp_path / "rank0.json")
    other_database(tmp_path / "mlflow.db")
    (tmp_path / "config.json").write_text('{"layers": 2}')
    said = answers(capsys, tmp_path)
    assert set(said["ranks"]) == {"0"}
    assert said["problems"] == []
    (tmp_path / "host.xplane.pb").write_bytes(b"\x0a\xff\xff\x03abc")
    said = answers(capsys, tmp_path)
    assert set(said["ranks"]) == {"0"}
    (problem,) = said["problems"]
    assert str(tmp_path / "host.xplane.pb") in problem
    assert "ends too early" in problem


def test_a_folder_with_nothing_but_broken_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other_database(tmp_path / "mlflow.db")
    assert main(["trace", str(tmp_path)]) == 2
    assert "no profile found" in capsys.readouterr().err
    (tmp_path / "host.xplane.pb").write_bytes(b"\x0a\xff\xff\x03abc")
    assert main(["trace", str(tmp_path)]) == 2
    assert "ends too early" in capsys.readouterr().err


def test_reports_of_several_nodes_are_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each numbers its processes from 0; together they are numbered on, node 2 before node 10."""
    for node, processes in ((2, 2), (10, 3)):
        report(tmp_path / f"node{node}.sqlite", processes)
    said = answers(capsys, tmp_path)
    assert set(said["ranks"]) == {"0", "1", "2", "3", "4"}
    (note,) = [problem for problem in said["problems"] if "no shapes" not in problem]
    assert note.startswith(str(tmp_path / "node10.sqlite"))
    assert "numbered from 2 on" in note
    assert main(["trace", str(tmp_path), str(tmp_path / "node2.sqlite"), "--json", "--no-cache"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == said["ranks"]  # one that is named and in the folder


def test_problems_name_the_user_s_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files of one rank, not the temporary ones that were made of them."""
    first, second = (report(tmp_path / name) for name in ("a-rank3.sqlite", "b-rank3.sqlite"))
    said = answers(capsys, tmp_path)
    assert set(said["ranks"]) == {"3"}
    assert f"{second}: says it is rank 3, as {first} does; it is left out" in said["problems"]


def test_a_later_profile_of_one_host_is_not_another_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`jax.profiler` writes a folder for each profile, with the name of the host in it."""
    events: list[dict[str, Any]] = []
    for device in range(2):
        events += [
            dict(ph="M", pid=device + 1, name="process_name", args=dict(name=f"/device:GPU:{device}")),
            dict(ph="M", pid=device + 1, tid=1, name="thread_name", args=dict(name="Stream #1(Compute)")),
            dict(ph="X", pid=device + 1, tid=1, name="fusion", ts=0, dur=100),
        ]
    text = json.dumps({"metadata": {"highres-ticks": True}, "traceEvents": events})
    for name in ("monday/host", "tuesday/host", "tuesday/other"):
        path = tmp_path / f"{name}.trace.json.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    said = answers(capsys, tmp_path)
    assert set(said["ranks"]) == {"0", "1", "2", "3"}
    left = [problem for problem in said["problems"] if "left out" in problem]
    assert len(left) == 2
    assert all(problem.startswith(str(tmp_path / "tuesday/host.trace.json.gz")) for problem in left)
