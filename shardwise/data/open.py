"""Opens the data of a run: its token sets or the built-in corpus, checked against each other and the model, as samples for
training and samples for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.batches import Samples, Windows, windows_in
from shardwise.data.corpus import builtin_corpus
from shardwise.data.pack import Packs, pack
from shardwise.data.prompts import Prompts
from shardwise.data.scores import Scores, opened
from shardwise.data.shards import TokenSet
from shardwise.data.tokenizer import Tokenizer
from shardwise.run import Problem, Run, UserError
from shardwise.run.sections.objective import FACTS, targets_of


@dataclass(frozen=True)
class Data:
    """The data of a run. `fingerprint` changes when any token of any set does."""

    train: Samples
    validation: Samples
    tokenizer: Tokenizer
    fingerprint: str


def open_data(run: Run) -> Data:
    """Open the data a run names; all problems are reported at once."""
    data, length = run.data, run.train.seq_len
    train, validation = _open_sets(run)
    if not data.sets:
        corpus = builtin_corpus()
        train = [TokenSet.open(corpus / "train")]
        validation = validation or [TokenSet.open(corpus / "validation")]

    problems: list[Problem] = []
    held_out = not validation
    if held_out and not data.holdout and run.train.eval_every:
        message = "is 0 and data.validation is empty: set one of them, or train.eval_every = 0"
        problems.append(Problem(message, "data.holdout"))
    problems += _other_tokenizers(run, train + validation)
    problems += [problem for each in train + validation for problem in _nothing_to_learn(run, each)]
    told = [opened(run, each, key, problems) for each, key in ((train, "data.sets"), (validation, "data.validation"))]
    whole = FACTS[run.objective.kind].scores
    training, evaluation = [], []
    for each in train:
        learned, reserved = _split(each, length, data.holdout if held_out else 0.0, whole)
        training.append(learned)
        evaluation.append(reserved)
        if learned.count < 1:
            problems.append(_too_short(each, length, "data.sets", " and one to hold out" if reserved.count else ""))
    if held_out and data.holdout and run.train.eval_every and not any(part.count for part in evaluation):
        message = (
            f"{data.holdout:g} holds out no document with anything to learn within train.seq_len = {length} tokens; hold out more, "
            "or name sets in data.validation"
        )
        problems.append(Problem(message, "data.holdout"))
    if not held_out:
        evaluation = [_split(each, length, 0.0, whole)[0] for each in validation]
        problems += [_too_short(w.tokens, length, "data.validation", "") for w in evaluation if not w.count]
    if problems:
        raise UserError(*problems)

    separate, asked = data.separate_documents, targets_of(run.objective, run.model.vocab) - 1
    more: dict[str, Any] = dict(separate_documents=separate, asked=asked)
    return Data(
        train=Samples(training, length, seed=run.train.seed, weights=data.weights, stored=told[0], **more),
        validation=Samples(evaluation, length, shuffled=False, stored=told[0] if held_out else told[1], **more),
        tokenizer=train[0].tokenizer(),
        fingerprint=_fingerprint(train, validation, [each for several in told for each in several]),
    )


def rows_to_score(run: Run) -> list[tuple[TokenSet, Samples]]:
    """Every set of a run with all its rows in order, for a frozen network to score."""
    message = "is empty, and what is said of the tokens of a set is written beside it; name sets of your own"
    length, separate = run.train.seq_len, run.data.separate_documents
    return [
        (each, Samples([_split(each, length, 0.0, False)[0]], length, shuffled=False, separate_documents=separate))
        for each in chain(*_open_sets(run, message))
    ]


@dataclass(frozen=True)
class PromptData:
    """The prompts of a run that generates its answers during training."""

    train: Prompts
    validation: Prompts
    tokenizer: Tokenizer
    fingerprint: str
    too_long: int
    """Prompts left out because no answer would fit after them."""


def open_prompts(run: Run) -> PromptData:
    """Open the prompts a run names, without those that leave no room for an answer; all problems are reported at once."""
    data, most = run.data, run.train.seq_len - run.objective.completion_tokens
    message = "is empty, and answers need prompts: `shardwise data build --chat` makes a set of them"
    train, validation = _open_sets(run, message)
    problems: list[Problem] = []
    for key, sets in (("data.sets", train), ("data.validation", validation)):
        message = "holds no prompts with their rows, which are answered; build it of rows with a `prompt` and no answer"
        problems += [Problem(message, key, str(each.folder)) for each in sets if each.index.kind != "prompts"]
    problems += _other_tokenizers(run, train + validation)
    if problems:
        raise UserError(*problems)
    learned, held_out = [], [_fitting(each, most) for each in validation]
    too_long = 0
    for each in train:
        fitting = _fitting(each, most)
        too_long += each.documents - len(fitting)
        reserved = max(round(len(fitting) * data.holdout), 1) if data.holdout and not validation else 0
        learned.append(fitting[: len(fitting) - reserved])
        if not validation:
            held_out.append(fitting[len(fitting) - reserved :])
        if not len(learned[-1]):
            message = f"has no prompt of at most {most} tokens: train.seq_len less objective.completion_tokens"
            problems.append(
                Problem(message + (", and one to hold out" if reserved else ""), "data.sets", str(each.folder))
            )
    if problems:
        raise UserError(*problems)
    return PromptData(
        train=Prompts(train, learned, run.train.seed, weights=data.weights),
        validation=Prompts(validation or train, held_out, shuffled=False),
        tokenizer=train[0].tokenizer(),
        fingerprint=_fingerprint(train, validation),
        too_long=too_long,
    )


def _fitting(tokens: TokenSet, most: int) -> NDArray[np.int64]:
    """The documents of at most this many tokens."""
    return np.flatnonzero(np.diff(tokens.ends.astype(np.int64), prepend=0) <= most)


def _split(tokens: TokenSet, length: int, holdout: float, whole: bool) -> tuple[Windows | Packs, Windows | Packs]:
    """A set's training rows and its held-out rows: the last windows of a text, the last documents of conversations."""
    if tokens.index.kind in ("text", "prompts"):
        count = windows_in(tokens.tokens, length)
        reserved = max(round(count * holdout), 1) if holdout else 0
        return Windows(tokens, 0, count - reserved), Windows(tokens, count - reserved, reserved)
    group = 2 if tokens.index.paired else 1
    reserved = max(round(tokens.documents // group * holdout), 1) * group if holdout else 0
    edge = tokens.documents - reserved
    return pack(tokens, length, 0, edge, whole), pack(tokens, length, edge, whole=whole)


def _nothing_to_learn(run: Run, tokens: TokenSet) -> list[Problem]:
    """The reasons why the objective of a run cannot learn from a set."""
    index, kind = tokens.index, run.objective.kind
    made = "`shardwise data build --chat` makes them of rows with"
    rules = (
        (
            index.kind == "prompts",
            "holds prompts without answers, which there is nothing to learn from; they are for objectives that make the answers",
        ),
        (
            FACTS[kind].pairs and not index.paired,
            f"holds no pairs, which objective.kind = {kind} learns from; {made} `chosen` and `rejected`",
        ),
        (
            run.objective.margins and index.paired and not index.margins,
            'says of no pair by how much it differs; build it of rows with a "margin", or leave objective.margins off',
        ),
        (
            FACTS[kind].labels and index.kind != "preference",
            f"holds no verdicts, which objective.kind = {kind} learns from; {made} `prompt`, `completion` and `label`, or of pairs",
        ),
    )
    return [Problem(message, "data.sets", str(tokens.folder)) for wrong, message in rules if wrong]


def _open_sets(run: Run, empty: str = "") -> list[list[TokenSet]]:
    """The sets that a run names, those to train on and those to validate on. `empty`: the problem with a run that names none."""
    problems: list[Problem] = []
    found: list[list[TokenSet]] = []
    for key, folders in (("data.sets", run.data.sets), ("data.validation", run.data.validation)):
        found.append([])
        for folder in folders:
            try:
                found[-1].append(TokenSet.open(folder))
            except UserError as e:
                problems += [Problem(p.message, key, p.where) for p in e.problems]
    if empty and not run.data.sets:
        problems.append(Problem(empty, "data.sets"))
    if problems:
        raise UserError(*problems)
    return found


def _other_tokenizers(run: Run, sets: Sequence[TokenSet]) -> list[Problem]:
    """Sets that were made with different tokenizers, or with a larger one than the model has room for."""
    first = sets[0]
    problems = [
        Problem(
            f"was made with another tokenizer ({_describe(each)}) than {first.folder} ({_describe(first)}); "
            "build both with the same one",
            where=str(each.folder),
        )
        for each in sets[1:]
        if each.index.tokenizer != first.index.tokenizer
    ]
    vocab = max(each.index.tokenizer["vocab"] for each in sets)
    if vocab > run.model.vocab:
        message = f"{run.model.vocab} is too small for the data's tokenizer; set model.vocab = {vocab}, or more"
        problems.append(Problem(message, "model.vocab"))
    return problems


def _describe(tokens: TokenSet) -> str:
    return f"{tokens.index.tokenizer['kind']}, {tokens.index.tokenizer['vocab']} tokens"


def _too_short(tokens: TokenSet, length: int, key: str, more: str) -> Problem:
    if tokens.index.marked:
        within = f"within train.seq_len = {length} tokens"
        message = f"has {tokens.documents} documents, of which none has anything to learn {within}"
        message += f", or there is none{more}" if more else ""
    else:
        message = f"has {tokens.tokens} tokens, too few for one sequence of train.seq_len = {length}{more}"
    return Problem(message, key, str(tokens.folder))


def _fingerprint(train: Sequence[TokenSet], validation: Sequence[TokenSet], stored: Sequence[Scores] = ()) -> str:
    lines = [f"train {each.fingerprint}" for each in train]
    lines += [f"validation {each.fingerprint}" for each in validation]
    lines += [f"stored {each.index.digest}" for each in stored]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
