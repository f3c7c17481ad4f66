"""One run of ranks gives everything that tests ask of a layout: losses, gradient norms, an evaluation, parameters, executed
actions, operations, messages and memory. It is made once for each run, and every check of this file reads that record.

Experts are counted twice: with tokens dealt out evenly, as `shardwise verify` does, and as the routers choose, where the planner is
told how many rows went where; beside a frozen reference, evenly alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import cases
import numpy as np
import torch
from parallel_pool import RankPool
from schedule_check import check
from torch import Tensor

from shardwise.measure import verify
from shardwise.measure.counts.memory import measured_memory
from shardwise.measure.counts.traffic import Traffic, TrafficCounter
from shardwise.measure.verify import TOLERANCE, Verdict, counted, planned, random_batch
from shardwise.model.initialize import draw
from shardwise.model.moe.layer import MoE, Router
from shardwise.model.transformer import Block
from shardwise.plan.trainer.rank import PlannedRank, planned_rank
from shardwise.plan.trainer.saved import Rows, saved
from shardwise.plan.trainer.state import activations, gathered, peak_gradients, state_bytes
from shardwise.plan.trainer.traffic import by_group
from shardwise.run import Run
from shardwise.run.parameters import HEAD, find_parameter
from shardwise.run.parametrization import initial_factor
from shardwise.schedules import make_schedule
from shardwise.train.step import TrainState

EXACT = 1e-9
EXACTLY = TOLERANCE | dict(memory=0.0)
Choices = dict[int, list[np.ndarray]]
"""What the router of each layer chose, call by call; no tensors, which would count as memory."""
Routed = dict[int, list[tuple[int, int]]]
"""For each layer, microbatch by microbatch: rows sent to experts, rows arrived."""


@dataclass
class Record:
    """What one rank did."""

    initial: dict[str, Any]
    """The rank's shards of the initial parameters, each with where it lies."""
    trained: dict[str, Any]
    """Losses, norms, an evaluation, the rank's shards of the parameters and its actions, as `cases.train` gives them."""
    verdict: Verdict
    traffic: Traffic
    """Bytes by process group and operation, tokens routed as the routers choose."""
    messages: Traffic
    memory: dict[str, Any]
    choices: Choices
    routed: Routed


def observe(rank: int, run: Run, documents: bool = True) -> Record:
    """Train some steps, then count one step after another of the same train state."""
    train_state = TrainState(run)
    initial = cases.held_parameters(train_state)
    trained = cases.train_and_evaluate(train_state, documents)
    seen: dict[str, Any] = {}

    class Counting(TrafficCounter):
        def __init__(self, axes: dict[str, str]) -> None:
            super().__init__(axes)
            seen["wire"] = self

    @contextlib.contextmanager
    def measured(train_state: TrainState) -> Iterator[dict[str, Any]]:
        gc.freeze()  # what was imported or is cached by now need not be looked through
        with measured_memory(train_state) as seen["memory"]:
            yield seen["memory"]

    if run.layout.schedule == "bpipe":  # where the first of a batch of new shapes goes after its size
        train_state.train_step(random_batch(run, train_state.mesh.data_index))
    with mock.patch.multiple(verify, TrafficCounter=Counting, measured_memory=measured):
        account, same, actions = counted(train_state, random_batch(run, train_state.mesh.data_index))
    verdict = Verdict(rank, planned(run, rank), account, same, actions)
    choices, routed = note_choices(train_state), note_rows(train_state)
    if run.model.experts and train_state.reference is None:  # whose own choices nobody notes
        rows = train_state.samples(np.arange(run.train.global_batch))
        batch = cases.take(cases.batch(0, False, run.train.global_batch), rows)
        with Counting(train_state.mesh.axes_by_group()), measured(train_state):
            train_state.train_step(batch)
    wire = seen["wire"]
    return Record(initial, trained, verdict, wire.traffic, wire.messages, seen["memory"], choices, routed)


def blocks(train_state: TrainState) -> list[tuple[int, Block]]:
    """The layers of a rank, each with its number."""
    found = [(int(layer), block) for model in train_state.parallel.models for layer, block in model.layers.items()]
    assert all(isinstance(block, Block) for _, block in found)
    return found  # type: ignore[return-value]


