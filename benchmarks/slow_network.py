"""What compressed and rare exchanges bring where the network is slow: measured on one, beside the plan. Needs root, Linux and TUN.

Two network namespaces stand for two machines of two CPU ranks each. They are joined by a link that this script makes itself out of
two TUN devices and a process that hands packets on, at so many Mbit/s and so many milliseconds each way: that needs no netem in
the kernel. Four replicas train a small Llama over gloo. A step of each method is timed in the mean of whole rounds (`sync_every`),
by turns with the others, and the speed-up is against gradients as they are (DistributedDataParallel).

The plan says what the link adds to a step: its step less that on a link without delay and of a thousand times the rate.
`cluster.inter_gbs` is a rank's share of the link, `cluster.latency_ms` half of a round trip as it was measured, since the process
that hands packets on adds to the delay. What the ranks do besides, compressing included, is measured:
the same steps without the link, all ranks in one machine. The two together are the planned step.

    python benchmarks/slow_network.py [--mbit 200] [--delay 10] [--rounds 3] [--methods int8 onebit] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": dict(compress="int8"),
    "int4": dict(compress="int4"),
    "powersgd 4": dict(compress="powersgd"),
    "topk 1%": dict(compress="topk"),
    "onebit": dict(compress="onebit", compress_warmup=1),
    "DiLoCo 20": dict(sync_every=20),
    "DiLoCo 20, int4": dict(sync_every=20, compress="int4"),
}
MACHINES, EACH = 2, 2
SPACES = ("shardwise-a", "shardwise-b")
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
MTU = 32_000
PORT = 29_777
TRIPS = 40
"""Round trips whose median is taken."""


def make_run(layout: dict[str, Any], options: argparse.Namespace, delay: float, faster: float = 1.0) -> Any:
    """The run of a method, on the machines that the link of this delay joins, or a faster one."""
    from shardwise.run import run_from_dict

    ranks = MACHINES * EACH
    share = faster * options.mbit / 8e3 / EACH  # GB/s
    return run_from_dict(
        dict(
            model=dict(layers=2, hidden=256, heads=4, vocab=2048),
            layout=dict(replicate=ranks) | layout,
            train=dict(steps=10**6, global_batch=ranks, seq_len=32, device="cpu", guard="none"),
            cluster=dict(nodes=MACHINES, devices_per_node=EACH, inter_gbs=share, latency_ms=delay / faster),
        )
    )


def planned(layout: dict[str, Any], options: argparse.Namespace, delay: float) -> float:
    """Seconds that the link adds to a step, by the plan."""
    from shardwise.plan.plan import plan

    slow, fast = (
        plan(make_run(layout, options, delay, faster)).account.breakdown["replicate"] for faster in (1.0, 1e3)
    )
    return slow - fast


# The link.


def open_tun(space: str) -> int:
    """The file of a new TUN device inside of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    with open(f"/run/netns/{space}") as name:
        if libc.setns(name.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"slow0", IFF_TUN | IFF_NO_PI))
    libc.setns(before, CLONE_NEWNET)
    os.close(before)
    return tun


class Way:
    """One direction of the link: packets leave one after the other at its rate, and arrive after its delay."""

    def __init__(self, source: int, target: int, rate: float, delay: float) -> None:
        self.source, self.target, self.rate, self.delay = source, target, rate, delay
        self.free = 0.0
        self.packets: list[tuple[float, int, bytes]] = []
        self.count = 0
        self.ready = threading.Condition()
        for work in (self.read, self.write):
            threading.Thread(target=work, daemon=True).start()

    def read(self) -> None:
        while True:
            packet = os.read(self.source, MTU + 100)
            with self.ready:
                self.free = max(time.perf_counter(), self.free) + len(packet) / self.rate
                self.count += 1
                heapq.heappush(self.packets, (self.free + self.delay, self.count, packet))
                self.ready.notify()

    def write(self) -> None:
        while True:
            with self.ready:
                while not self.packets:
                    self.ready.wait()
                due = self.packets[0][0] - time.perf_counter()
                packet = heapq.heappop(self.packets)[2] if due <= 0 else None
            if packet is None:
                time.sleep(due)
            else:
                os.write(self.target, packet)


def link(mbit: float, delay: float) -> None:
    """Join the two namespaces until this process ends."""
    ends = [open_tun(space) for space in SPACES]
    for number, space in enumerate(SPACES, 1):
        inside = ["ip", "netns", "exec", space]
        for command in (
            ["ip", "addr", "add", f"10.77.0.{number}", "peer", f"10.77.0.{3 - number}", "dev", "slow0"],
            ["ip", "link", "set", "slow0", "up", "mtu", str(MTU)],
            ["ip", "link", "set", "lo", "up"],
            ["sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0"],
        ):
            subprocess.run(inside + command, check=True)
    os.nice(-15)  # a link does not wait for the processors that it joins
    Way(ends[0], ends[1], mbit * 1e6 / 8, delay * 1e-3)
    Way(ends[1], ends[0], mbit * 1e6 / 8, delay * 1e-3)
    print("joined", flush=True)
    sys.stdin.read()


