"""What to change first. Each rule is a small function of the answers: it looks for one thing, and either gives what it found,
with the numbers it rests on and what it would bring, or nothing, where the evidence is thin.

A gain is what the step would lose if the thing were gone and nothing else came in its place: an upper bound, and not to be
added up, since two findings may be about the same time.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.trace.advice.rules_device import (
    allocator,
    copies,
    data_stall,
    host_bound,
    loose_optimizer,
    recompute,
    single_precision,
    synchronisation,
    tiny_kernels,
)
from shardwise.trace.advice.rules_ranks import bubble, exposed_axis, imbalance, slow_rank, small_messages
from shardwise.trace.answers import Explanation, Finding

Rule = Callable[[Explanation], Finding | None]

RULES: tuple[Rule, ...] = (
    host_bound, synchronisation, data_stall, exposed_axis, small_messages, slow_rank, imbalance, bubble,
    tiny_kernels, copies, single_precision, loose_optimizer, allocator, recompute,
)  # fmt: skip


def findings(answers: Explanation) -> tuple[Finding, ...]:
    """All that the rules find, the largest gain first."""
    found = [finding for rule in RULES if (finding := rule(answers)) is not None]
    return tuple(sorted(found, key=lambda one: (-one.gain, one.rule)))
