"""Answers that a trainer makes with the engine in its own process: what the engine holds beside the training state, and what a step
of such a run takes.

Every rank has an engine of the whole network. Where the trainer's tensors are whole on a rank the engine reads those, so it holds
no weights but the ones that the trainer has only in a higher precision than it computes in. The pool of keys and values takes what
training leaves at its peak, but no more than the answers of a round can fill.

A round is played with the engine's scheduler, all answers at their full length, on the rank with most of them. Passes that look
back (the reference, and the probabilities before the first of several steps) take a third of a training step each, as a backward
pass computes twice what a forward pass does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.data.shards import read_index
from shardwise.hardware.chips import Chip
from shardwise.hardware.engine_facts import engine_facts
from shardwise.ledger import Memory
from shardwise.plan.cost.flops import forward_flops
from shardwise.plan.cost.job import cluster_of, job_of
from shardwise.plan.serving.cost import Serving
from shardwise.plan.serving.engines import FORMATS, OURS
from shardwise.plan.serving.plan import STORED
from shardwise.plan.serving.play import Place, Played, play
from shardwise.plan.serving.pool import activation_bytes, device_bytes, kv_dtype, stage_memory
from shardwise.plan.serving.step_time import StepTime
from shardwise.plan.trainer.memory import memory_of
from shardwise.plan.trainer.rank import WIDTHS
from shardwise.run import LayoutConfig, Run
from shardwise.run.derive import keeps_compute_copies, planned_on_gpu
from shardwise.run.load import LoadRequest
from shardwise.run.parameters import Parameter, first_parameters, last_parameters, layer_parameters
from shardwise.run.vocabulary import INDEX
from shardwise.run.weights import BYTES


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of a device while a run makes answers and learns from them."""

    training: int
    """The trainer's peak, with the reference where there is one: the parameters once more."""
    weights: int
    """Of the engine's own; those that it shares with the trainer are not counted."""
    activations: int
    page: int
    pages: int

    @property
    def cache(self) -> int:
        """All pages."""
        return self.page * self.pages

    @property
    def total(self) -> int:
        """All of it. The engine's activations and the trainer's are not there at the same time, but their memory is not shared."""
        return self.training + self.weights + self.activations + self.cache


def as_served(run: Run) -> Run:
    """The run as one rank's engine sees it: alone, with rows of the trainer's length."""
    return replace(run, layout=LayoutConfig(), model=replace(run.model, max_positions=run.train.seq_len))


