"""Launches the ranks of a run: joins the ranks that torchrun, Slurm or Kubernetes started, or starts them on this machine, or on
several machines that meet at `cluster.rendezvous`.

Ranks started here have an agent (`faults/agent.py`): when a rank fails, the others are stopped within seconds, the user reads one
message that names the rank, and all are started again. If the number of ranks differs from the layout's, and `train.elastic` allows
it, the planner finds the best layout for them. Model and global batch stay the same, so the run continues with the same losses up
to rounding. Every machine and rank finds the same layout by itself, since the search is deterministic.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwise.hardware.chips import chip_of_driver_name
from shardwise.run import LayoutConfig, Problem, Run, UserError, to_dict
from shardwise.run.derive import planned_on_gpu
from shardwise.run.rules.check import broken_rules
from shardwise.train.faults.heartbeat import enable_flight_recorder
from shardwise.train.faults.ranks import GRACE, MISTAKE, Ranks, environment_of, free_port
from shardwise.train.processes.environment import Placement, RankEnvironment, place, slurm_address

ANSWER = 3
"""Exit code of a rank that succeeded with the answer no."""
_ANSWERS = "SHARDWISE_ANSWERS"
JOIN_SECONDS = 600.0
"""Seconds that a machine waits for the other machines of a run."""


def check_here(run: Run, environment: RankEnvironment | None) -> None:
    """Refuse a run that needs a different number of ranks than were started, or a GPU when there is none."""
    on_cpu = replace(run, train=replace(run.train, device="cpu"))
    broken = list(broken_rules(on_cpu)) if run.train.device == "auto" else []
    if broken:
        import torch

        if not torch.cuda.device_count():
            raise UserError(*(Problem(f"there is no GPU here: {rule.reason}", key=rule.key) for rule in broken))
    check_world(run, environment)


def check_world(run: Run, environment: RankEnvironment | None) -> None:
    """Refuse a run that needs a different number of ranks than were started."""
    needed = run.layout.world
    if run.layout.sync_elastic:
        needed //= run.layout.replicate
        reason = ""
        if environment is not None and not environment.has_agent:
            by = environment.launcher or "its launcher"
            reason = f"restarts replicas one by one, and {by} knows all ranks or none: start the run by `shardwise train` alone"
        elif run.cluster.devices_per_node % needed:
            here = run.cluster.devices_per_node
            reason = (
                f"needs every replica on one machine: {needed} ranks a replica do not divide the {here} of a machine"
            )
        if reason:
            raise UserError(Problem(reason, key="layout.sync_elastic"))
    if environment is not None and environment.world_size != needed:
        axes = ("replicate", "shard", "context", "tensor", "pipeline")
        sizes = " x ".join(f"{axis} {getattr(run.layout, axis)}" for axis in axes)
        reason = f"needs {needed} ranks ({sizes}), but {environment.world_size} were started"
        raise UserError(Problem(reason, key="layout"))
    if environment is None and run.cluster.nodes > 1 and not run.cluster.rendezvous:
        reason = (
            f"{run.cluster.nodes} nodes: `shardwise launch` writes what a scheduler needs; or start the same command on each of "
            f"them with torchrun or srun, {needed} ranks in all, or by hand with cluster.rendezvous = HOST:PORT of one of them"
        )
        raise UserError(Problem(reason, key="cluster.nodes"))


def check_gpus(run: Run) -> None:
    """Refuse to train a multi-rank run that was planned for GPUs on a machine without any: it would train on CPUs, unnoticed."""
    import torch

    if run.layout.world > 1 and planned_on_gpu(run) and run.train.device == "auto" and not torch.cuda.device_count():
        reason = (
            f'is "{run.cluster.chip}", and PyTorch sees no GPU here: ask the scheduler for GPUs (Slurm: --gpus-per-node='
            f'{run.cluster.devices_per_node}), or set train.device = "cpu" to train on CPUs, over gloo'
        )
        raise UserError(Problem(reason, key="cluster.chip"))


def join(environment: RankEnvironment, run: Run) -> Placement:
    """Become one of the ranks: choose a device and initialize the process group."""
    import torch
    import torch.distributed as dist

    from shardwise.model.device import use_expandable_segments

    enable_flight_recorder(os.environ)
    gpus = torch.cuda.device_count() if run.train.device != "cpu" else 0
    placement = place(run, environment, gpus, dist.is_nccl_available())
    if gpus:
        use_expandable_segments()
        torch.cuda.set_device(torch.device(placement.device))
    dist.init_process_group(
        placement.backend,
        init_method=f"tcp://{reachable(environment)}:{environment.port}",
        rank=environment.rank,
        world_size=environment.world_size,
        # Longer than the agent waits, so that the agent explains a hang before the transport times out.
        timeout=timedelta(seconds=max(600.0, 2 * run.train.hang_seconds)),
    )
    return placement


def describe_placement(environment: RankEnvironment, placement: Placement) -> str:
    """Backend and devices in one line."""
    import torch

    gpu = torch.cuda.get_device_name(torch.device(placement.device)) if placement.device != "cpu" else ""
    return placement.sentence(environment, gpu)


def reachable(environment: RankEnvironment) -> str:
    """The address where ranks meet. The network may not be able to resolve Slurm's name of a machine."""
    if environment.launcher == "srun":
        try:
            socket.getaddrinfo(environment.address, environment.port)
        except OSError:
            return slurm_address(environment.address)
    return environment.address


