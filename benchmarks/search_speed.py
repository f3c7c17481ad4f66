"""How many layouts a second the search goes through, beside Calculon (Isaev et al. 2023), on one model and cluster in one
run: GPT-3 175B on 512 A100. Calculon is asked for some 300 layouts spread over part of its own search (one network, no offloading,
its debug log off), one after the other on one core. Ours is the
time and memory of every legal layout by `plan/search/screen.py`, also on one core, tables and all, none left out for being too slow
or too large (the search leaves those out and is faster for it). Below 200,000 a second it is a failure, and so is a search for
Llama 3 405B on 16,384 H100 that takes 3 seconds or more from the shell (median of the rounds).

Calculon is not on PyPI (the package of that name is another). To measure it too:

    git clone https://github.com/calculon-ai/calculon && pip install psutil
    python benchmarks/search_speed.py --calculon ./calculon [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.plan.search.screen import Space
from shardwise.run import run_from_dict

REQUIRED = 200_000
SECONDS = 3.0
BATCH = 1536
SHELL = (
    "--model.preset=llama3-405b --layout=auto --cluster.chip=h100 --cluster.nodes=2048 --train.global_batch=2048 "
    "--train.seq_len=8192 --train.dtype=bfloat16"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calculon", type=Path, help="a clone of Calculon's repository")
    parser.add_argument("--layouts", type=int, default=300, help="layouts Calculon is asked for (default: 300)")
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    ours: list[float] = []
    theirs: list[float] = []
    shell: list[float] = []
    for _ in range(args.rounds):
        count, seconds = screened()
        ours.append(count / seconds)
        if args.calculon:
            theirs.append(calculon_rate(args.calculon, args.layouts))
        took, searched, simulated = from_shell()
        shell.append(took)
    rate, wall = statistics.median(ours), statistics.median(shell)
    result = {
        "layouts": count,
        "layouts_per_second": rate,
        "calculon_layouts_per_second": statistics.median(theirs) if theirs else None,
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if theirs else None,
        "llama3_405b_seconds": wall,
        "llama3_405b_searched": searched,
        "llama3_405b_simulated": simulated,
    }
    print(json.dumps(result) if args.json else words(result))
    return 0 if rate >= REQUIRED and wall < SECONDS else 1


def words(result: dict[str, Any]) -> str:
    """The result for people."""
    peer = "Calculon was not measured: give --calculon the folder of its repository"
    if result["ratio"]:
        peer = f"Calculon: {result['calculon_layouts_per_second']:,.0f} layouts a second; ratio {result['ratio']:,.0f}"
    return "\n".join(
        [
            f"GPT-3 175B on 512 A100: {result['layouts']:,} legal layouts, {result['layouts_per_second']:,.0f} a second "
            f"(required: {REQUIRED:,})",
            peer,
            f"Llama 3 405B on 16,384 H100 from the shell: {result['llama3_405b_seconds']:.2f} s for "
            f"{result['llama3_405b_searched']:,} layouts, {result['llama3_405b_simulated']} of them played (required: under "
            f"{SECONDS:g} s)",
        ]
    )


def screened() -> tuple[int, float]:
    """Legal layouts, and the seconds to list, check and screen them all."""
    run = run_from_dict(
        dict(
            model=dict(preset="gpt3-175b"),
            layout="auto",
            train=dict(global_batch=BATCH, seq_len=2048, dtype="bfloat16"),
            cluster=dict(chip="a100-80g", nodes=64),
        )
    )
    start = time.perf_counter()
    space = Space(run, 512, 8)
    answered = 0
    for group in space.groups:
        for one in group.screen(group.schedules, group.rows()):
            answered += int(np.isfinite(one.seconds).sum())
    seconds = time.perf_counter() - start
    if answered != space.count:
        raise SystemExit(f"{answered} layouts have a time, but {space.count} are legal")
    return answered, seconds


def from_shell() -> tuple[float, int, int]:
    """Wall seconds of `shardwise plan` for a whole search, layouts searched and played."""
    command = [sys.executable, "-m", "shardwise", "plan", *SHELL.split()]
    # Installed packages have their bytecode; the first round writes it where it is missing.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    seconds = time.perf_counter() - start
    found = re.match(r"([\d,]+) layouts considered, ([\d,]+) simulated", done.stdout)
    if found is None:
        raise SystemExit(f"the search said something else: {done.stdout[:200]}")
    return seconds, *(int(number.replace(",", "")) for number in found.groups())  # type: ignore[return-value]


def calculon_rate(folder: Path, most: int) -> float:
    """Layouts a second that Calculon evaluates, of those its own search goes through."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from calculon.llm.llm import Llm  # type: ignore[import-not-found]
    from calculon.system import System  # type: ignore[import-not-found]

    model = next(folder.glob("**/gpt3-175B.json"))
    app = Llm.Application(json.loads(model.read_text()))
    system = System(json.loads(next(folder.glob("**/a100_80g.json")).read_text()))
    make = getattr(Llm.Execution, "from_json", Llm.Execution)
    logger = logging.getLogger("calculon")
    start, done = time.perf_counter(), 0
    for execution in executions(Llm, app, most):
        try:
            one = Llm(app, logger)
            one.compile(system, make(execution))
            one.run(system)
        except Llm.Error:
            pass  # it does not fit, or is not legal; that too is an answer
        done += 1
    return done / (time.perf_counter() - start)


def executions(llm: Any, app: Any, most: int) -> Iterator[dict[str, Any]]:
    """Calculon's own search space, spread over it, so many."""
    every = []
    for tensor in llm.get_all_tensor_parallelisms(512, app.hidden, app.attn_heads):
        for pipeline in llm.get_all_pipeline_parallelisms(512, tensor, app.num_blocks):
            data = llm.get_data_parallelism(512, tensor, pipeline)
            for chunks in llm.get_valid_pipeline_interleavings(app.num_blocks, pipeline):
                for size in llm.get_valid_microbatch_sizes(app.seq_size, tensor, data, BATCH, pipeline):
                    every += [(tensor, pipeline, data, chunks, size, again) for again in ("full", "attn_only", "none")]
    for tensor, pipeline, data, chunks, size, again in every[:: max(1, len(every) // most)]:
        yield dict(
            num_procs=512, tensor_par=tensor, pipeline_par=pipeline, data_par=data, tensor_par_net=0, pipeline_par_net=1,
            data_par_net=1, batch_size=BATCH, microbatch_size=size, datatype="float16", fused_activation=True,
            attention_type="multihead", activation_recompute=again, pipeline_interleaving=chunks,
            optimizer_sharding=data > 1, tensor_par_comm_type="rs_ag", tensor_par_overlap="none", seq_par_ag_redo=False,
            data_par_overlap=data > 1, weight_offload=False, activations_offload=False, optimizer_offload=False,
            training=True,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