def answers_at_once(run: Run) -> int:
    """Answers of a round that one rank makes."""
    prompts = run.train.global_batch * run.objective.minibatches // run.objective.group
    return -(-prompts // run.layout.world) * run.objective.group


def shares_weights(run: Run) -> bool:
    """Whether the engine reads the trainer's own tensors."""
    whole = run.layout.world == run.layout.replicate and not run.layout.offload
    return whole and not run.objective.asynchronous


def own_weight_bytes(run: Run, *, gpu: bool) -> int:
    """Bytes of weights that an engine holds besides the trainer's."""
    model, width = run.model, BYTES[run.train.dtype]
    low = run.train.dtype in ("bfloat16", "float16")
    shares, copies = shares_weights(run), keeps_compute_copies(run, gpu=gpu)
    whole = run.layout.world == run.layout.replicate and not run.layout.offload

    def own(entry: Parameter, layer: bool) -> float:
        if entry.packed > 1:  # codes of 4 bits become a matrix
            return entry.numel * (entry.packed * width + (0 if whole else WIDTHS[entry.dtype]))
        if entry.dtype or (run.adapter.used and not entry.frozen and entry.owner != "head"):
            # Parts of a matrix, which are read where they are, or brought together from the ranks.
            return 0.0 if whole else entry.numel * (WIDTHS[entry.dtype] if entry.dtype else max(4, width))
        if not shares or entry.adapted:
            return entry.numel * width
        if entry.frozen:  # the trainer has it in the dtype of the arithmetic
            return 0.0
        if not low or entry.owner == "router" or (layer and copies and entry.is_linear):
            return 0.0
        return entry.numel * width

    outer = (*first_parameters(model, run.adapter), *last_parameters(model, run.adapter))
    total = sum(own(entry, False) for entry in outer)
    for layer in range(model.layers):
        entries = layer_parameters(model, model.is_moe(layer), run.adapter)
        total += sum(own(entry, True) for entry in entries)
    return int(total)


def rollout_memory(run: Run, chip: Chip, total: int, trained: Memory | None = None) -> RolloutMemory:
    """What a device of `total` bytes holds, and how many pages fit; beside the memory of training, where that is known."""
    gpu = chip.name != "cpu"
    if trained is None:
        placed = replace(run, cluster=replace(run.cluster, chip=chip.name))
        trained = memory_of(placed, job_of(placed))
    reference = (
        max(rank["parameters"] for rank in trained.ranks) if run.objective.kl_beta and not run.adapter.used else 0.0
    )
    training = int(trained.peak + reference)
    alone = as_served(run)
    weights, activations = own_weight_bytes(run, gpu=gpu or planned_on_gpu(run)), activation_bytes(alone)
    page = stage_memory(alone, 0, chip, total).page
    room = int(total * (1 - run.cluster.headroom)) - training - weights - activations
    if run.serve.memory_gib:
        room = int(run.serve.memory_gib * 2**30)
    sequences = min(run.serve.max_sequences, run.serve.max_step_tokens, answers_at_once(run))
    most = sequences * -(-run.train.seq_len // run.serve.page_tokens) + 1
    return RolloutMemory(training, weights, activations, page, max(0, min(room // max(1, page), most)))


def _device(run: Run) -> tuple[Chip, int]:
    """A rank's chip, and the memory that it has of it."""
    chip = cluster_of(run).chip
    return chip, device_bytes(chip) // (run.layout.world if chip.name == "cpu" else 1)


def _least_pages(run: Run) -> int:
    """Of one answer."""
    return -(-run.train.seq_len // run.serve.page_tokens) + 1


def rollouts_fit(run: Run, trained: Memory) -> bool:
    """Whether the engine that makes a run's answers fits beside the memory of its training; true of runs that make none."""
    if run.objective.kind != "grpo":
        return True
    return rollout_memory(run, *_device(run), trained).pages >= _least_pages(run)


@dataclass(frozen=True)
class RolloutPlan:
    """A step of a run that makes its own answers, with its share of a round."""

    memory: RolloutMemory
    fits: bool
    prompt_tokens: int
    answers: int
    """Of a round, over all ranks."""
    rollout_seconds: float
    """Of a round."""
    passes: int
    """Forward passes over each answer before it is learned from."""
    look_back_seconds: float
    """Of a round."""
    train_seconds: float
    """Of a step."""
    step_seconds: float
    """Of a step, with all of it."""
    rollout_flops: float
    """Of a round, over all ranks."""
    origin: str
    tokens: int
    """Of the answers of a round."""

    @property
    def tokens_per_s(self) -> float:
        """Of answers, over all ranks."""
        return self.tokens / self.rollout_seconds

    def as_dict(self) -> dict[str, Any]:
        """For programs; names are stable."""
        memory = {
            name: getattr(self.memory, name)
            for name in ("training", "weights", "activations", "cache", "pages", "total")
        }
        names = (
            "fits",
            "prompt_tokens",
            "answers",
            "tokens",
            "rollout_seconds",
            "passes",
            "look_back_seconds",
            "train_seconds",
        )
        found = {name: getattr(self, name) for name in names}
        return found | {
            "step_seconds": self.step_seconds, "rollout_flops": self.rollout_flops, "rollout_tokens_per_s": self.tokens_per_s,
            "memory": memory, "steps": f"played; {self.origin}",
        }  # fmt: skip


def prompt_tokens(run: Run) -> int:
    """The mean length of a run's prompts, where its sets are there; else what answers leave of a row."""
    most = run.train.seq_len - run.objective.completion_tokens
    found = [read_index(folder) for folder in run.data.sets if (Path(folder) / INDEX).is_file()]
    documents = sum(index.documents for index in found)
    return max(1, min(most, round(sum(index.tokens for index in found) / documents))) if documents else most


def played_round(run: Run, memory: RolloutMemory) -> Played:
    """A round of the rank that has most answers, all of them at their full length, played with the engine's scheduler."""
    cluster, serve, asked, model = cluster_of(run), run.serve, run.objective, run.model
    form = FORMATS[STORED[run.train.dtype]]
    windowed = (1.0, model.sliding_window) if model.sliding_window else (0.0, 0)
    serving = Serving(model, cluster, OURS, form, form, BYTES[kv_dtype(run)], 1, 1, windowed=windowed)
    times = StepTime(serving, engine_facts(cluster.chip), min(serve.max_sequences, serve.max_step_tokens))
    place = Place(max(memory.pages, _least_pages(run)), 0, run.train.seq_len, model.sliding_window)
    own = [LoadRequest(0.0, prompt_tokens(run), asked.completion_tokens)] * answers_at_once(run)
    return play(serve, own, times, place, group=asked.group)


def plan_rollouts(run: Run, train_seconds: float, trained: Memory | None = None) -> RolloutPlan:
    """What a step takes, whose training part takes so long, and so much memory, where that is known."""
    asked = run.objective
    memory = rollout_memory(run, *_device(run), trained)
    least, facts = _least_pages(run), engine_facts(cluster_of(run).chip)
    prompt, answers = prompt_tokens(run), run.train.global_batch * asked.minibatches
    played = played_round(run, memory)
    steps = asked.minibatches * asked.iterations
    passes = int(steps > 1) + int(asked.kl_beta > 0)
    looking = passes * asked.minibatches * train_seconds / 3
    rollout = played.figures.seconds
    hidden = max(0.0, rollout - looking - steps * train_seconds) if asked.asynchronous else rollout
    tokens = answers * asked.completion_tokens
    flops = forward_flops(run.model, prompt + asked.completion_tokens) * (tokens + answers // asked.group * prompt)
    return RolloutPlan(
        memory, memory.pages >= least, prompt, answers, rollout, passes, looking, train_seconds,
        train_seconds + (hidden + looking) / steps, flops, facts.origin, tokens,
    )  # fmt: skip
