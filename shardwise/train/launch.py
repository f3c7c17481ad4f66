"""Launches the ranks of a run: joins those that torchrun, Slurm or Kubernetes started, or starts them on this machine, or on
several that meet at `cluster.rendezvous`.

Ranks started here have an agent (`faults/agent.py`): the first rank that fails takes the others down within seconds, the user
reads one message that names it, and all are started again. Where there are other ranks than the layout was made for, and
`train.elastic` allows it, the planner finds the best layout for them. Model and global batch stay, so the run goes on with the
same losses, to rounding; and every machine and rank finds the same layout by itself, since the search is deterministic.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwise.hardware.chips import chip_of_driver_name
from shardwise.run import LayoutConfig, Problem, Run, UserError, to_dict
from shardwise.run.check import broken_rules
from shardwise.train.faults.heartbeat import enable_flight_recorder
from shardwise.train.faults.ranks import GRACE, MISTAKE, Ranks, environment_of, free_port

ANSWER = 3
"""Exit code of a rank that succeeded, and whose answer is no."""
_ANSWERS = "SHARDWISE_ANSWERS"
JOIN_SECONDS = 600.0
"""How long a machine waits for the others of a run."""


@dataclass(frozen=True)
class RankEnvironment:
    """What the launcher of a process says about its rank."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    local_world_size: int = 1
    has_agent: bool = False
    """Started by this package's own agent."""


def rank_environment(environment: Mapping[str, str]) -> RankEnvironment | None:
    """Read the variables of torchrun (also under Kubernetes) or Slurm; None when this process was not started as a rank."""
    e = environment

    def number(name: str, otherwise: int) -> int:
        """A variable that is empty is like one that is not set."""
        try:
            return int(e.get(name) or otherwise)
        except ValueError:
            reason = f'{name} is "{e[name]}" in the environment, and must be a whole number'
            raise UserError(reason) from None

    if e.get("RANK") and e.get("WORLD_SIZE"):
        world = number("WORLD_SIZE", 1)
        return RankEnvironment(
            number("RANK", 0),
            world,
            number("LOCAL_RANK", 0),
            e.get("MASTER_ADDR") or "127.0.0.1",
            number("MASTER_PORT", 29500),
            number("LOCAL_WORLD_SIZE", world),
            "SHARDWISE_AGENT" in e,
        )
    if e.get("SLURM_PROCID") and number("SLURM_NTASKS", 1) > 1:
        return RankEnvironment(
            number("SLURM_PROCID", 0),
            number("SLURM_NTASKS", 1),
            number("SLURM_LOCALID", 0),
            e.get("MASTER_ADDR") or first_host(e.get("SLURM_STEP_NODELIST") or e.get("SLURM_JOB_NODELIST", "")),
            # Jobs on the same node need different ports.
            number("MASTER_PORT", 20000 + number("SLURM_JOB_ID", 0) % 20000),
            number("SLURM_NTASKS_PER_NODE", 1),
        )
    return None


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list such as `gpu[003-007,9],login1`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if not found:
        raise UserError("Slurm gives no node list; set MASTER_ADDR to the name of the first node")
    return found[1] + (found[2] or "")


def check_here(run: Run, environment: RankEnvironment | None) -> None:
    """Refuse a run that needs other ranks than were started, or a GPU where there is none."""
    on_cpu = replace(run, train=replace(run.train, device="cpu"))
    broken = list(broken_rules(on_cpu)) if run.train.device == "auto" else []
    if broken:
        import torch

        if not torch.cuda.device_count():
            raise UserError(*(Problem(f"there is no GPU here: {rule.reason}", key=rule.key) for rule in broken))
    needed = run.layout.world
    if environment is not None and environment.world_size != needed:
        axes = ("replicate", "shard", "context", "tensor", "pipeline")
        sizes = " x ".join(f"{axis} {getattr(run.layout, axis)}" for axis in axes)
        reason = f"needs {needed} ranks ({sizes}), but {environment.world_size} were started"
        raise UserError(Problem(reason, key="layout"))
    if environment is None and run.cluster.nodes > 1 and not run.cluster.rendezvous:
        reason = (
            f"{run.cluster.nodes} nodes: start the same command on each of them with torchrun or srun, {needed} ranks in all, or "
            f"by hand with cluster.rendezvous = HOST:PORT of one of them"
        )
        raise UserError(Problem(reason, key="cluster.nodes"))


