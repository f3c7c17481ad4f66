"""An engine on several ranks: the tensor, pipeline and expert ranks of a replica, and replicas (`run/ranks/served.py` assigns the
roles).

Every rank reads its shard of the weights and has the number of pages that the plan allows. The first rank then has an engine like
any other, and the others repeat the calls to its runner.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from shardwise.checkpoint.weights import load_share
from shardwise.model.invariant.network import exactly_read
from shardwise.model.quantized.model import keep_weights
from shardwise.parallel.inference import Peers
from shardwise.plan.serving.pool import host_pages, served_layers
from shardwise.run import Run
from shardwise.serve.engine import Engine
from shardwise.serve.leader import Leader, follow
from shardwise.serve.links import Links, lowest
from shardwise.serve.prepare import check_served, draft_runner_of, load_draft, memory_of, runner_of
from shardwise.serve.replicas import Remake, Replicas, answer_requests
from shardwise.serve.runner import Runner


@contextlib.contextmanager
def engine_of_ranks(
    folder: Path,
    run: Run,
    device: torch.device,
    meet: str,
    here: int,
    longest: int = 0,
    remake: Remake | None = None,
    warm: bool = False,
) -> Iterator[Engine | Replicas | None]:
    """An engine for a checkpoint folder on the first rank, while the block runs; None on the others, after the first has left it.
    Called on all ranks, which met at the address `meet`; `here` of them are on this machine. `remake` makes the grammars of
    requests."""
    check_served(run)
    peers = Peers(run.layout, run.serve.invariant)
    dtype, exact = getattr(torch, run.train.dtype), exactly_read(run, device)
    model = load_share(folder, dtype, device, served_layers(run), peers, exact)
    # Ranks share a GPU only over gloo; CPU ranks of one machine share its memory.
    devices = 1 if device.type == "cpu" else here if peers.recordable else torch.cuda.device_count()
    kept = keep_weights(model, run.serve.weights, run.serve.head)
    memory = memory_of(run, device, -(-here // devices), kept)
    pages, swapped = lowest((memory.pages, host_pages(run, memory)))
    runner = runner_of(model, run, pages, longest, peers)
    leads = peers.place.rank == peers.place.leader
    draft = draft_runner_of(load_draft(run, device) if leads else None, run, pages, longest)
    with taking_part(runner, run, pages, swapped, meet, remake, warm, draft) as engine:
        yield engine


@contextlib.contextmanager
def taking_part(
    runner: Runner,
    run: Run,
    pages: int,
    swapped: int,
    meet: str,
    remake: Remake | None = None,
    warm: bool = False,
    draft: Runner | None = None,
) -> Iterator[Engine | Replicas | None]:
    """The same for ranks that already have their runners, each with `pages` on the device and `swapped` on the host. The first
    rank of each replica also has the runner of the draft model."""
    assert runner.peers is not None
    place = runner.peers.place
    links = Links(place, meet)
    # Objects that are alive now stay alive; scanning them in every garbage collection would delay steps.
    gc.collect()
    gc.freeze()
    if links.leader is not None:
        follow(runner, links.leader)
        yield None
        return
    leader = Leader(runner, links.followers, place.layout.pipeline)
    engine = Engine(leader, run.serve, pages, seed=run.train.seed, host_pages=swapped, draft=draft)
    if warm:
        engine.warm()
    if links.requests is not None:
        links.requests.send((engine.outputs, engine.stats(), 0))  # this replica is ready
        answer_requests(engine, links.requests, remake)
        leader.close()
        yield None
        return
    for other in links.replicas:
        other.recv()
    replicas = Replicas(engine, links.replicas) if links.replicas else None
    yield replicas or engine
    links.close()
    if replicas is not None:
        replicas.close()
    leader.close()
