"""Samples the next tokens on the device that made the logits. Every running sequence has a slot, which holds its sampling
parameters.

A draw adds Gumbel noise to the scores and takes the largest, which samples from their softmax (Gumbel 1954). The noise of a token
is a hash of the sequence's seed, its position and the token id, so a draw depends on nothing else: not on the batch, the slot or
the device. Top-k, top-p and min-p are a threshold on the scores, so tokens with equal scores are kept or cut together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.model.invariant.network import by_row, log_softmax
from shardwise.model.layers import at_least_float32
from shardwise.model.normal import GAMMA, mix64
from shardwise.serve.request import Logprob, Sampling

PENALIZED = {"cpu": 2**17, "cuda": 2**22}
"""Logits that are penalized at once: as many as a cache of a CPU holds, and on a GPU as few as leave its memory for others."""


@dataclass
class Picked:
    """The sampled tokens of a step."""

    tokens: Tensor
    logprobs: Tensor | None = None
    """[rows] of the sampled tokens, if any row asked for them."""
    top: tuple[Tensor, Tensor] | None = None
    """The likeliest tokens of each row and their logprobs [rows, the largest number that any row asked for]."""

    def to_host(self) -> Picked:
        """A copy in pinned host memory, complete once the device reaches this point. A read from the device itself would also wait
        for all steps launched in the meantime."""

        def copied(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

        top = None if self.top is None else (copied(self.top[0]), copied(self.top[1]))
        return Picked(copied(self.tokens), None if self.logprobs is None else copied(self.logprobs), top)


def gumbel(words: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [rows, vocabulary] in float32, from two int32 words a row."""
    token = torch.arange(vocab, dtype=torch.int32, device=words.device)
    x = (token * -1640531535) ^ words[:, :1]
    x = (x ^ ((x >> 16) & 0xFFFF)) * 2146121005 ^ words[:, 1:]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261
    x = (x ^ ((x >> 16) & 0xFFFF)) & 0x7FFFFFFF
    v = ((x.float() + 0.5) * 2.0**-31).clamp(max=0.99999994)
    return -(-torch.log1p(-v)).log()


def thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit of each row that top-k, top-p and min-p keep, found by sorting."""
    values = at_least_float32(logits).sort(dim=-1, descending=True).values
    vocab = logits.shape[-1]
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()
    threshold = values.gather(1, k[:, None] - 1)
    inverse = torch.where(temperature > 0, 1 / temperature.clamp(min=1e-30), 1.0).to(values.dtype)[:, None]
    mass = torch.where(values >= threshold, ((values - values[:, :1]) * inverse).exp(), 0.0)
    sums = mass.cumsum(1)
    enough = sums >= top_p[:, None].to(mass.dtype) * sums[:, -1:]
    nucleus = values.gather(1, enough.int().argmax(1, keepdim=True))
    threshold = torch.where(top_p[:, None] < 1, torch.maximum(threshold, nucleus), threshold)
    least = values[:, :1] + min_p[:, None].to(values.dtype).log() / inverse
    return torch.where(min_p[:, None] > 0, torch.maximum(threshold, least), threshold)[:, 0]


def pick_reference(logits: Tensor, temperature: Tensor, words: Tensor, threshold: Tensor | None = None) -> Tensor:
    """A token for each row: the likeliest at temperature 0, else drawn by the row's words among those that reach the threshold; -1
    where a logit is NaN or +inf, or none is finite."""
    warm = temperature > 0
    scores = logits.double() / torch.where(warm, temperature.double(), 1.0)[:, None]
    if threshold is not None:
        scores = scores.masked_fill(logits < threshold[:, None], float("-inf"))
    if bool(warm.any()):
        scores = torch.where(warm[:, None], scores + gumbel(words, logits.shape[-1]), scores)
    nothing = ~logits.isfinite().any(dim=-1) | (logits.isnan() | logits.isposinf()).any(dim=-1)
    return scores.argmax(dim=-1).masked_fill(nothing, -1)


def seed_of(sampling: Sampling, request: str, index: int, engine_seed: int) -> int:
    """A 64-bit seed that fixes all draws of one answer."""
    base = f"{engine_seed}/{request}" if sampling.seed is None else f"seed {sampling.seed}"
    return int.from_bytes(hashlib.blake2b(f"{base}/{index}".encode(), digest_size=8).digest(), "little", signed=True)


def words_of(seeds: Tensor, positions: Tensor) -> Tensor:
    """Two int32 words for each row, a hash of its seed and position."""
    mixed = mix64(seeds + positions.long() * GAMMA)
    words = torch.stack((mixed, mixed >> 32), dim=1).bitwise_and_(0xFFFFFFFF)
    return words.bitwise_xor_(0x80000000).sub_(0x80000000).int()


class Sampler:
    """Holds the sampling parameters of each slot, and samples. `last` is the last sampled token of each slot."""

    def __init__(self, slots: int, vocab: int, device: torch.device, invariant: bool = False, rows: int = 0) -> None:
        """`invariant`: the bits of a row's logprobs and draws do not depend on other rows. `rows`: the most rows sampled at once,
        where a slot may have several."""
        self.device, self.vocab, self.invariant = device, vocab, invariant
        self.sampling: list[Sampling] = [Sampling()] * slots
        self.special: set[int] = set()
        """The slots whose parameters go beyond a temperature."""
        self.with_logprobs: set[int] = set()
        self.biases: dict[int, np.ndarray] = {}
        """By slot: the tokens of its logit biases, and the biases."""
        self.floats, self.integers = np.zeros((7, slots), np.float32), np.zeros((2, slots), np.int64)
        self.changed = True
        self._floats = torch.zeros(7, slots, device=device)
        self._integers = torch.zeros(2, slots, dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p, *self.penalties = self._floats.unbind()
        self.seed, self.top_k = self._integers.unbind()
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        self.generated: Tensor | None = None
        self.prompted: Tensor | None = None
        self.picking: Any = None
        if device.type == "cuda":
            from shardwise.model.kernels.sample import Picking

            self.picking = Picking(max(2 * slots, rows), device)

    def assign(self, slot: int, sampling: Sampling, seed: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Assign a slot to a sequence that already has these tokens."""
        self.sampling[slot] = sampling
        special = _cuts(sampling) or _penalizes(sampling) or sampling.logit_bias
        (self.special.add if special else self.special.discard)(slot)
        (self.with_logprobs.discard if sampling.logprobs is None else self.with_logprobs.add)(slot)
        repetition = sampling.repetition_penalty
        penalties = 1 / repetition, repetition, sampling.frequency_penalty, sampling.presence_penalty
        self.floats[:, slot] = sampling.temperature, sampling.top_p, sampling.min_p, *penalties
        self.integers[:, slot] = seed, sampling.top_k
        self.changed = True
        self.biases[slot] = np.asarray([*sampling.logit_bias.items()], np.float64).reshape(-1, 2).T
        if _penalizes(sampling):
            if self.generated is None or self.prompted is None:
                shape = (len(self.sampling), self.vocab)
                self.generated = torch.zeros(shape, dtype=torch.int32, device=self.device)
                self.prompted = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.prompted[slot] = False
            self.prompted[slot, torch.tensor(sorted(set(prompt)), device=self.device)] = True
            self.generated[slot] = 0
            if generated:
                told = torch.tensor(generated, device=self.device)
                self.generated[slot].index_put_((told,), torch.ones_like(told, dtype=torch.int32), accumulate=True)

    def prepare(self) -> None:
        """Copy changed parameters to the device."""
        if self.changed:
            self._floats.copy_(send(self.floats, self.device))
            self._integers.copy_(send(self.integers, self.device))
            self.changed = False

    def is_plain(self, slots: Sequence[int]) -> bool:
        """Whether these slots set nothing but a temperature, so that `pick_plain` suffices."""
        return self.special.isdisjoint(slots)

    def pick_plain(self, logits: Tensor, slots: Tensor, positions: Tensor, ahead: int = 0) -> Tensor:
        """Sample a token for each row of logits: the likeliest at temperature 0, else drawn. There is no host sync, and nothing
        depends on more than shapes, so a CUDA graph can capture it."""
        if self.picking is not None:
            from shardwise.model.kernels.sample import pick

            return pick(logits, slots, positions, ahead, self.temperature, self.seed, None, self.last, self.picking)
        return self._pick_reference(logits, slots, positions + ahead, None)

    def _pick_reference(self, logits: Tensor, slots: Tensor, positions: Tensor, threshold: Tensor | None) -> Tensor:
        words = words_of(self.seed[slots.long()], positions)
        asked = (logits, self.temperature[slots.long()], words) + (() if threshold is None else (threshold,))
        tokens = self._by_row(pick_reference, *asked)
        self.last[slots.long()] = tokens.clamp(min=0)  # the next step may be launched with this token even if it is -1
        return tokens

    def pick(
        self, logits: Tensor, numbers: Sequence[int], slots: Tensor, positions: Tensor, masks: Tensor | None = None,
        behind: Sequence[Sequence[int]] = (),
    ) -> Picked:  # fmt: skip
        """Sample a token for each row of logits, with all parameters of its slot; `numbers` are the same slots on the host.
        `masks` are the bits of the allowed tokens. `behind`: the drafts before each row; a slot has one row for each draft, and
        one before them."""
        asked = [self.sampling[slot] for slot in numbers]
        which = slots.long()
        logits = self.adjusted(logits, numbers, which, behind)
        if masks is not None:
            token = torch.arange(self.vocab, device=self.device)
            logits = logits.masked_fill(((masks[:, token // 32] >> (token % 32)) & 1) == 0, float("-inf"))
        cuts = any(map(_cuts, asked))
        settings = (self.temperature[which], self.top_k[which], self.top_p[which], self.min_p[which])
        if self.picking is not None:
            from shardwise.model.kernels.sample import find_threshold, pick

            threshold = find_threshold(logits, *settings) if cuts else None
            tokens = pick(logits, slots, positions, 0, self.temperature, self.seed, threshold, self.last, self.picking)
        else:
            threshold = self._by_row(thresholds, logits, *settings) if cuts else None
            tokens = self._pick_reference(logits, slots, positions, threshold)
        if self.generated is not None and any(map(_penalizes, asked)):
            self.generated.index_put_((which, tokens), _counting(tokens, behind), accumulate=True)
        return Picked(tokens)

    def add_logprobs(self, picked: Picked, logits: Tensor, numbers: Sequence[int]) -> None:
        """Add the logprobs of the tokens sampled from these logits, if their slots ask for them."""
        if self.with_logprobs.isdisjoint(numbers):
            return
        asked = [self.sampling[slot] for slot in numbers]
        most = max(each.logprobs for each in asked if each.logprobs is not None)
        divided = [each.temperature if each.drawn_logprobs and each.temperature else 1.0 for each in asked]
        divides = any(temperature != 1 for temperature in divided)
        # The kernel computes in float32, which is at least the precision of the logits unless they are float64.
        if most == 0 and self.picking is not None and not self.invariant and logits.dtype != torch.float64:
            from shardwise.model.kernels.sample import token_logprob

            ones = torch.ones(len(divided), device=self.device)
            by = send(np.asarray(divided, np.float32), self.device) if divides else ones
            none = picked.tokens.new_empty(len(divided), 0)
            picked.logprobs, picked.top = token_logprob(logits, picked.tokens, by), (none, none.float())
            return
        if divides:
            logits = at_least_float32(logits) / torch.tensor(divided, device=self.device)[:, None]
        picked.logprobs, picked.top = logprobs_of(logits, picked.tokens, most, self.invariant)

    def _by_row(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return by_row(function, *(x[None] for x in tensors))[0] if self.invariant else function(*tensors)

    def adjusted(
        self, logits: Tensor, numbers: Sequence[int], which: Tensor, behind: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        """A copy with the penalties and logit biases of each row's slot; the logits themselves if there are none."""
        asked = [self.sampling[slot] for slot in numbers]
        penalized = [row for row, each in enumerate(asked) if _penalizes(each)]
        biased = [row for row, each in enumerate(asked) if each.logit_bias]
        if penalized or biased:
            logits = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
            self._penalize(logits, which, penalized, asked, behind)
            self._bias(logits, numbers, biased)
        return logits

    def _penalize(
        self, logits: Tensor, which: Tensor, rows: Sequence[int], asked: list[Sampling], behind: Sequence[Sequence[int]]
    ) -> None:
        """Apply the penalties of these rows, in place; of some at a time, since each copy has their size."""
        generated, prompted = self.generated, self.prompted
        at_once = max(1, PENALIZED[self.device.type] // self.vocab)
        if generated is None or prompted is None:  # nobody has had a penalty yet
            return
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            everyone = some[-1] - some[0] < len(some)
            place = slice(some[0], some[-1] + 1) if everyone else send(np.asarray(some), self.device)
            slots, scores = which[place], logits[place]
            inverse, repetition, frequency, presence = (each[slots, None] for each in self.penalties)
            counts = generated[slots]
            drafts = [(n, token) for n, row in enumerate(some) for token in (behind[row] if behind else ())]
            if drafts:
                at = send(np.asarray(drafts).T, self.device)
                counts.index_put_((at[0], at[1]), torch.ones_like(at[0], dtype=torch.int32), accumulate=True)
            made = counts > 0
            if any(asked[row].repetition_penalty != 1 for row in some):
                known = prompted[slots].logical_or_(made)
                scores *= torch.where(scores > 0, inverse, repetition).masked_fill_(~known, 1.0)
            scores -= counts.float().mul_(frequency).add_(made.float().mul_(presence))
            logits[place] = scores

    def _bias(self, logits: Tensor, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Add the logit biases of these rows, in place."""
        if rows:
            found = [self.biases[slots[row]] for row in rows]
            tokens, values = np.concatenate(found, axis=1)
            lengths = [each.shape[1] for each in found]
            at = send(np.stack((np.repeat(rows, lengths), tokens.astype(np.int64))), self.device)
            logits[at[0], at[1]] += send(values, self.device).to(logits.dtype)


def _counting(tokens: Tensor, behind: Sequence[Sequence[int]]) -> Tensor:
    """1 for each sampled token that is part of its text: after drafts, only if all of them were right."""
    counting = torch.ones_like(tokens, dtype=torch.int32)
    for row, guesses in enumerate(behind):
        if guesses:
            counting[row] = counting[row - 1] * (tokens[row - 1] == guesses[-1])
    return counting


def logprobs_of(
    logits: Tensor, tokens: Tensor, most: int, invariant: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The logprobs that the model itself gives to tokens, and the likeliest tokens with theirs. `invariant`: the bits of a row do
    not depend on other rows."""
    if not invariant:
        logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
        values, indices = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    else:
        logprobs = log_softmax(logits)
        values, indices = logprobs.topk(0)
        if most:  # the order of equal logprobs must not depend on the batch either
            # A copy: the whole order of the vocabulary would be kept with a view.
            values, indices = (x[:, :most].clone() for x in logprobs.sort(dim=-1, descending=True, stable=True))
    return logprobs.gather(1, tokens[:, None].clamp(min=0))[:, 0], (indices, values)


def read_logprobs(
    tokens: list[int], logprobs: Tensor, top: tuple[Tensor, Tensor], asked: list[int | None]
) -> list[Logprob | None]:
    """Logprobs as the client gets them; None for a row that did not ask."""
    values = logprobs.tolist()
    if not top[0].shape[1]:
        pairs = zip(tokens, values, asked, strict=True)
        return [None if most is None else Logprob(token, value) for token, value, most in pairs]
    indices, highest = top[0].tolist(), top[1].tolist()
    return [
        None if most is None else Logprob(token, value, tuple(zip(which[:most], these[:most], strict=True)))
        for token, value, which, these, most in zip(tokens, values, indices, highest, asked, strict=True)
    ]


def _cuts(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def _penalizes(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device, without a host sync."""
    return on_host(np.ascontiguousarray(array), device).to(device, non_blocking=True)


def on_host(array: np.ndarray, device: torch.device) -> Tensor:
    """A host tensor; for a GPU in pinned memory, so that copies from it are asynchronous."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host
