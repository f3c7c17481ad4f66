"""Rollouts: completions that a trainer generates with the engine in its own process. This file plans the memory of the engine
besides the training state, and the time of a step of such a run.

Where every rank trains unsharded parameters, each rank has an engine that reads those; it holds its own copy only of weights that
the trainer keeps solely in a higher precision than the compute dtype. On other layouts the engines are sharded over the ranks like
the trainer, and each rank holds its shard of one engine, which it receives before a round (`weight_sync.py`). The KV cache takes
the memory that training leaves at its peak, but no more than the completions of a round can fill.

A round is simulated with the engine's scheduler, all completions at full length, on the engine with the most of them. Look-back
passes (the reference model's, and the probabilities before the first of several steps) take a third of a training step each, since
a backward pass computes twice as much as a forward pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from shardwise.hardware import collective_seconds
from shardwise.hardware.chips import Chip
from shardwise.hardware.engine_facts import engine_facts
from shardwise.ledger import Memory
from shardwise.plan.cost.flops import forward_flops
from shardwise.plan.cost.job import cluster_of, job_of
from shardwise.plan.plan import prompt_tokens
from shardwise.plan.serving.pool import activation_bytes, device_bytes, stage_memory
from shardwise.plan.serving.simulate import EngineSize, Simulated, simulate
from shardwise.plan.serving.step_time import StepTime
from shardwise.plan.serving.weight_sync import WeightSync, is_whole, needed, part_width, rollout_layout
from shardwise.plan.trainer.memory import memory_of
from shardwise.run import LayoutConfig, Run
from shardwise.run.derive import keeps_compute_copies, planned_on_gpu
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.load import LoadRequest
from shardwise.run.parameters import find_parameter
from shardwise.run.ranks.served import ServingRank


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes on a device while a run generates completions and trains on them."""

    training: int
    """The trainer's peak, including the reference model where there is one: the parameters once more."""
    weights: int
    """The engine's own weights; those that it shares with the trainer are not counted."""
    activations: int
    page: int
    pages: int

    @property
    def cache(self) -> int:
        """All pages."""
        return self.page * self.pages

    @property
    def total(self) -> int:
        """The sum of all owners. Activations of engine and trainer do not share memory, though never live at the same time."""
        return self.training + self.weights + self.activations + self.cache


def as_served(run: Run) -> Run:
    """The run as its engines see it: on their layout, with the trainer's sequence length."""
    return replace(run, layout=rollout_layout(run), model=replace(run.model, max_positions=run.train.seq_len))


