"""The commands that start a run on a list of hosts with torchrun: one for each host, to be run at the same time.

Torchrun has no queue, no time limit and no requeue. It kills ranks 30 seconds after it is asked to stop; a run that needs longer to
save is better started with `cluster.rendezvous`, as docs/clusters.md shows.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from shardwise.launch.job import Job

PORT = 29500


def lines(job: Job, hosts: Sequence[str]) -> list[str]:
    """The command of each host. All hosts must be able to reach the first one. The job's command ends in `-m shardwise`, which
    torchrun replaces."""
    found = []
    for node, host in enumerate(hosts):
        words = [*job.command[:-2], "-m", "torch.distributed.run", f"--nnodes={job.nodes}"]
        words += [f"--nproc-per-node={job.ranks_per_node}", f"--node-rank={node}", f"--master-addr={hosts[0]}"]
        words += [f"--master-port={PORT}", f"--max-restarts={job.run.train.restarts}"]
        words += ["-m", "shardwise", "train", str(job.run_file), "--out", str(job.folder), *job.overrides]
        exports = "".join(f"{name}={shlex.quote(value)} " for name, value in job.environment.items())
        there = f"cd {shlex.quote(str(job.work))} && {exports}{shlex.join(words)}"
        found.append(there if host in ("localhost", "127.0.0.1") else f"ssh {shlex.quote(host)} {shlex.quote(there)}")
    return found


def script(job: Job, hosts: Sequence[str]) -> str:
    """A script that starts all commands and waits for them; its exit code is that of the first host in the list that fails."""
    every = [f"{line} &\npids+=($!)" for line in lines(job, hosts)]
    notes = [f"# {note}" for note in job.notes]
    end = ["code=0", 'for pid in "${pids[@]}"; do wait "$pid" || code=$((code ? code : $?)); done', "exit $code", ""]
    return "\n".join(["#!/bin/bash", *notes, "pids=()", *every, *end])
