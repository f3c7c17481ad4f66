"""The ranks of a verb: started here unless they are started already; those that use an engine join, and leave at the end."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.run import Run

if TYPE_CHECKING:
    from shardwise.serve.engine import Engine
    from shardwise.serve.replicas import Remake, Replicas

STOPS = (signal.SIGTERM, signal.SIGINT)


def rank_here() -> int | None:
    """This process's rank; None if it was not started as one."""
    from shardwise.train.processes.environment import rank_environment

    environment = rank_environment(os.environ)
    return None if environment is None or environment.world_size == 1 else environment.rank


def words_of(args: argparse.Namespace) -> list[str]:
    """The arguments of this command, to start its ranks with. A layout that was searched for is among them."""
    return [*args.arguments, *(f"--{override}" for override in args.overrides)]


def start_here(words: Sequence[str], world: int, passed_on: Sequence[signal.Signals] = ()) -> int:
    """Run a command with these arguments as ranks on this machine, and return its exit code; `passed_on` are signals for the first
    rank. The logs are kept if a rank failed."""
    from shardwise.train.processes import launch

    logs = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
    code = launch.start_local(words, world, logs, passed_on)
    if code != 1:  # the message of a failure names the logs
        shutil.rmtree(logs, ignore_errors=True)
    return code


def start_ranks(run: Run, args: argparse.Namespace) -> int | None:
    """The same for a verb that uses an engine; None if one process is enough, or the ranks are already started."""
    from shardwise.train.faults.ranks import start_fork_server
    from shardwise.train.processes import launch
    from shardwise.train.processes.environment import rank_environment

    environment = rank_environment(os.environ)
    launch.check_world(run, environment)
    if environment is not None or run.layout.world == 1:
        return None
    start_fork_server()
    return start_here(words_of(args), run.layout.world, STOPS)


@contextlib.contextmanager
def engine_here(
    folder: Path, run: Run, longest: int = 0, remake: Callable[[int], Remake] | None = None, warm: bool = False
) -> Iterator[Engine | Replicas | None]:
    """The engine of a checkpoint, on this device or on all ranks of the layout. The first rank gets the engine; the others take
    part and get None at the end. `remake` returns the grammar factory for a vocabulary size."""
    if run.layout.world == 1:
        from shardwise.serve.engine import make_engine

        engine = make_engine(folder, run, longest) if longest else make_engine(folder, run)
        if warm:
            engine.warm()
        yield engine
        return
    import torch

    from shardwise.serve.many import engine_of_ranks
    from shardwise.train.processes import launch
    from shardwise.train.processes.environment import rank_environment

    environment = rank_environment(os.environ)
    assert environment is not None
    if environment.rank:  # the first rank tells the others when to end
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
    placement = launch.join(environment, run)
    device, meet = torch.device(placement.device), launch.reachable(environment)
    made = remake(run.model.vocab) if remake is not None else None
    with engine_of_ranks(folder, run, device, meet, environment.local_world_size, longest, made, warm) as taking:
        yield taking
    launch.leave()
