"""Samples the next token of each row of logits on a GPU, without sorting the vocabulary: adding Gumbel noise to the scores and
taking the largest samples from their softmax (Gumbel 1954). The noise is a hash of the row's two words and the token, as in
`serve/sampler.py`.

Top-k, top-p and min-p become one threshold on the scores. Top-k and top-p are found by bisection: 32 passes over a row that stays
in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _uniform(token, word1, word2):  # type: ignore[no-untyped-def]
    """Numbers between 0 and 1, from int32 tokens and the two words of a row."""
    x = token * -1640531535 ^ word1
    x = (x ^ ((x >> 16) & 0xFFFF)) * 2146121005 ^ word2
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261
    x = (x ^ ((x >> 16) & 0xFFFF)) & 0x7FFFFFFF
    return tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)


@triton.jit
def _gumbel(v):  # type: ignore[no-untyped-def]
    """-log(-log(1 - v)). The winner has a small v, so a series replaces the inner logarithm there."""
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * 0.25)))
    return -tl.log(tl.where(v < 0.015625, series, -tl.log(1.0 - v)))


@triton.jit
def _gumbel_below(v):  # type: ignore[no-untyped-def]
    """An upper bound of the noise of `v`: -log(1 - v) is at least v, and a float's bits as an integer are its logarithm to a few
    hundredths, never more than it (Mitchell 1962). The exponent's bias is 127; a thousandth more covers rounding."""
    return (v.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07 - 127.001) * -0.6931471


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Float32 numbers as integers of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _mix64(x):  # type: ignore[no-untyped-def]
    """The mixer of SplitMix64 (`model/normal.py`)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["ahead"], do_not_specialize_on_alignment=["SLOTS", "POSITIONS"])
def _pick(  # type: ignore[no-untyped-def]
    LOGITS, SLOTS, POSITIONS, TEMPERATURE, SEED, THRESHOLD, BEST, ARRIVED, OUT, LAST, vocab, row0, ahead,
    CUT: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(1), tl.program_id(0)
    slot = tl.load(SLOTS + row)
    temperature = tl.load(TEMPERATURE + slot)
    mixed = _mix64(tl.load(SEED + slot) + (tl.load(POSITIONS + row).to(tl.int64) + ahead) * -7046029254386353131)
    word1, word2 = mixed.to(tl.int32), (mixed >> 32).to(tl.int32)
    inverse = tl.where(temperature > 0, 1 / tl.maximum(temperature, 1e-30), 1.0)
    threshold = tl.load(THRESHOLD + row) if CUT else 0.0
    highest = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), 2147483647, tl.int32)
    wrong = tl.zeros((N,), tl.int1)
    share = tl.cdiv(vocab, SPLITS * N) * N
    for first in range(split * share, tl.minimum((split + 1) * share, vocab), N):
        token = first + tl.arange(0, N)
        logit = tl.load(LOGITS + row.to(tl.int64) * row0 + token, mask=token < vocab, other=float("-inf")).to(
            tl.float32
        )
        wrong = wrong | ~(logit < float("inf"))
        score = logit * inverse
        if CUT:
            score = tl.where(logit >= threshold, score, float("-inf"))
        v = _uniform(token, word1, word2)
        bound = score + _gumbel_below(v) if temperature > 0 else score
        # Logarithms are computed only where one of these tokens may win, which soon becomes rare.
        if tl.max(bound, 0) > highest:
            if temperature > 0:
                score += _gumbel(v)
            higher = tl.max(score, 0)
            if higher > highest:
                best = tl.min(tl.where(score == higher, token, 2147483647), 0)
                highest = higher
    token = best
    # A NaN or +inf score counts as the largest of all, and a row without any score as the smallest: both return -1.
    if tl.max(wrong.to(tl.int32), 0) > 0:
        highest = float("inf")
    # Score and token in one integer, the score on top; of equal scores the first token wins. The last program to
    # arrive reads the largest.
    packed = (_ordered(highest).to(tl.int64) << 32) | (2147483647 - token).to(tl.int64)
    tl.atomic_max(BEST + row, packed, sem="acq_rel")
    if tl.atomic_add(ARRIVED + row, 1, sem="acq_rel") == SPLITS - 1:
        packed = tl.atomic_xchg(BEST + row, -9223372036854775807, sem="acq_rel")
        tl.store(ARRIVED + row, 0)
        token64 = 2147483647 - (packed & 0x7FFFFFFF)
        found = packed >> 32
        token64 = tl.where((found == 2139095040) | (found == -2139095041), -1, token64)
        tl.store(OUT + row, token64)
        tl.store(LAST + slot, tl.maximum(token64, 0))


@triton.jit
def _weight_above(at, vocab, low, highest, inverse, COUNTS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many logits of a row reach a bound, given as an ordered integer; or their weight in the softmax."""
    total = tl.zeros((N,), tl.float32)
    for first in range(0, vocab, N):
        token = first + tl.arange(0, N)
        x = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.full((N,), 1.0, tl.float32) if COUNTS else tl.exp((x - highest) * inverse)
        total += tl.where((_ordered(x).to(tl.int64) >= low) & (token < vocab), weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _largest_reached(  # type: ignore[no-untyped-def]
    at, vocab, least, wanted, highest, inverse, COUNTS: tl.constexpr, N: tl.constexpr
):
    """The largest bound, from `least` on, that is reached by logits of at least the wanted number or weight: by bisection."""
    low, high = _ordered(least).to(tl.int64), _ordered(highest).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        enough = _weight_above(at, vocab, middle, highest, inverse, COUNTS, N) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    found = low.to(tl.int32)
    return tl.where(found < 0, found ^ 0x7FFFFFFF, found).to(tl.float32, bitcast=True)


@triton.jit
def _find_threshold(  # type: ignore[no-untyped-def]
    LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P, OUT, vocab, row0, N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = LOGITS + row * row0
    temperature, k, p = tl.load(TEMPERATURE + row), tl.load(TOP_K + row), tl.load(TOP_P + row)
    least = tl.load(MIN_P + row)
    inverse = tl.where(temperature > 0, 1 / tl.maximum(temperature, 1e-30), 1.0)
    top = tl.full((N,), float("-inf"), tl.float32)
    for first in range(0, vocab, N):
        token = first + tl.arange(0, N)
        top = tl.maximum(top, tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32))
    highest = tl.max(top, 0)
    lowest = tl.full((), -3.0e38, tl.float32)
    threshold = tl.full((), float("-inf"), tl.float32)
    if (k > 0) & (k < vocab):
        threshold = _largest_reached(at, vocab, lowest, k.to(tl.float32), highest, inverse, True, N)
    if p < 1:  # of the mass that top-k left
        wanted = p * _weight_above(at, vocab, _ordered(threshold).to(tl.int64), highest, inverse, False, N)
        threshold = _largest_reached(at, vocab, tl.maximum(threshold, lowest), wanted, highest, inverse, False, N)
    if least > 0:
        threshold = tl.maximum(threshold, highest + tl.log(least) / inverse)
    tl.store(OUT + row, threshold)


@triton.jit
def _token_logprob(  # type: ignore[no-untyped-def]
    LOGITS, TOKENS, TEMPERATURE, HIGHEST, TOTAL, CHOSEN, vocab, row0, SPLITS: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """For one split of a row: its largest score, and the sum of exponentials relative to it; and the score of the row's token."""
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(0)
    temperature = tl.load(TEMPERATURE + row)
    chosen = tl.maximum(tl.load(TOKENS + row), 0)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    share = tl.cdiv(vocab, SPLITS * N) * N
    for first in range(split * share, tl.minimum((split + 1) * share, vocab), N):
        token = first + tl.arange(0, N)
        logit = tl.load(LOGITS + row * row0 + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        score = logit / temperature
        higher = tl.maximum(highest, tl.max(score, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - safe) + tl.exp(score - safe)
        highest = higher
    tl.store(HIGHEST + row * SPLITS + split, highest)
    tl.store(TOTAL + row * SPLITS + split, tl.sum(total, 0))
    if split == 0:
        tl.store(CHOSEN + row, tl.load(LOGITS + row * row0 + chosen).to(tl.float32) / temperature)


def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Log-probability of one token of each row [rows, vocabulary], with scores divided by the row's temperature, in float32. No
    tensor of the size of the logits is written."""
    rows, vocab = logits.shape
    splits = max(1, min(32, triton.next_power_of_2(264 // max(1, rows))))
    highest, total = torch.empty(2, rows, splits, dtype=torch.float32, device=logits.device).unbind()
    chosen = highest.new_empty(rows)
    if rows:
        _token_logprob[splits, rows](
            logits, tokens, temperature, highest, total, chosen, vocab, logits.stride(0), SPLITS=splits, N=4096, num_warps=8
        )  # fmt: skip
    return chosen - (total.log() + highest).logsumexp(dim=1)


class Picking:
    """Memory in which the programs of a row find their largest score."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.best = torch.full((rows,), -9223372036854775807, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)


def pick(
    logits: Tensor, slots: Tensor, positions: Tensor, ahead: int, temperature: Tensor, seed: Tensor, threshold: Tensor | None,
    last: Tensor, picking: Picking,
) -> Tensor:  # fmt: skip
    """A token for each row [rows, vocabulary]: the likeliest at temperature 0, otherwise sampled from the softmax of the tokens
    whose logit reaches the threshold. Temperatures and seeds (int64) are those of the rows' slots; the random draw is that of the
    row's position plus `ahead`. The token is also written to `last`, by slot."""
    rows, vocab = logits.shape
    assert rows <= len(picking.best)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    splits = max(1, min(32, triton.next_power_of_2(264 // rows)))
    _pick[splits, rows](
        logits, slots, positions, temperature, seed, temperature if threshold is None else threshold, picking.best, picking.arrived,
        out, last, vocab, logits.stride(0), ahead, CUT=threshold is not None, SPLITS=splits, N=4096, num_warps=8,
        enable_fp_fusion=False,  # otherwise a draw's last bit could depend on the other requests in the batch
    )  # fmt: skip
    return out


def find_threshold(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit of each row that passes the three cuts."""
    rows, vocab = logits.shape
    out = temperature.new_empty(rows)
    _find_threshold[(rows,)](
        logits, temperature, top_k, top_p, min_p, out, vocab, logits.stride(0), N=4096, num_warps=16
    )  # fmt: skip
    return out