def leave() -> None:
    """Destroy the process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def start_local(arguments: Sequence[str], world: int, logs: Path, passed_on: Sequence[signal.Signals] = ()) -> int:
    """Run `shardwise ARGUMENTS` once as `world` ranks on this machine. Returns the exit code: 0 if all succeeded, ANSWER if the
    first rank's answer is no, 2 for a user's mistake, 1 for a failure. The first failure ends all ranks, without a restart: this is
    for short verbs, and for verbs that end with their first rank, to which the signals in `passed_on` are forwarded."""
    ranks = Ranks(logs)
    told = 0

    def pass_on(number: int, _: object) -> None:
        nonlocal told
        told = number
        if 0 not in ranks.pids:
            sys.exit(128 + number)
        ranks.signal(signal.Signals(number), [0])

    for number in passed_on:
        signal.signal(number, pass_on)
    port = free_port()
    environments = {r: environment_of(r, r, world, world, "127.0.0.1", port) for r in range(world)}
    try:
        ranks.start(arguments, {r: environment | {_ANSWERS: "yes"} for r, environment in environments.items()})
        while (failed := ranks.failed()) is None and ranks.running():
            time.sleep(0.1)
        if failed is None:
            return 0
        ranks.end(GRACE)
        if failed[1] == ANSWER:
            return ANSWER
        if told and failed == (0, -told):  # the signal killed it before it could handle it
            return 128 + told
        message = ranks.failure(*failed)
        if failed[1] != MISTAKE:
            message = f"error: {message}\nthe other ranks were stopped; their output is in {logs}"
        print(message, file=sys.stderr)
        return MISTAKE if failed[1] == MISTAKE else 1
    finally:
        ranks.end(0.0)


def answer(yes: bool) -> int:
    """The exit code of a verb that answers yes or no; a rank returns a different code for a no than for a failure."""
    return 0 if yes else ANSWER if _ANSWERS in os.environ else 1


def start_ranks(run: Run, out: Path, arguments: Sequence[str]) -> int:
    """Run `shardwise ARGUMENTS` as this machine's share of the ranks that the layout needs. Returns the exit code: 0 if all
    succeeded, 75 if asked to stop, 2 for a user's mistake, 1 if the run was given up."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from shardwise.checkpoint.folder import complete, step_of
    from shardwise.train.faults.agent import Agent

    if run.layout.sync_elastic:
        from shardwise.train.faults.replicas import Replicas

        return Replicas(run, out, arguments).execute()
    local = ranks_here(run)

    def arguments_for(world: int) -> list[str]:
        if world == run.layout.world:
            return list(arguments)
        fitted = fit_layout(run, world, max(1, world // local), chip_here(run))
        print(f"{world} of {run.layout.world} ranks are here; going on with {describe_layout(fitted)}", file=sys.stderr)
        return [*arguments, *(f"--{override}" for override in layout_overrides(fitted))]

    def saved_step() -> int:
        return max((step_of(folder) or 0 for folder in complete(out)), default=-1)

    with _rendezvous(run) as handler:
        spec = WorkerSpec("rank", local, handler, entrypoint=sys.executable, max_restarts=1)
        agent = Agent(spec, run.train, out, Ranks(out / "logs"), arguments_for, saved_step)
        try:
            return agent.execute()
        finally:
            if agent.code:
                handler.shutdown()  # the other machines need not wait for this one


@contextlib.contextmanager
def _rendezvous(run: Run) -> Iterator[Any]:
    """The rendezvous handler for the machines of a run, even if there is only one; its errors become readable messages."""
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, registry

    # The ranks have their own store. PyTorch would announce its shared one at the first rendezvous only, so that a
    # machine which joins later would wait for it forever.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    nodes = run.cluster.nodes
    # Kubernetes numbers pods; elsewhere PyTorch compares the endpoint with this machine's names and addresses.
    index = os.environ.get("PET_NODE_RANK") or os.environ.get("JOB_COMPLETION_INDEX")
    host: dict[str, Any] = {"is_host": True} if nodes == 1 else {"is_host": index == "0"} if index else {}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=run.cluster.rendezvous if nodes > 1 else "127.0.0.1:0",
        run_id=run.name,
        min_nodes=1 if run.train.elastic else nodes,
        max_nodes=nodes,
        local_addr=None if nodes > 1 else "127.0.0.1",
        join_timeout=JOIN_SECONDS,
        last_call_timeout=run.cluster.node_wait,
        **host,
    )
    try:
        yield registry.get_rendezvous_handler(parameters)
    except (RendezvousError, ValueError) as e:
        if isinstance(e, ValueError) and nodes == 1:
            raise
        what = str(e) or type(e).__name__
        reason = f"the {nodes} machines of the run did not meet at {run.cluster.rendezvous}: {what}"
        raise UserError(Problem(reason, key="cluster.rendezvous")) from None


def ranks_here(run: Run) -> int:
    """How many ranks this machine starts: its share of the layout, or its number of GPUs if that is smaller and the layout may
    change."""
    import torch

    wanted = run.cluster.devices_per_node
    gpus = torch.cuda.device_count() if run.train.device != "cpu" else 0
    return min(wanted, gpus) if gpus and run.train.elastic else wanted


def chip_here(run: Run) -> str:
    """The catalogue's name for this machine's chip; empty if it is not in the catalogue."""
    import torch

    from shardwise.model.device import use_expandable_segments

    if run.train.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    use_expandable_segments()
    chip = chip_of_driver_name(torch.cuda.get_device_name(0))
    return chip.name if chip is not None else ""


def fit_layout(run: Run, world: int, nodes: int, chip: str) -> Run:
    """The run on `world` ranks of `nodes` machines: unchanged if that is the layout's size, else replanned if `train.elastic`
    allows it."""
    if world == run.layout.world:
        return run
    if not run.train.elastic:
        reason = (
            f"needs {run.layout.world} ranks, and {world} are here; train.elastic = true plans another layout for them"
        )
        raise UserError(Problem(reason, key="layout"))
    from shardwise.plan.search import resolve

    cluster = replace(run.cluster, nodes=nodes, devices_per_node=world // nodes, chip=run.cluster.chip or chip)
    found = resolve(replace(run, layout=LayoutConfig(auto=True, fixed=run.layout.fixed), cluster=cluster))
    return replace(found, cluster=replace(found.cluster, chip=run.cluster.chip))


def resolve_layout(run: Run, overrides: list[str]) -> Run:
    """The run, with its layout searched for if it is `auto`. The layout found is printed, and added to the overrides that ranks are
    started with."""
    if not run.layout.auto:
        return run
    from shardwise.plan.search import resolve

    run = resolve(run)
    overrides += layout_overrides(run)
    print(f"layout: {describe_layout(run)}", file=sys.stderr)
    return run


def layout_overrides(run: Run) -> list[str]:
    """A layout found by search, as overrides, so that every rank trains with the same one. It lists all keys, since the run's file
    may set keys that have their default value here."""
    values = to_dict(run)
    keys = {f"layout.{k}": v for k, v in values["layout"].items() if k != "fixed"} | {"layout.auto": False}
    keys |= {"train.microbatch": run.train.microbatch}
    keys |= {f"cluster.{k}": values["cluster"][k] for k in ("nodes", "devices_per_node")}
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def describe_layout(run: Run) -> str:
    """A layout for display: all keys that differ from their default, and the microbatch."""
    defaults = LayoutConfig()
    chosen = {k: getattr(run.layout, k) for k in to_dict(run)["layout"] if k not in ("auto", "fixed")}
    words = [f"{k} {v}" for k, v in chosen.items() if v != getattr(defaults, k)]
    return ", ".join([*words, f"microbatch {run.train.microbatch}"])
