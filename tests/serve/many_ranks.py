"""Drawn schedules on several ranks: what a process of the rank pool does for a layout."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from drawn_schedules import check_answers, drawn_settings
from engines import LONGEST, draft_runner, model_of

from shardwise.hardware import CHIPS
from shardwise.model.invariant.network import make_invariant
from shardwise.parallel.inference import Peers, build_share
from shardwise.plan.serving.pool import served_layers, stage_memory, weight_bytes
from shardwise.run import LayoutConfig, Run
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.many import taking_part
from shardwise.serve.runner import Runner


def share_of(
    family: str, layout: LayoutConfig, settings: ServeConfig, pages: int, peers: Peers, dtype: torch.dtype, device: str
) -> Runner:
    """This rank's runner of a model that every process can make."""
    whole = model_of(family)
    state = whole.state_dict()

    def read(name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        box = state[name][tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        return box.to(device, dtype, copy=True)

    run = Run(model=whole.config, layout=layout, serve=settings)
    model = build_share(whole.config, dtype, served_layers(run), peers, torch.device(device), read)
    if peers.invariant:
        make_invariant(model)
    sequences = min(settings.max_sequences, settings.max_step_tokens)
    return Runner(model, pages, settings.page_tokens, sequences, LONGEST, dtype, peers, settings.draft_tokens)


def check_plan(runner: Runner, run: Run, pages: int) -> None:
    """The bytes of weights and pages that this rank has are those that the plan gives its stage."""
    assert runner.peers is not None
    run = replace(run, train=replace(run.train, dtype="float64"))
    place = runner.peers.place
    held = sum(parameter.nbytes for parameter in runner.model.parameters())
    planned = weight_bytes(run, place.stage)
    assert held == planned if place.rank == place.stage_ranks[0] else held <= planned
    memory = stage_memory(run, place.stage, CHIPS["cpu"], 2**30)
    assert sum(tensor.nbytes for tensor in runner.cache.tensors()) == memory.page * pages


def check_layout(
    rank: int, axes: dict[str, int], cases: list[tuple[str, str]], device: str = "cpu", speculate: str = ""
) -> None:
    """Answer drawn requests for each (family, seed); with guesses as drawn, or made as said."""
    layout = LayoutConfig(**axes)
    peers = Peers(layout)
    for family, seed in cases:
        draw = random.Random(seed)
        settings, pages, more = drawn_settings(draw)
        if speculate:
            settings = replace(settings, speculate=speculate, max_step_tokens=64)
        runner = share_of(family, layout, settings, pages, peers, torch.float64, device)
        run = Run(model=runner.model.config, layout=layout, serve=settings)
        check_plan(runner, replace(run, serve=replace(settings, speculate="none")), pages)
        leads = peers.place.rank == peers.place.leader
        draft = draft_runner(family, settings, pages) if leads else None
        with taking_part(runner, run, pages, more["host_pages"], "127.0.0.1", draft=draft) as engine:
            if engine is not None:
                check_answers(engine, draw, family)
