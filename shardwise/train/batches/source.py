"""Where the batches of a run come from. Usually that is token sets, read ahead of the step that learns from them. An objective that
learns from its own answers has a source that generates them (`tune/`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardwise.data.batches import Batch, Samples
from shardwise.data.open import Data, open_data
from shardwise.data.tokenizer import Tokenizer
from shardwise.run import Run

if TYPE_CHECKING:
    from shardwise.train.step import TrainState

Note = Callable[[int], None]
"""Reports an amount of work done, so that the rank does not count as hung."""


class Source(Protocol):
    """The methods that the training loop calls, in this order; a resumed run makes a new source."""

    tokenizer: Tokenizer
    fingerprint: str

    def describe(self) -> str:
        """The training data, in one line."""

    def attach(self, state: TrainState, log: Callable[[str], None], note: Note) -> None:
        """Make batches for this train state from now on; its weights are already loaded."""

    def detach(self) -> None:
        """Release the train state, so that the next one can use its memory."""

    def batches(self, last: int) -> Iterator[Batch]:
        """This rank's batches for the remaining steps, up to step `last`."""

    def figures(self) -> dict[str, Any]:
        """Metrics of the batch that was returned last."""

    def evaluate(self) -> tuple[dict[str, Any], str]:
        """The results on a validation set, as records and as a sentence."""

    def before_saving(self) -> None:
        """Store in the train state's `kept` what a resumed run could not recompute."""


class TokenSource:
    """Batches of token sets."""

    def __init__(self, run: Run) -> None:
        self.data: Data = open_data(run)
        self.tokenizer, self.fingerprint = self.data.tokenizer, self.data.fingerprint

    def describe(self) -> str:
        return f"data: {self.data.train.count:,} sequences an epoch, {self.data.validation.count:,} for validation"

    def attach(self, state: TrainState, log: Callable[[str], None], note: Note) -> None:
        self.state = state

    def detach(self) -> None:
        del self.state

    def batches(self, last: int) -> Iterator[Batch]:
        return batches(self.data.train, self.state, last)

    def figures(self) -> dict[str, Any]:
        return {}

    def evaluate(self) -> tuple[dict[str, Any], str]:
        validation, train = self.data.validation, self.state.run.train
        loss = self.state.evaluate(validation.take, evenly_spaced(validation.count, train.eval_sequences))
        found: dict[str, Any] = {"eval_loss": loss}
        if train.samples:
            from shardwise.train.progress.samples import sample_texts

            chosen = evenly_spaced(validation.count, train.samples)
            found["samples"] = sample_texts(self.state, validation, chosen, self.tokenizer)
        return found, f"validation loss {loss:.4f}"

    def before_saving(self) -> None:
        pass


def batches(samples: Samples, train_state: TrainState, last: int) -> Iterator[Batch]:
    """This rank's batches for the remaining steps, each read in the background while the previous one is computed."""
    size = train_state.job.train.global_batch

    def read(step: int) -> Batch:
        number = train_state.history.batch_of(step)
        return samples.take(train_state.samples(np.arange((number - 1) * size, number * size)))

    first = train_state.step + 1
    with ThreadPoolExecutor(1) as reader:
        next_batch = reader.submit(read, first)
        for step in range(first, last + 1):
            batch = next_batch.result()
            if step < last:
                next_batch = reader.submit(read, step + 1)
            yield batch


def evenly_spaced(count: int, wanted: int) -> np.ndarray:
    """The same samples each time, evenly spaced, so that a few represent the whole set."""
    wanted = min(wanted, count)
    return np.arange(wanted) * count // wanted