# The ranks.


def measured_delay(rank: int) -> float:
    """Milliseconds from one machine to the other: half of a round trip of a byte, from the first rank to the last."""
    if rank == MACHINES * EACH - 1:
        with socket.create_server(("10.77.0.2", PORT + 1)) as server, server.accept()[0] as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while got := peer.recv(1):
                peer.sendall(got)
    if rank:
        return 0.0
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            peer = socket.create_connection(("10.77.0.2", PORT + 1))
            break
    trips = []
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(TRIPS):
            start = time.perf_counter()
            peer.sendall(b"x")
            peer.recv(1)
            trips.append(time.perf_counter() - start)
    return 1e3 * statistics.median(trips) / 2


def rank_of_a_machine(rank: int, options: argparse.Namespace) -> None:
    """One rank: rounds of all methods by turns; the first rank writes the seconds of a step."""
    import torch
    import torch.distributed as dist

    from shardwise.measure.verify import behind_warmup, random_batch
    from shardwise.train.step import TrainState

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    host = "127.0.0.1" if options.together else "10.77.0.1"
    delay = 0.0 if options.together else measured_delay(rank)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{PORT}", rank=rank, world_size=MACHINES * EACH)
    layouts = {name: METHODS[name] for name in options.methods}
    states = {
        name: TrainState(behind_warmup(make_run(layout, options, options.delay))) for name, layout in layouts.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    for number in range(options.rounds + 1):  # the first is a warm-up
        for name, state in states.items():
            batch = random_batch(state.run, rank)
            steps = layouts[name].get("sync_every", 3)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                state.train_step(batch).read()
            dist.barrier()  # a method that lets ranks run apart is done when the last of them is
            if number:
                seconds[name].append((time.perf_counter() - start) / steps)
    if rank == 0:
        Path(options.out).write_text(json.dumps(dict(delay=delay, seconds=seconds)))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, together: bool) -> dict[str, Any]:
    """The link's delay in milliseconds, and the seconds of a step of each method, round by round: over the link, or with all ranks
    `together` in one machine."""
    this = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/seconds"
        passed = ["--mbit", str(options.mbit), "--delay", str(options.delay), "--rounds", str(options.rounds)]
        passed += ["--out", out, "--methods", *options.methods]
        if together:
            return run_ranks([[*this, *passed, "--together"] for _ in range(MACHINES * EACH)], "lo", out)
        for space in SPACES:  # of a run that was killed
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "add", space], check=True)
        try:
            joined = subprocess.Popen([*this, *passed, "--link"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert joined.stdout is not None
            if joined.stdout.readline() != b"joined\n":
                raise RuntimeError("the link between the namespaces could not be made")
            inside = [["ip", "netns", "exec", SPACES[rank // EACH]] for rank in range(MACHINES * EACH)]
            found = run_ranks([[*where, *this, *passed] for where in inside], "slow0", out)
            joined.kill()
            return found
        finally:
            for space in SPACES:
                subprocess.run(["ip", "netns", "del", space], check=False)


def run_ranks(commands: list[list[str]], interface: str, out: str) -> dict[str, Any]:
    """What the first rank wrote."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*each, "--rank", str(n)], env=environment) for n, each in enumerate(commands)]
    codes = [each.wait() for each in ranks]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    found: dict[str, Any] = json.loads(Path(out).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--delay", type=float, default=10.0, help="milliseconds each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", default="")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--link", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--together", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.link:
        return link(options.mbit, options.delay)
    if options.rank >= 0:
        return rank_of_a_machine(options.rank, options)
    if "none" not in options.methods:
        options.methods.insert(0, "none")
    both = [measure(options, together) for together in (False, True)]
    apart, near = ({name: statistics.median(each) for name, each in found["seconds"].items()} for found in both)
    delay = both[0]["delay"]
    print(f"{options.mbit:g} Mbit/s, {options.delay:g} ms each way, measured {delay:.1f} ms")
    print(f"{'method':20} {'no link':>10} {'step':>10} {'planned':>10} {'speed-up':>9} {'planned':>8} {'off':>6}")
    records = []
    expected = {name: near[name] + planned(METHODS[name], options, delay) for name in apart}
    for name, measured in apart.items():
        got, wanted = apart["none"] / measured, expected["none"] / expected[name]
        print(
            f"{name:20} {near[name] * 1e3:7.0f} ms {measured * 1e3:7.0f} ms {expected[name] * 1e3:7.0f} ms "
            f"{got:9.2f} {wanted:8.2f} {got / wanted - 1:+6.0%}"
        )
        times = dict(near=near[name], seconds=measured, planned=expected[name])
        records.append(times | dict(method=name, speedup=got, planned_speedup=wanted))
    if options.json:
        Path(options.json).write_text(json.dumps(dict(delay=delay, methods=records), indent=1))
    return None


if __name__ == "__main__":
    main()
