"""Compares the plan with the trainer, account by account: every rank counts a few real steps, or a dry one.

FLOPs and traffic must agree exactly, persistent memory to the byte, saved activations within 1%, and the pipeline must have
executed exactly the actions that the planner timed. Tokens are random, and routed evenly over experts, so that the comparison
depends on the layout alone. Time is shown beside the plan's; it is judged only on request.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch

from shardwise.data.batches import Batch
from shardwise.ledger import AXIS_OF, Account, Difference, Memory, Span, Timeline, Traffic, compare
from shardwise.measure.counts.memory import measured_memory
from shardwise.measure.counts.rounds import Repeated, microbatches_to_run, with_microbatches
from shardwise.measure.counts.traffic import TrafficCounter
from shardwise.measure.counts.work import WorkCounter, uncompiled
from shardwise.measure.dry import dry_rank, even_routing
from shardwise.plan.plan import plan
from shardwise.plan.trainer.rank import planned_rank
from shardwise.plan.trainer.state import activations, activations_away, hosted, state_bytes
from shardwise.plan.trainer.traffic import traffic
from shardwise.plan.trainer.work import work
from shardwise.run import Problem, Run, UserError
from shardwise.run.derive import chunks_loss, planned_on_gpu
from shardwise.run.sections.objective import FACTS, targets_of
from shardwise.schedules import make_schedule
from shardwise.train.objectives.grpo import random_answers
from shardwise.train.step import TrainState

TOLERANCE: dict[str, float] = {"work": 0.0, "traffic": 0.0, "memory": 0.01, "rollouts": 0.0}
"""Relative difference allowed between plan and run; an account that is not listed is shown but not judged."""
STATE = ("parameters", "gradients", "optimizer")
PERSISTENT = (*STATE, "host")
ENDLESS = 10**9
"""More steps than any comparison runs."""
OWNERS = (*STATE, "activations")


@dataclass(frozen=True)
class Verdict:
    """The planned and the measured account of one rank."""

    rank: int
    planned: Account
    measured: Account
    schedule: bool
    """Whether the pipeline executed the actions of the schedule, in its order."""
    actions: int
    microbatches: int = 0
    """The number of microbatches that were run, where the others repeat them; 0 where all were run."""
    rollouts: tuple[Difference, ...] = ()
    """Planned against measured quantities of one round of rollouts; GRPO only."""

    def differences(self) -> list[Difference]:
        """Every quantity of both accounts, the plan's value first. An account covers one rank and calls it rank 0; here it is
        renamed."""
        found = compare(self.planned, self.measured)
        named = [replace(d, name=d.name.replace("rank 0 ", f"rank {self.rank} ", 1)) for d in found]
        return [*named, *self.rollouts]

    def beyond(self, tolerance: Mapping[str, float]) -> list[Difference]:
        """The quantities that differ by more than the tolerance; persistent memory has none."""
        return [d for d in self.differences() if d.account in tolerance and abs(d.relative) > _allowed(d, tolerance)]

    def agrees(self, tolerance: Mapping[str, float]) -> bool:
        """Whether this rank matches the plan."""
        return self.schedule and not self.beyond(tolerance)


def _allowed(difference: Difference, tolerance: Mapping[str, float]) -> float:
    persistent = difference.account == "memory" and difference.name.split()[-1] in PERSISTENT
    return 0.0 if persistent else tolerance[difference.account]


def behind_warmup(run: Run) -> Run:
    """The run with gradients compressed from the first step on, and no last step, as a plan assumes."""
    train = replace(run.train, steps=max(run.train.steps, ENDLESS))
    return replace(run, layout=replace(run.layout, compress_warmup=0), train=train)


def random_batch(run: Run, seed: int = 0) -> Batch:
    """One rank's share of a step: random tokens, each with a loss. If the objective compares documents, the two halves of a row
    count as two documents, but only for the sums of the loss: attention sees full rows, as the plan assumes."""
    rows = run.train.global_batch // run.layout.data_ranks
    tokens = np.random.default_rng(seed).integers(0, run.model.vocab, (rows, run.train.seq_len + 1))
    halves = np.tile(np.arange(run.train.seq_len) * 2 // run.train.seq_len, (rows, 1))
    sums = halves if FACTS[run.objective.kind].sums else None
    if run.objective.kind == "grpo":
        return random_answers(run, tokens)
    margins = np.ones(halves.shape, np.float32) if run.objective.margins else None
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), sums=sums, margins=margins)
    return _with_stored(batch, run) if run.objective.stored else batch


def _with_stored(batch: Batch, run: Run) -> Batch:
    """The batch with the log-probabilities that would be stored with the data: for each token, or of a teacher's first tokens."""
    if not FACTS[run.objective.kind].teacher:
        return replace(batch, reference=np.full(batch.tokens.shape, -1.0))
    count = targets_of(run.objective, run.model.vocab) - 1
    tokens = np.tile(np.arange(count), (*batch.tokens.shape, 1))
    return replace(batch, teacher_tokens=tokens, teacher_logprobs=np.full(tokens.shape, -1.0 - np.log(count)))


