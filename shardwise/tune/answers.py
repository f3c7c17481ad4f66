"""The answers of a round as arrays, the same on every rank: prompts with their sampled answers, the rewards, and the batches made
of them. Each rank samples and judges a share, and one all-gather exchanges the shares. A checkpoint holds the answers if a resumed
run could not sample them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from shardwise.data.batches import IGNORE_INDEX
from shardwise.parallel.collectives import all_gather_single
from shardwise.run import Run
from shardwise.train.objectives.grpo import AnswerBatch, weights_of
from shardwise.tune.advantages import group_advantages
from shardwise.tune.packing import Packing
from shardwise.tune.rollouts import Drawn

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass
class Answers:
    """Answers, group by group."""

    tokens: Ints
    """[answers, length]: a prompt and its answer, then -1."""
    prompts: Ints
    """[answers]: number of tokens of each prompt."""
    lengths: Ints
    """[answers]: number of tokens of each answer."""
    logprobs: Floats
    """[answers, length]: the engine's log-probabilities of its sampled tokens."""
    judged: Floats
    """[answers, functions]: the value of each reward function."""
    rewards: Floats
    """[answers]: the total reward."""
    ended: Ints
    """[answers]: 1 if an answer ended with an end token."""
    used: Ints
    """[answers]: 1 if the answer has a loss; 0 in groups that were left out and not replaced."""
    old: Floats
    """[answers, length]: the trainer's log-probabilities of the targets before the first update, if several steps learn from these
    answers; else [answers, 0]."""
    reference: Floats
    """[answers, length]: the reference's log-probabilities of the targets, if there is a reference; else [answers, 0]."""

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, rows: Ints | slice) -> Answers:
        """The answers of these rows."""
        return Answers(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """Several sets of answers, one after the other."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def tensors(self) -> dict[str, Tensor]:
        """The arrays as tensors, for a checkpoint."""
        return {f.name: torch.from_numpy(np.ascontiguousarray(getattr(self, f.name))) for f in fields(self)}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> Answers:
        """Answers from a checkpoint's tensors."""
        # For arrays without columns: a checkpoint holds no empty tensors.
        nothing = torch.zeros(len(tensors["prompts"]), 0, dtype=torch.float64)
        return cls(**{f.name: tensors.get(f.name, nothing).cpu().numpy() for f in fields(cls)})


def as_answers(
    prompts: Sequence[Ints], drawn: Drawn, judged: Floats, rewards: Floats, length: int, group: int
) -> Answers:
    """The sampled answers to some prompts, as arrays with rows of `length` tokens."""
    count = len(drawn.tokens)
    tokens = np.full((count, length), -1, dtype=np.int64)
    logprobs = np.zeros((count, length))
    starts = np.array([len(prompts[n // group]) for n in range(count)], dtype=np.int64)
    lengths = np.array([len(each) for each in drawn.tokens], dtype=np.int64)
    for n, (start, end) in enumerate(zip(starts.tolist(), (starts + lengths).tolist(), strict=True)):
        tokens[n, :start] = prompts[n // group]
        tokens[n, start:end] = drawn.tokens[n]
        logprobs[n, start:end] = drawn.logprobs[n]
    ended, used = np.array(drawn.ended, dtype=np.int64), np.ones(count, dtype=np.int64)
    nothing = np.zeros((count, 0))
    return Answers(tokens, starts, lengths, logprobs, judged, rewards, ended, used, nothing, nothing)


def exchange(own: Answers, prompts: int, group: int, device: torch.device, ranks: Sequence[int]) -> Answers:
    """All-gather the answers to `prompts` prompts. Of n ranks, rank `ranks[r]` has the answers to prompts r, r + n, …"""
    world = dist.get_world_size()
    share = -(-prompts // world) * group
    # All arrays travel in one float64 message, in which tokens are exact.
    columns = [getattr(own, f.name) for f in fields(Answers)]
    widths = [column.shape[1] if column.ndim > 1 else 1 for column in columns]
    parts = zip(columns, widths, strict=True)
    table = np.concatenate([column.reshape(len(own), width).astype(np.float64) for column, width in parts], axis=1)
    sent = torch.zeros(share, table.shape[1], dtype=torch.float64, device=device)
    sent[: len(table)] = torch.from_numpy(table).to(device)
    found = torch.empty(world * share, table.shape[1], dtype=torch.float64, device=device)
    all_gather_single(found, sent)
    every = found.cpu().numpy()
    place = np.arange(prompts)
    rows = np.asarray(ranks)[place % world] * share + place // world * group
    every = every[(rows[:, None] + np.arange(group)).ravel()]
    made, first = {}, 0
    for f, column, width in zip(fields(Answers), columns, widths, strict=True):
        part = every[:, first : first + width].astype(column.dtype)
        made[f.name] = part if column.ndim > 1 else part[:, 0]
        first += width
    return Answers(**made)


def tokens_of(answers: Answers) -> int:
    """The number of tokens of prompts and answers."""
    return int((answers.prompts + answers.lengths).sum())


def packing_of(answers: Answers, run: Run) -> Packing | None:
    """How the answers are packed, if the run asks for it; else None. An answer's last token is only a target, never an input."""
    return Packing(np.maximum(answers.prompts + answers.lengths - 1, 1), run) if run.objective.pack else None


def batch_of(answers: Answers, rows: Ints, run: Run, pad: int, packing: Packing | None = None) -> AnswerBatch:
    """The batch of a step that learns from all `answers`; this rank has these `rows` of it."""
    group = run.objective.group
    advantages = group_advantages(answers.rewards.reshape(-1, group), run.objective.variant != "dr_grpo").ravel()
    weights = weights_of(run, answers.lengths)
    place = np.arange(answers.tokens.shape[1])
    inside = (place >= answers.prompts[:, None] - 1) & (place < (answers.prompts + answers.lengths - 1)[:, None])
    inside &= answers.used[:, None] > 0
    following = np.concatenate((answers.tokens[:, 1:], np.full((len(answers), 1), -1)), axis=1)
    drawn = np.concatenate((answers.logprobs[:, 1:], np.zeros((len(answers), 1))), axis=1)
    tokens_in_all = max(1, int(inside.sum()))
    counted = tokens_in_all if run.objective.variant == "dapo" else max(1, int(answers.used.sum()))

    def own(values: NDArray[Any], fill: float = 0.0) -> NDArray[Any]:
        return (values if packing is None else packing.lay(values, fill))[rows]

    learned = None
    if packing is not None:
        learned = int(np.isin(packing.of_row[inside.any(axis=1)], rows).sum())
    return AnswerBatch(
        tokens=own(np.where(answers.tokens < 0, pad, answers.tokens), pad),
        targets=own(np.where(inside, following, IGNORE_INDEX), IGNORE_INDEX),
        positions=None if packing is None else packing.positions[rows],
        documents=None if packing is None else packing.documents[rows],
        advantages=own(np.where(inside, advantages[:, None], 0.0)),
        weights=own(np.where(inside, weights[:, None], 0.0)),
        drawn=own(np.where(inside, drawn, 0.0)),
        old=own(answers.old) if answers.old.size else None,
        reference=own(answers.reference) if answers.reference.size else None,
        answers=learned,
        step_tokens=tokens_of(answers),
        per_token=counted / tokens_in_all,
    )