def note_choices(train_state: TrainState) -> Choices:
    """Let the routers write down what they choose, recomputed passes left out."""
    choices: Choices = {}

    def record_in(layer: int) -> Any:
        def record(module: Router, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
            weights, chosen, _ = out
            if module.counting:  # not a pass that is repeated
                # A choice beyond an expert's capacity has no weight and is not sent.
                choices.setdefault(layer, []).append(chosen[weights != 0].numpy().copy())

        return record

    for layer, block in blocks(train_state):
        for router in (m for m in block.modules() if isinstance(m, Router)):
            router.register_forward_hook(record_in(layer))
    return choices


def note_rows(train_state: TrainState) -> Routed:
    """Let the MoE layers write down the rows they send and get, recomputed passes left out."""
    routed: Routed = {}

    def follow(layer: int, moe: MoE) -> None:
        run_experts, sent = moe.run_experts, [0]

        def noted(rows: list[Tensor], counts: Tensor, keys: Tensor | None = None) -> Tensor:
            sent[0] = len(rows[0])
            return run_experts(rows, counts, keys)

        def arrived(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if moe.router.counting:
                routed.setdefault(layer, []).append((sent[0], len(args[0])))

        moe.run_experts = noted  # type: ignore[method-assign]
        moe.experts.register_forward_pre_hook(arrived)

    for layer, block in blocks(train_state):
        if isinstance(block.ffn, MoE):
            follow(layer, block.ffn)
    return routed


class Observed:
    """The records of one run's ranks; made when first asked for."""

    def __init__(self, ranks: RankPool, model: str, layout: dict[str, Any], train: dict[str, Any]) -> None:
        # Two steps: what the first leaves in the optimizer, the second reads.
        self.model, self.train = model, dict(cases.layers_for(layout), steps=2) | train
        self.run = cases.make_run(model, layout, **self.train)
        self.pool = ranks

    def __str__(self) -> str:
        return f"{self.model} {self.run.layout} {self.train}"

    @functools.cached_property
    def records(self) -> list[Record]:
        return self.pool.run(self.run.layout.world, observe, self.run)

    def assert_begins_as_one_process(self) -> None:
        """Every rank's shards of the initial parameters are bit for bit those of one process."""
        model = self.run.model
        for rank, record in enumerate(self.records):
            for name, (where, value) in record.initial.items():
                entry = find_parameter(model, name, self.run.adapter)
                if (
                    entry.dtype or entry.init == "magnitude"
                ):  # 4 bits of it, which tests/model/test_nf4.py holds to their reference
                    continue
                whole = torch.empty(entry.shape)
                factor = initial_factor(entry, model, self.run.train)
                draw(whole, model, self.run.train.seed, name, adapter=self.run.adapter, factor=factor)
                whole = whole.to(getattr(torch, self.run.train.dtype)).float() if entry.frozen else whole
                assert np.array_equal(value, whole.numpy()[where].astype(value.dtype)), f"{self} rank {rank} {name}"

    def assert_trains_as_one_process(self) -> None:
        """Losses, norms, evaluation and every parameter, to 1e-9 in float64."""
        self._assert_as_one_process([record.trained for record in self.records])

    def assert_results_of_one_process(self) -> None:
        """The same without counting anything, in half the time."""
        self._assert_as_one_process(self.pool.run(self.run.layout.world, cases.train, self.run))

    def _assert_as_one_process(self, trained: list[dict[str, Any]]) -> None:
        assert self.run.train.dtype == "float64"
        # One process takes the batch whole, in few operations; however it is cut, the result is the same.
        want = one_process(self.model, **self.train | dict(microbatch=self.run.train.global_batch))
        seen: set[str] = set()
        for rank, each in enumerate(trained):
            assert_same(each, want, f"{self} rank {rank}")
            seen |= each["parameters"].keys()
        assert seen == set(want["parameters"])

    def assert_trains_what_is_not_frozen(self) -> None:
        """With adapters these move, and a head of scores, and nothing else."""
        model, adapter = self.run.model, self.run.adapter
        moved = {
            name
            for record in self.records
            for name, (_, value) in record.initial.items()
            if value.size and (value != record.trained["parameters"][name][1]).any()
        }
        assert moved, str(self)
        assert not [name for name in moved if find_parameter(model, name, adapter).frozen], f"{self} {moved}"
        assert not adapter.used or all(".lora." in name or name == HEAD for name in moved), f"{self} {moved}"

    def assert_follows_its_schedule(self) -> None:
        """The actions of the list, in training and in counting; an evaluation runs its forward passes."""
        lay = self.run.layout
        listed = make_schedule(
            lay.schedule if lay.pipeline > 1 else "1f1b", lay.pipeline, self.run.accumulation, lay.stages_per_rank
        )
        assert check(listed).ok
        for rank, record in enumerate(self.records):
            own = listed.ranks[rank * lay.pipeline // lay.world]
            assert record.trained["executed"] == [action for action in own if action.kind == "F"]
            assert record.trained["trained"] == list(own)
            assert record.verdict.schedule
            assert record.verdict.actions >= 2 * self.run.accumulation

    def assert_computes_and_sends_as_planned(self) -> None:
        """Operations by part and pass and bytes by axis are the plan's to the last one, what stays in memory to the byte."""
        for rank, record in enumerate(self.records):
            beyond = record.verdict.beyond(EXACTLY)
            assert not beyond, (str(self), rank, beyond[:5])
            has_layers = any(stage.layers for stage in PlannedRank(self.run, rank).stages)
            if self.run.train.optimizer == "muon" and has_layers:
                assert record.verdict.measured.work.flops["parameters"]["optimizer"] > 0
                assert "unknown" not in record.verdict.measured.work.flops

    def assert_messages_are_as_planned(self) -> None:
        """Bytes and messages by process group and operation."""
        choices = [record.choices for record in self.records]
        for rank, record in enumerate(self.records):
            expected = expected_traffic(PlannedRank(self.run, rank), choices)
            found = record.traffic, record.messages
            if self.run.layout.schedule == "bpipe" and any(choices):
                # What is handed over depends on how tokens were routed; of an even load the verdict has it.
                found, expected = (
                    [{k: v for k, v in each.items() if k[0] != "pipeline"} for each in both]
                    for both in (found, expected)
                )
            assert found == expected, f"{self} rank {rank}"

    def assert_holds_what_the_plan_says(self) -> None:
        """Bytes by owner, to the byte; saved activations microbatch by microbatch."""
        if not all(saves_as_planned(self.run, rank, each) for rank, each in enumerate(self.records)):
            del self.records  # on a busy machine a message's buffer may outlive it for a moment
        for rank, record in enumerate(self.records):
            planned = state_bytes(self.run, rank)
            place = planned_rank(self.run, rank)
            planned |= dict(gathered=gathered(place), unreduced=peak_gradients(place, planned["gradients"]))
            held = {owner: record.memory[owner] for owner in planned}
            assert held == planned, f"{self} rank {rank}: {held}, planned {planned}"
            assert saves_as_planned(self.run, rank, record), f"{self} rank {rank}"
            if not self.run.model.experts:
                assert activations(place) == record.memory["activations"], f"{self} rank {rank}"


@functools.cache
def one_process(model: str, documents: bool = True, seed: int = 0, **train: Any) -> dict[str, Any]:
    """What every layout is held against."""
    return cases.train(0, cases.make_run(model, {}, **train), documents, seed)


def assert_same(got: dict[str, Any], want: dict[str, Any], context: str) -> None:
    """A rank's results are those of one process, its shards of the parameters where they lie in the whole."""
    for key in ("losses", "norms", "evaluated"):
        np.testing.assert_allclose(got[key], want[key], rtol=EXACT, err_msg=context)
    for name, (where, value) in got["parameters"].items():
        whole = want["parameters"][name][1]
        # Relative to the parameter's size. A key bias has no gradient but rounding, hence a floor to that size.
        worst = np.abs(value - whole[where]).max(initial=0) / max(np.abs(whole).max(), 0.1)
        assert worst < EXACT, f"{context} {name} {worst}"


def saved_activations(run: Run, rank: int, rows: Rows | None = None) -> dict[int, int]:
    """Planned bytes that one microbatch saves for its backward pass, by stage of this rank. `rows`: how tokens were routed."""
    place = planned_rank(run, rank)
    return {stage.number: saved(place, stage, rows).whole for stage in place.stages}


def saves_as_planned(run: Run, rank: int, record: Record) -> bool:
    """Whether every microbatch saves what the plan says, to the byte."""
    for stage, sizes in record.memory["saved"].items():
        for microbatch, size in enumerate(sizes):
            rows = {layer: calls[microbatch] for layer, calls in record.routed.items()}
            if saved_activations(run, rank, rows or None)[stage] != size:
                return False
    return True


def moved_rows(place: PlannedRank, choices: list[Choices]) -> dict[int, tuple[int, int]]:
    """Rows that a rank sends to other expert ranks in each layer, forward: its own there, and theirs back."""
    m, lay = place.run.model, place.run.layout
    moved: dict[int, tuple[int, int]] = {}
    mine = place.index("expert")
    first = place.rank - mine * lay.tensor - place.index("tensor")  # of the ranks that the experts are dealt out over
    for layer in choices[place.rank]:
        for expert in range(lay.expert):
            base = first + expert * lay.tensor
            senders = range(base, base + lay.tensor) if lay.expert_tensor else [base + place.index("tensor")]
            owners = np.concatenate([c.ravel() for s in senders for c in choices[s][layer]]) // (
                m.experts // lay.expert
            )
            there, back = moved.get(layer, (0, 0))
            if expert == mine:
                moved[layer] = there + int((owners != mine).sum()), back
            else:
                moved[layer] = there, back + int((owners == mine).sum())
    return moved


def expected_traffic(place: PlannedRank, choices: list[Choices]) -> tuple[Traffic, Traffic]:
    """What the planner says a rank sends in a step."""
    sent = by_group(place, moved_rows(place, choices) if any(choices) else None)
    total = Counter({key: each.bytes for key, each in sent.items() if each.bytes})
    return total, Counter({key: each.messages for key, each in sent.items() if each.bytes})