def join(environment: RankEnvironment, run: Run) -> None:
    """Become one of the ranks: choose a device and initialize the process group."""
    import torch
    import torch.distributed as dist

    enable_flight_recorder(os.environ)
    gpus = torch.cuda.device_count() if run.train.device != "cpu" else 0
    oversubscribed = gpus > 0 and int(os.environ.get("LOCAL_WORLD_SIZE") or environment.world_size) > gpus
    layout = run.layout
    if oversubscribed and (layout.pipeline > 1 or (layout.context > 1 and layout.context_method == "ring")):
        reason = (
            f"{layout.world} ranks would share {gpus} GPU(s), and gloo, their backend then, has no point-to-point "
            'operations on CUDA tensors; pipelines and ring attention need them. Use train.device = "cpu" or more GPUs'
        )
        raise UserError(Problem(reason, key="layout"))
    if gpus:
        torch.cuda.set_device(environment.local_rank % gpus)
    dist.init_process_group(
        # NCCL needs a GPU for each rank; where ranks share one, gloo has collectives of CUDA tensors too.
        "cpu:gloo,cuda:nccl" if gpus and not oversubscribed else "gloo",
        init_method=f"tcp://{environment.address}:{environment.port}",
        rank=environment.rank,
        world_size=environment.world_size,
        # Longer than the agent waits, so that a hang is explained before it is an error of the transport.
        timeout=timedelta(seconds=max(600.0, 2 * run.train.hang_seconds)),
    )


def leave() -> None:
    """Destroy the process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def start_local(arguments: Sequence[str], world: int, logs: Path) -> int:
    """Run `shardwise ARGUMENTS` once as `world` ranks on this machine; returns the exit code: 0 when all succeeded, ANSWER when
    the first one's answer is no, 2 for a user's mistake, 1 for a failure. For short verbs: the first failure ends it."""
    ranks = Ranks(logs)
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
        message = ranks.failure(*failed)
        if failed[1] != MISTAKE:
            message = f"error: {message}\nthe other ranks were stopped; their output is in {logs}"
        print(message, file=sys.stderr)
        return MISTAKE if failed[1] == MISTAKE else 1
    finally:
        ranks.end(0.0)


def answer(yes: bool) -> int:
    """The exit code of a verb that answers yes or no; a rank's differs between a no and a failure."""
    return 0 if yes else ANSWER if _ANSWERS in os.environ else 1


def start_ranks(run: Run, out: Path, arguments: Sequence[str]) -> int:
    """Run `shardwise ARGUMENTS` as this machine's share of the ranks that the layout needs; returns the exit code: 0 when all
    succeeded, 75 when told to stop, 2 for a user's mistake, 1 when it was given up."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from shardwise.checkpoint.folder import complete, step_of
    from shardwise.train.faults.agent import Agent

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
    """The rendezvous of the machines of a run, also of one; its errors become sentences."""
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, registry

    # The ranks have a store of their own. The one PyTorch would share is announced at the first rendezvous only, so that a
    # machine which comes later waits for it forever.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    nodes = run.cluster.nodes
    alone: dict[str, Any] = {"is_host": True} if nodes == 1 else {}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=run.cluster.rendezvous if nodes > 1 else "127.0.0.1:0",
        run_id=run.name,
        min_nodes=1 if run.train.elastic else nodes,
        max_nodes=nodes,
        local_addr=None if nodes > 1 else "127.0.0.1",
        join_timeout=JOIN_SECONDS,
        last_call_timeout=run.cluster.node_wait,
        **alone,
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
    """How many ranks this machine starts: its share of the layout, or as many as it has GPUs where it has fewer and the layout
    may change."""
    import torch

    wanted = run.cluster.devices_per_node
    gpus = torch.cuda.device_count() if run.train.device != "cpu" else 0
    return min(wanted, gpus) if gpus and run.train.elastic else wanted


def chip_here(run: Run) -> str:
    """The catalogue's name of this machine's chip, empty when it is not in the catalogue."""
    import torch

    if run.train.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    chip = chip_of_driver_name(torch.cuda.get_device_name(0))
    return chip.name if chip is not None else ""


def fit_layout(run: Run, world: int, nodes: int, chip: str) -> Run:
    """The run on `world` ranks of `nodes` machines: as it is where that fits, replanned where `train.elastic` allows it."""
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
    """The run with its layout searched for where it is `auto`; the layout found is printed, and added to the overrides that ranks
    are started with."""
    if not run.layout.auto:
        return run
    from shardwise.plan.search import resolve

    run = resolve(run)
    overrides += layout_overrides(run)
    print(f"layout: {describe_layout(run)}", file=sys.stderr)
    return run


def layout_overrides(run: Run) -> list[str]:
    """A layout that was searched for, as overrides, so that every rank trains with the same one. All its keys, since the run's
    file may set those that have their default value here."""
    values = to_dict(run)
    keys = {f"layout.{k}": v for k, v in values["layout"].items() if k != "fixed"} | {"layout.auto": False}
    keys |= {"train.microbatch": run.train.microbatch}
    keys |= {f"cluster.{k}": values["cluster"][k] for k in ("nodes", "devices_per_node")}
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def describe_layout(run: Run) -> str:
    """A layout for people: all keys without their default value, and the microbatch."""
    defaults = LayoutConfig()
    chosen = {k: getattr(run.layout, k) for k in to_dict(run)["layout"] if k not in ("auto", "fixed")}
    words = [f"{k} {v}" for k, v in chosen.items() if v != getattr(defaults, k)]
    return ", ".join([*words, f"microbatch {run.train.microbatch}"])
