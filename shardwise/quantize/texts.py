"""The texts for calibration and evaluation: the data of the model's run, another token set, or a text file. Calibration reads the
training data of a run, and the perplexity is that of its validation data; of a file, that of its last tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.data.open import open_data
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.model.transformer import Transformer
from shardwise.run import Problem, Run, UserError
from shardwise.run.problems import unreadable
from shardwise.run.vocabulary import INDEX

HELD_OUT = 10
"""One in this many sequences of a text file is held out for the perplexity."""


@dataclass(frozen=True)
class Texts:
    """Samples by index, and how many there are."""

    calibration: Callable[[NDArray[np.int64]], Batch]
    calibrations: int
    evaluation: Callable[[NDArray[np.int64]], Batch]
    evaluations: int


def open_texts(folder: Path, run: Run, given: Path | None) -> Texts:
    """The texts for the checkpoint in a folder: a given token set or text file, or the data of its run."""
    tokenizer = load_tokenizer(folder)
    if given is not None and given.is_file():
        return _file(given, tokenizer, run)
    if given is not None:
        if not (given / INDEX).is_file():
            reason = "is neither a file of text nor a set of tokens, as `shardwise data build` makes them"
            raise UserError(
                Problem(reason if given.exists() else "there is no such file or folder", "--set", str(given))
            )
        run = replace(run, data=replace(run.data, sets=(str(given),), weights=(), validation=()))
    data = open_data(run)
    if data.tokenizer.digest != tokenizer.digest:
        if given is None:
            reason = "the run of this checkpoint has no data in its tokens; name a set of tokens or a text: --set DATA"
            raise UserError(Problem(reason, where=str(folder)))
        raise UserError(Problem("was made with another tokenizer than the checkpoint's", "--set", str(given)))
    if not data.validation.count:
        raise UserError(
            Problem("holds nothing back to evaluate on; set data.holdout above 0", "--set", str(given or folder))
        )
    return Texts(data.train.take, data.train.count, data.validation.take, data.validation.count)


def _file(path: Path, tokenizer: Tokenizer, run: Run) -> Texts:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise unreadable(e, "--set", path) from None
    tokens, length = np.asarray(tokenizer.encode(text), np.int64), run.train.seq_len
    count = (len(tokens) - 1) // length
    if count < 2:
        reason = f"has {len(tokens)} tokens; two sequences of train.seq_len = {length} are the least"
        raise UserError(Problem(reason, "--set", str(path)))
    held = max(1, count // HELD_OUT)

    def taking(first: int, many: int) -> Callable[[NDArray[np.int64]], Batch]:
        def take(numbers: NDArray[np.int64]) -> Batch:
            rows = np.stack([tokens[(first + n % many) * length :][: length + 1] for n in numbers.tolist()])
            return Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))

        return take

    return Texts(taking(0, count - held), count - held, taking(count - held, held), held)


def tensors_of(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens, positions and documents, as the model takes them."""
    parts = (batch.tokens, batch.positions, batch.documents)
    tokens, positions, documents = (None if part is None else torch.from_numpy(part).to(device) for part in parts)
    assert tokens is not None
    return tokens, positions, documents


def spread(count: int, wanted: int) -> NDArray[np.int64]:
    """The indices of `wanted` evenly spaced samples of `count`, or of all."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64))


@torch.no_grad()
def perplexity(model: Transformer, texts: Texts, sequences: int, device: torch.device, together: int = 8) -> float:
    """The perplexity: e to the mean cross-entropy of a token in nats, which is 2 to that in bits."""
    numbers = spread(texts.evaluations, sequences)
    total, count = 0.0, 0
    for first in range(0, len(numbers), together):
        batch = texts.evaluation(numbers[first : first + together])
        logits = model(*tensors_of(batch, device)).result.float().flatten(0, 1)
        targets = torch.from_numpy(batch.targets).to(device).flatten()
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        count += batch.loss_tokens
    return math.exp(total / count) if count else math.nan
