"""The critical path on jobs whose answer is plain to see."""

from __future__ import annotations

from pathlib import Path

from made_jobs import Host, explained, job_member, message

from shardwise.trace.answers import CriticalPath, Explanation


def path_of(answers: Explanation) -> CriticalPath:
    """The path, whose parts add up."""
    path = answers.critical_path
    assert path is not None
    assert sum(path.categories.values()) == sum(path.ranks.values()) == path.length
    assert all(end > start for *_, start, end in path.segments)
    return path


def test_a_device_that_is_behind(tmp_path: Path) -> None:
    host = Host()
    host.step(0, 0, 1000)
    for number in range(5):
        host.launch("gemm", 10 * number, 100 * (number + 1), 100)
    path = path_of(explained(tmp_path, {0: ("", host.events)}))
    # The host alone until the first launch, which the device took up later; then one product after another.
    assert path.length == 600
    assert path.categories == {"compute": 500, "host": 100}


def test_a_host_that_is_behind(tmp_path: Path) -> None:
    host = Host()
    host.step(0, 0, 1000)
    for number in range(5):
        host.launch("gemm", 100 * number, 100 * number + 10, 20)
    path = path_of(explained(tmp_path, {0: ("", host.events)}))
    assert path.categories == {"host": 410, "compute": 20}


def test_a_host_that_waited(tmp_path: Path) -> None:
    host = Host()
    host.step(0, 0, 1000)
    host.launch("gemm", 5, 10, 200)
    host.span("cuda_runtime", "cudaStreamSynchronize", 20, 195)
    host.launch("gemm", 250, 260, 50)
    path = path_of(explained(tmp_path, {0: ("", host.events)}))
    # 0 to 10 the host, the product to 210, the host to 260 (5 of it still in the call), the last product.
    assert path.categories == {"compute": 250, "host": 60}


def test_a_launch_that_waited_for_room(tmp_path: Path) -> None:
    host = Host()
    host.step(0, 0, 10_000)
    for number in range(9):
        host.launch("gemm", 10 * number, 100 + 500 * number, 500)
    host.launch("copy", 200, 4650, 50, 8, took=4400)  # the queue was full until the device had done nearly all
    path = path_of(explained(tmp_path, {0: ("", host.events)}))
    assert path.categories["compute"] > 4000


def test_another_stream(tmp_path: Path) -> None:
    host = Host()
    host.step(0, 0, 1000)
    host.launch("gemm", 1, 10, 90)
    host.launch("ncclDevKernel_AllReduce", 2, 100, 300, 9, **message("allreduce", 4, "5", 2))
    host.launch("adam", 3, 402, 50)  # waits for the all-reduce of the other stream
    member = job_member(0, 2, {"5": ("replicate", (0, 1))})
    path = path_of(explained(tmp_path, {0: (member, host.events)}))
    assert path.categories == {"communication replicate": 300, "compute": 140, "host": 10, "idle": 2}


def test_the_last_rank_to_come(tmp_path: Path) -> None:
    files = {}
    for rank, work in ((0, 100), (1, 700), (2, 200)):
        host = Host()
        host.step(0, 0, 2000)
        host.launch("gemm", 0, 10, work)
        host.launch("nccl", 1, 10 + work, 810 - 10 - work, 9, **message("allreduce", 4, "5", 3, 0))
        host.launch("adam", 2, 810, 90 if rank == 2 else 40)
        files[rank] = (job_member(rank, 3, {"5": ("shard", (0, 1, 2))}), host.events)
    path = path_of(explained(tmp_path, files))
    # Rank 2 ends last; before that it waited for rank 1, whose product was the longest.
    assert path.ranks == {1: 710, 2: 190}
    assert path.categories == {"compute": 790, "communication shard": 100, "host": 10}
    assert path.kernels["gemm"] == 700
