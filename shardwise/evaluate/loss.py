"""The loss of a data set: the mean cross-entropy of its rows' tokens that have a target, without padding, on one device.

A text is cut into rows of consecutive tokens, as in training; fewer than a row at its end are left out. Conversations are packed
whole, and only the tokens that their mask selects count. In a preference set the desirable answers count. Logits are computed in
chunks, so a large vocabulary costs no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardwise.data.batches import IGNORE_INDEX, Batch, Samples, Windows, windows_in
from shardwise.data.pack import pack
from shardwise.data.shards import TokenSet
from shardwise.model.attention import MaskBuilder
from shardwise.model.loss import ChunkedCrossEntropy
from shardwise.model.transformer import Transformer
from shardwise.model.varlen import cu_seqlens_of, has_flash
from shardwise.quantize.texts import tensors_of
from shardwise.run import Problem, Run, UserError
from shardwise.run.derive import uses_varlen_attention


@dataclass(frozen=True)
class SetLoss:
    """The loss of a set: the mean per token in nats, and the number of tokens with a loss."""

    loss: float
    tokens: int
    rows: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def rows_of(tokens: TokenSet, length: int, separate: bool) -> Samples:
    """All rows of a set, in order."""
    if tokens.index.kind == "prompts":
        raise UserError(Problem("holds prompts without answers, so there is no loss", "--set", str(tokens.folder)))
    if tokens.index.marked:
        return Samples([pack(tokens, length)], length, shuffled=False)
    length = min(length, tokens.tokens - 1)  # a short text is one row
    windows = Windows(tokens, 0, windows_in(tokens.tokens, length) if length else 0)
    return Samples([windows], max(length, 1), shuffled=False, separate_documents=separate)


@torch.no_grad()
def set_loss(model: Transformer, run: Run, tokens: TokenSet, length: int, most: int = 0, at_once: int = 0) -> SetLoss:
    """The loss of a set in rows of `length` tokens: of all rows, or of `most` evenly spaced ones, `at_once` rows at a time."""
    samples = rows_of(tokens, length, run.data.separate_documents)
    count = samples.count
    if not count:
        raise UserError(Problem("has not a single token to predict", "--set", str(tokens.folder)))
    vocab = tokens.index.tokenizer["vocab"]
    if vocab > run.model.vocab:
        reason = f"was made with a tokenizer of {vocab} tokens, and the model has {run.model.vocab}"
        raise UserError(Problem(reason, "--set", str(tokens.folder)))
    device = next(model.parameters()).device
    varlen = uses_varlen_attention(run, gpu=has_flash(device))
    model.mask_builder = MaskBuilder(run.model.sliding_window, varlen)
    model.loss = ChunkedCrossEntropy()
    wanted = np.arange(count) if not most else np.arange(min(most, count)) * count // min(most, count)
    at_once = at_once or max(1, 8192 // samples.length)
    total, counted = 0.0, 0
    for start in range(0, len(wanted), at_once):
        batch = _only_wanted(samples.take(wanted[start : start + at_once]))
        counted += batch.loss_tokens
        total += _loss(model, batch, device, varlen)
    if not counted:
        raise UserError(Problem("has no token to learn, so there is no loss", "--set", str(tokens.folder)))
    return SetLoss(total / counted, counted, len(wanted))


def _only_wanted(batch: Batch) -> Batch:
    if batch.labels is not None:
        batch.targets[batch.labels == 0] = IGNORE_INDEX
    return batch


def _loss(model: Transformer, batch: Batch, device: torch.device, varlen: bool) -> float:
    if batch.documents is not None and varlen:
        batch = replace(batch, documents=cu_seqlens_of(batch.documents))
    targets = torch.from_numpy(batch.targets).to(device)
    out = model(*tensors_of(batch, device), finish=lambda x, matrix: model.loss(x, matrix, targets))
    return out.result.double().item()
