"""Pairs prompts with other prompts' answers: the log-probabilities of such answers show how far a model has moved from a reference
in general, independent of the data.

In each row of packed documents the answers shift by one: the first prompt gets the second answer, the last prompt the first. So a
row keeps its length, and depends on nothing but itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwise.data.batches import IGNORE_INDEX, Batch

Row = NDArray[np.int64]


def mismatched(batch: Batch) -> Batch:
    """A batch with the answers of each row shifted by one; a row with fewer than two answers has no targets."""
    tokens, targets = np.zeros_like(batch.tokens), np.full_like(batch.targets, IGNORE_INDEX)
    positions, documents = np.zeros_like(batch.tokens), np.zeros_like(batch.tokens)
    slots = batch.slots
    for row in range(len(tokens)):
        found = _answers(batch.targets[row], slots[row])
        at = 0
        for n, (start, first, _) in enumerate(found if len(found) > 1 else []):
            _, begin, stop = found[(n + 1) % len(found)]
            prompt = batch.tokens[row, start : first + 1]
            answer = np.append(batch.tokens[row, begin + 1 : stop], max(batch.targets[row, stop - 1], 0))
            place = slice(at, at + len(prompt) + len(answer) - 1)
            tokens[row, place] = np.concatenate((prompt, answer[:-1]))
            learned = np.where(batch.targets[row, begin:stop] != IGNORE_INDEX, answer, IGNORE_INDEX)
            targets[row, place.stop - len(answer) : place.stop] = learned
            positions[row, place], documents[row, place] = np.arange(place.stop - at), n
            at = place.stop
        positions[row, at:], documents[row, at:] = np.arange(tokens.shape[1] - at), len(found)
    if batch.documents is None:  # attention sees the whole row
        return Batch(tokens, targets, sums=documents)
    return replace(
        batch, tokens=tokens, targets=targets, positions=positions, documents=documents.astype(np.int32), labels=None
    )


def _answers(targets: Row, slots: Row) -> list[tuple[int, int, int]]:
    """For each document of a row with a target: its start, its first position with a target, and its end."""
    edges = np.flatnonzero(np.diff(slots, prepend=-1)).tolist()
    found = []
    for start, stop in zip(edges, [*edges[1:], len(slots)], strict=True):
        learned = np.flatnonzero(targets[start:stop] != IGNORE_INDEX)
        if len(learned):
            found.append((start, start + int(learned[0]), stop))
    return found