def counted(
    train_state: TrainState,
    batch: Batch,
    *,
    seconds: float = 0.0,
    middle: Sequence[int] = (),
    times: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Account, bool, int]:
    """Returns the account of a step, whether it executed the schedule, and the schedule's number of actions. The counts of the
    microbatches in `middle` are added `times` more times."""
    run, lay = train_state.run, train_state.run.layout
    train_state.drain()
    with even_routing(train_state), uncompiled(train_state):
        if (
            lay.sync_overlap and train_state.step < lay.sync_every
        ):  # a round begins with the reduction of the round before it under way
            for _ in range(lay.sync_every):
                train_state.train_step(batch)
        # All counters share one step: they allocate no memory and hold no tensor.
        with (
            WorkCounter(train_state) as ops,
            TrafficCounter(train_state.mesh.axes_by_group()) as wire,
            measured_memory(train_state) as owners,
        ):
            actions = len(train_state.parallel.pipeline.schedule.ranks[train_state.mesh.index("pipeline")])
            repeated = Repeated(middle, ops, wire, say, actions)
            with train_state.observers.watched_by(repeated):
                train_state.train_step(batch)
                train_state.drain()
        repeated.add(times)
        _rest_of_round(train_state, batch, wire)
        done = list(train_state.parallel.pipeline.executed)
    listed = make_schedule(lay.schedule, lay.pipeline, run.accumulation, lay.stages_per_rank)
    own = list(listed.ranks[train_state.mesh.index("pipeline")])
    host = (float(owners["host"]),) if run.memory.hosts_optimizer or run.memory.activations == "host" else ()
    memory = Memory(({name: float(owners[name]) for name in OWNERS},), host=host)
    account = Account("run", seconds, run.batch_tokens, {}, ops.work, memory, _by_axis(wire))
    return account, done == own, len(own)


def _rest_of_round(train_state: TrainState, batch: Batch, wire: TrafficCounter) -> None:
    """If replicas synchronize every `sync_every` steps, count the other steps of the round too, and leave the mean per step."""
    steps = train_state.run.layout.sync_every if train_state.outer is not None else 1
    with wire:
        for _ in range(steps - 1):
            train_state.train_step(batch)
    for counts in (wire.traffic, wire.messages):
        for name in counts if steps > 1 else ():
            counts[name] *= Fraction(1, steps)  # type: ignore[assignment]


def _by_axis(wire: TrafficCounter) -> Traffic:
    size: dict[str, dict[str, float]] = {}
    messages: dict[str, dict[str, float]] = {}
    for record, counts in ((size, wire.traffic), (messages, wire.messages)):
        for (group, operation), value in counts.items():
            kinds = record.setdefault(AXIS_OF.get(group, group), {})
            kinds[operation] = kinds.get(operation, 0.0) + float(value)
    return Traffic(size, messages)


def planned(run: Run, rank: int) -> Account:
    """The planned account of one rank, without its time."""
    owners = state_bytes(run, rank) | {"activations": activations(planned_rank(run, rank))}
    held = float(hosted(run).held) if run.memory.hosts_optimizer else 0.0
    if run.memory.activations == "host":
        held += activations_away(planned_rank(run, rank))
    host = (held,) if held else ()
    memory = Memory(({name: float(owners[name]) for name in OWNERS},), host=host)
    return Account("plan", 0.0, run.batch_tokens, {}, work(run, rank), memory, traffic(run, rank))


def planned_seconds(run: Run) -> float:
    """The predicted seconds of a step if the run names a chip or a profile; 0 otherwise."""
    return plan(run).account.step_seconds if run.cluster.chip or run.cluster.profile else 0.0