def answers_at_once(run: Run) -> int:
    """Completions of a round that one engine generates."""
    prompts = run.train.global_batch * run.objective.minibatches // run.objective.group
    return -(-prompts // rollout_layout(run).replicate) * run.objective.group


def own_weight_bytes(run: Run, *, gpu: bool, rank: int = 0) -> int:
    """Bytes of weights that a rank's engine holds besides the trainer's."""
    model, width = run.model, DTYPE_BYTES[run.train.dtype]
    low = run.train.dtype in ("bfloat16", "float16")
    copies = keeps_compute_copies(run, gpu=gpu)
    shares = is_whole(run) and not run.objective.asynchronous
    place = ServingRank(rollout_layout(run), rank)

    def own(name: str) -> int:
        numel = prod(place.box(find_parameter(model, name))[1])
        entry = find_parameter(model, name, run.adapter)
        trained = entry.frozen or not low or entry.owner == "router" or (copies and entry.is_linear)
        if shares and trained and not entry.adapted and not entry.dtype:  # the trainer has it in the compute dtype
            return 0
        return numel * part_width(run, name, name, width)

    # Layers of one kind have the same sizes, so each kind is counted once.
    alike: Counter[str] = Counter()
    first: dict[tuple[bool, str], str] = {}
    for name in needed(run, place.stage):
        layer, _, leaf = name.removeprefix("layers.").partition(".")
        kind = (layer.isdigit() and model.is_moe(int(layer)), leaf if layer.isdigit() else name)
        alike[first.setdefault(kind, name)] += 1
    return sum(count * own(name) for name, count in alike.items())


def rollout_memory(
    run: Run, chip: Chip, total: int, trained: Memory | None = None, rank: int | None = None
) -> RolloutMemory:
    """The memory of a device of `total` bytes, and how many pages fit: the same number on all ranks of an engine. `trained` is the
    memory of training, where it is known. For one `rank`, or for the one with the least room."""
    gpu = chip.name != "cpu"
    if trained is None:
        placed = replace(run, cluster=replace(run.cluster, chip=chip.name))
        trained = memory_of(placed, job_of(placed))
    reference = (
        max(each["parameters"] for each in trained.ranks) if run.objective.kl_beta and not run.adapter.used else 0.0
    )
    training = int(trained.peak + reference)
    served = as_served(run)
    sequences = min(run.serve.max_sequences, run.serve.max_step_tokens, answers_at_once(run))
    most = sequences * -(-run.train.seq_len // run.serve.page_tokens) + 1

    def here(rank: int) -> RolloutMemory:
        stage = ServingRank(served.layout, rank).stage
        weights = own_weight_bytes(run, gpu=gpu or planned_on_gpu(run), rank=rank)
        activations, page = activation_bytes(served, stage), stage_memory(served, stage, chip, total).page
        room = int(total * (1 - run.cluster.headroom)) - training - weights - activations
        if run.serve.memory_gib:
            room = int(run.serve.memory_gib * 2**30)
        return RolloutMemory(training, weights, activations, page, max(0, min(room // max(1, page), most)))

    # Shards are rounded up, so the first rank of a stage holds the most.
    each = served.layout.world // served.layout.pipeline
    tightest = min(
        (here(n * each) for n in range(served.layout.pipeline)), key=lambda memory: (memory.pages, -memory.total)
    )
    return tightest if rank is None else replace(here(rank), pages=tightest.pages)


def _device(run: Run) -> tuple[Chip, int]:
    """A rank's chip, and its share of the chip's memory."""
    chip = cluster_of(run).chip
    return chip, device_bytes(chip) // (run.layout.world if chip.name == "cpu" else 1)


def _least_pages(run: Run) -> int:
    """The pages of one completion."""
    return -(-run.train.seq_len // run.serve.page_tokens) + 1


def rollouts_fit(run: Run, trained: Memory) -> bool:
    """Whether the engine for a run's rollouts fits besides the memory of training; true for runs without rollouts."""
    if run.objective.kind != "grpo":
        return True
    return rollout_memory(run, *_device(run), trained).pages >= _least_pages(run)


@dataclass(frozen=True)
class RolloutPlan:
    """A step of a run that generates its own completions, with its share of a round."""

    memory: RolloutMemory
    fits: bool
    prompt_tokens: int
    answers: int
    """Completions of a round, over all ranks."""
    rollout_seconds: float
    """Per round."""
    passes: int
    """Forward passes over each completion before it is trained on."""
    logprob_seconds: float
    """Per round."""
    train_seconds: float
    """Per step."""
    step_seconds: float
    """Per step, including its share of the round."""
    rollout_flops: float
    """Per round, over all ranks."""
    origin: str
    tokens: int
    """Completion tokens of a round."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """The layout of the engines."""
    weight_sync_seconds: float = 0.0
    """Per round, and part of `rollout_seconds`: the weights are sent to the engines."""

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second, over all ranks."""
        return self.tokens / self.rollout_seconds

    def as_dict(self) -> dict[str, Any]:
        """For programs; names are stable."""
        owners = ("training", "weights", "activations", "cache", "pages", "total")
        names = ("fits", "prompt_tokens", "answers", "tokens", "rollout_seconds", "passes", "logprob_seconds", "train_seconds",
                 "step_seconds", "rollout_flops")  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "rollout_tokens_per_s": self.tokens_per_s, "memory": {name: getattr(self.memory, name) for name in owners},
            "steps": f"simulated; {self.origin}", "weight_sync_seconds": self.weight_sync_seconds,
            "engines": {"count": self.layout.replicate}
            | {axis: getattr(self.layout, axis) for axis in ("tensor", "pipeline", "expert")},
        }  # fmt: skip


WAVES = (8, 16)
"""Longer rounds are simulated for these two numbers of waves (a wave: the completions an engine generates at once) and
extrapolated: later waves repeat, since all completions have the same length."""


def round_seconds(run: Run, memory: RolloutMemory) -> float:
    """Seconds of a round on the engine with the most completions."""
    answers, group = answers_at_once(run), run.objective.group
    own = -(-run.objective.completion_tokens // run.serve.page_tokens) + 1
    together = min(run.serve.max_sequences, run.serve.max_step_tokens, memory.pages // own)
    wave = -(-max(together, 1) // group) * group
    if answers <= WAVES[1] * wave:
        return simulated_round(run, memory).figures.seconds
    first, second = (simulated_round(run, memory, waves * wave).figures.seconds for waves in WAVES)
    return second + (answers / wave - WAVES[1]) * (second - first) / (WAVES[1] - WAVES[0])


def simulated_round(run: Run, memory: RolloutMemory, answers: int = 0) -> Simulated:
    """A round on the engine with the most completions, or with `answers` of them, all at full length, simulated with the engine's
    scheduler."""
    serve, asked = run.serve, run.objective
    engine = replace(run, layout=rollout_layout(run), serve=replace(serve, weights="auto", head="auto"))
    times = StepTime.of_run(engine, cluster_of(run))
    size = EngineSize(max(memory.pages, _least_pages(run)), 0, run.train.seq_len, run.model.sliding_window)
    own = [LoadRequest(0.0, prompt_tokens(run), asked.completion_tokens)] * (answers or answers_at_once(run))
    return simulate(serve, own, times, size, group=asked.group)


def weight_sync_seconds(run: Run) -> float:
    """Seconds to send the weights to the engines before a round: an all-to-all for each parameter among the ranks of a replica,
    timed for the rank that receives the most."""
    if is_whole(run):
        return 0.0
    cluster, width = cluster_of(run), DTYPE_BYTES[run.train.dtype]
    ranks = run.layout.world // run.layout.replicate
    layout = rollout_layout(run)
    found = []
    for stage in range(layout.pipeline):
        sync = WeightSync(run, stage * (layout.world // layout.pipeline))
        sizes = sync.received_bytes(DTYPE_BYTES, width)
        found.append(sum(collective_seconds(cluster, "all_to_all", size, ranks) for size in sizes))
    return max(found)


def plan_rollouts(run: Run, train_seconds: float, trained: Memory | None = None) -> RolloutPlan:
    """The plan of a step whose training part takes `train_seconds`, and `trained` memory where that is known."""
    asked = run.objective
    memory = rollout_memory(run, *_device(run), trained)
    least, facts = _least_pages(run), engine_facts(cluster_of(run).chip)
    prompt, answers = prompt_tokens(run), run.train.global_batch * asked.minibatches
    steps = asked.minibatches * asked.iterations
    passes = int(steps > 1) + int(asked.kl_beta > 0)
    scoring = passes * asked.minibatches * train_seconds / 3
    sync = weight_sync_seconds(run)
    rollout = round_seconds(run, memory) + sync
    layout = rollout_layout(run)
    beside = asked.asynchronous and (layout.world == layout.replicate or cluster_of(run).chip.name == "cpu")
    exposed = max(0.0, rollout - scoring - steps * train_seconds) if beside else rollout
    tokens = answers * asked.completion_tokens
    flops = forward_flops(run.model, prompt + asked.completion_tokens) * (tokens + answers // asked.group * prompt)
    return RolloutPlan(
        memory, memory.pages >= least, prompt, answers, rollout, passes, scoring, train_seconds,
        train_seconds + (exposed + scoring) / steps, flops, facts.origin, tokens, layout, sync,
    )  # fmt: skip
