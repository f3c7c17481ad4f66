"""Llama-3-8B with sequences of 8192 tokens and all parameters trained on one GPU: with the optimizer on the host, and resident.

First the link to the host and the host's own updates are measured as `shardwise bench` measures them; the plans are made with that.
Each case trains in a process of its own on random tokens, compiled, in bfloat16. The time is the median distance of CUDA events
between steps that nobody waits for, memory the most that the allocator had given out after the first steps, and of the host what
the process had at its peak. Both cases have the same batch, which the host's case takes in one microbatch: the larger it is, the
less the update weighs. The resident one takes sequence by sequence and keeps as many activations as fit. `recompute` and `swap`
take steps of one sequence with a resident optimizer and without a compiler: all layers recomputed, and with the planner's choice
for each tensor of a layer to stay, to be recomputed, or to wait on the host, at the same memory (beside the optimizer's 107 GiB,
the activations of several sequences would not fit a host of 128 GiB).

    python benchmarks/gpu/offload.py --output offload.json [--cases host resident recompute swap] [--batch 7] [--steps 4]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from shapes import SHAPES, need_gpu

GIB = 2**30
WARM = 2
"""Steps before those that count: the first compiles and allocates."""
CASES: dict[str, dict[str, Any]] = {
    "host": dict(layout=dict(recompute="full"), memory=dict(optimizer="host"), micro=64),
    "recompute": dict(layout=dict(recompute="full"), memory={}, micro=1, batch=1, compile=False),
    "swap": dict(
        layout=dict(recompute="optimal", recompute_budget=1.0),
        memory=dict(activations="host"),
        micro=1,
        batch=1,
        compile=False,
    ),
    "resident": dict(layout=dict(recompute="budget", recompute_budget=6.0), memory={}, micro=1),
}


def run_of(case: str, batch: int, link: dict[str, float]) -> Any:
    """The run of a case, planned with what was measured of the host."""
    from shardwise.run import run_from_dict

    how = CASES[case]
    batch = how.get("batch", batch)
    memory = how["memory"] | (dict(update_gbs=link["update_gbs"]) if "optimizer" in how["memory"] else {})
    return run_from_dict(
        dict(
            model=SHAPES["8B"] | dict(rope_theta=500000.0),
            layout=how["layout"],
            train=dict(
                global_batch=batch, microbatch=min(how["micro"], batch), seq_len=8192, dtype="bfloat16", device="cuda",
                compile=how.get("compile", True), tune_products=False, cuda_graph=False,
            ),
            memory=memory,
            cluster=dict(chip="h200", host_gbs=min(link["to_host_gbs"], link["to_device_gbs"])),
        )
    )  # fmt: skip


def measured(case: str, batch: int, steps: int, link: dict[str, float]) -> dict[str, Any]:
    """One case, with its plan."""
    import torch

    from shardwise.measure.verify import random_batch
    from shardwise.plan.plan import plan
    from shardwise.train.step import TrainState

    run = run_of(case, batch, link)
    account = plan(run).account
    owners = account.memory.ranks[0]
    began = time.time()
    train_state = TrainState(run)
    torch.cuda.synchronize()
    ready = time.time() - began
    ends: list[Any] = []
    losses: list[float] = []
    result: Any = None
    for n in range(WARM + steps):
        previous, result = result, train_state.train_step(random_batch(run, n))
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        if previous is not None:
            losses.append(previous.read()[0])
        if n == 0:
            first = time.time() - began - ready
            torch.cuda.reset_peak_memory_stats()
    train_state.optimizer.finish()
    torch.cuda.synchronize()
    taken = [a.elapsed_time(b) / 1e3 for a, b in pairwise(ends[WARM - 1 :])]
    return dict(
        case=case, batch=batch, steps=taken, seconds=statistics.median(taken), planned=account.step_seconds,
        gib=torch.cuda.max_memory_allocated() / GIB, reserved_gib=torch.cuda.max_memory_reserved() / GIB,
        planned_gib=sum(size for owner, size in owners.items() if owner != "workspace") / GIB,
        owners={owner: size / GIB for owner, size in owners.items()}, breakdown=dict(account.breakdown),
        host_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, ready=ready, first_step=first, losses=losses,
        torch=torch.__version__, gpu=torch.cuda.get_device_name(),
    )  # fmt: skip


def measured_link() -> dict[str, float]:
    """GB/s of the link and of the host's updates."""
    import torch

    from shardwise.measure.bench.host import with_host
    from shardwise.measure.bench.machine import empty_profile

    device = torch.device("cuda")
    profile = asdict(with_host(device, empty_profile(device), 8.0))
    return {name: profile[key] for name, key in
            (("to_host_gbs", "to_host_gbs"), ("to_device_gbs", "to_device_gbs"), ("update_gbs", "host_update_gbs"))}  # fmt: skip


def main() -> int:
    """Measure the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["host", "resident"])
    parser.add_argument("--batch", type=int, default=7, help="sequences a step")
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed")
    parser.add_argument("--output", type=Path, default=Path("offload.json"))
    parser.add_argument("--alone", help="one case, with this link, as JSON")
    args = parser.parse_args()
    need_gpu()
    if args.alone:
        print(json.dumps(measured(args.cases[0], args.batch, args.steps, json.loads(args.alone))))
        return 0
    link = measured_link()
    print(f"link and host, GB/s: {link}", flush=True)
    results: list[dict[str, Any]] = []
    for case in args.cases:
        command = [
            sys.executable,
            __file__,
            "--cases",
            case,
            "--batch",
            args.batch,
            "--steps",
            args.steps,
            "--alone",
            json.dumps(link),
        ]
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            results.append(dict(case=case, error=f"ended with {done.returncode}"))
        else:
            results.append(json.loads(done.stdout.splitlines()[-1]))
        one = results[-1]
        if "error" not in one:
            print(
                f"{case}: {one['seconds']:.3f} s, planned {one['planned']:.3f} ({one['planned'] / one['seconds'] - 1:+.1%}); "
                f"{one['gib']:.2f} GiB, planned {one['planned_gib']:.2f} ({one['planned_gib'] / one['gib'] - 1:+.1%}); "
                f"host {one['host_gib']:.1f} GiB; ready in {one['ready']:.0f} s, first step {one['first_step']:.0f} s", flush=True,
            )  # fmt: skip
        else:
            print(one, flush=True)
        args.output.write_text(json.dumps(dict(link=link, cases=results), indent=1) + "\n")
    times = {one["case"]: one["seconds"] for one in results if "seconds" in one}
    if {"recompute", "swap"} <= times.keys():
        print(f"speed with swapped activations: {times['recompute'] / times['swap']:.2f} of full recomputation")
    if {"host", "resident"} <= times.keys():
        print(f"speed with the optimizer on the host: {times['resident'] / times['host']:.2f} of resident")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