def verify_rank(run: Run, steps: int = 3) -> Verdict:
    """Run a few steps of this rank after a warm-up, and compare with the plan. All ranks call this together."""
    run = behind_warmup(run)
    train_state = TrainState(run)
    batch = random_batch(run, train_state.mesh.data_index)
    for _ in range(2):  # DistributedDataParallel rebuilds its buckets after the first
        train_state.train_step(batch)
    seconds = []
    for _ in range(max(1, steps)):
        start = _now(train_state.device)
        train_state.train_step(batch).loss.item()
        seconds.append(_now(train_state.device) - start)
    done = executed(train_state)
    account, same, actions = counted(train_state, batch, seconds=statistics.median(seconds))
    account = replace(account, timeline=done)
    # Saved activations depend on the device that ran, whatever chip the run names; only the time is the named chip's.
    here = replace(run, train=replace(run.train, device="cuda" if train_state.device.type == "cuda" else "cpu"))
    expected = replace(planned(here, train_state.mesh.rank), step_seconds=planned_seconds(run))
    verdict = Verdict(train_state.mesh.rank, expected, account, same, actions)
    if run.objective.kind != "grpo":
        return verdict
    from shardwise.measure.rollouts import rollouts_against_plan  # imports the engine, so only here

    return replace(verdict, rollouts=tuple(rollouts_against_plan(train_state)))


def executed(train_state: TrainState) -> Timeline:
    """The actions that the pipeline executed in the last step, with the host's times."""
    pipeline = train_state.parallel.pipeline
    begin = pipeline.times[0][0]
    rank = train_state.mesh.index("pipeline")
    spans = [
        Span(rank, "compute", str(action), "other", start - begin, end - start, action.microbatch, action.stage)
        for action, (start, end) in zip(pipeline.executed, pipeline.times, strict=True)
    ]
    return Timeline(tuple(spans), pipeline.times[-1][1] - begin)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def verify_dry(run: Run, rank: int, say: Callable[[str], None] = lambda text: None, whole: bool = False) -> Verdict:
    """Verify one rank of a job of any size, without data. A few microbatches stand for all, unless `whole`; if they differ from the
    plan, all are run. `say` gets progress messages."""
    if not 0 <= rank < run.layout.world:
        raise UserError(Problem(f"{rank} is not a rank of a layout of {run.layout.world}", "--rank", "command line"))
    if run.layout.uses_ddp:
        raise UserError(
            Problem(
                "a dry run of replicas alone is that of one rank: DistributedDataParallel needs data; set it to 1",
                "layout.replicate",
            )
        )
    run, whole = behind_warmup(run), whole or run.layout.sync_every > 1
    # A run meant for GPUs uses the GPU loss here, but not GPU kernels, so its activations are those of a CPU.
    loss: Literal["chunked", "plain"] = "chunked" if chunks_loss(run, gpu=planned_on_gpu(run)) else "plain"
    run = replace(run, train=replace(run.train, device="cpu", loss=loss))
    count, middle = (run.accumulation, ()) if whole else microbatches_to_run(run, rank)
    short = with_microbatches(run, count)
    say(f"building rank {rank} of {run.layout.world}, to run {count} of {run.accumulation} microbatches without data")
    with dry_rank(short, rank) as train_state:
        times = (run.accumulation - count) // len(middle) if middle else 0
        account, same, actions = counted(train_state, random_batch(short), middle=middle, times=times, say=say)
    account = replace(account, tokens=run.batch_tokens)
    verdict = Verdict(rank, planned(run, rank), account, same, actions, count if times else 0)
    if times and not verdict.agrees(TOLERANCE):
        say("plan and run differ; running all microbatches, to be sure")
        return verify_dry(run, rank, say, whole=True)
    return verdict


def as_dict(verdicts: list[Verdict], tolerance: Mapping[str, float]) -> dict[str, Any]:
    """The verdicts as JSON data."""
    return {
        "agrees": all(v.agrees(tolerance) for v in verdicts),
        "ranks": [
            {
                "rank": v.rank,
                "agrees": v.agrees(tolerance),
                "schedule": v.schedule,
                "actions": v.actions,
                "microbatches": v.microbatches,
                "bytes_moved": v.measured.work.bytes,
                "timeline": [[s.name, s.start, s.seconds] for s in v.measured.timeline.spans],
                "differences": [
                    {"account": d.account, "name": d.name, "plan": d.first, "run": d.second,
                     "relative": d.relative if abs(d.relative) != float("inf") else None}
                    for d in v.differences()
                ],
            }
            for v in verdicts
        ],
    }  # fmt: skip
