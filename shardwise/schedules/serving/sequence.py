"""What the scheduler plans with: sequences of tokens, the chunks of them that one step computes, and the step.

Prefill and decode are not separate: a sequence has tokens, some of which are computed (their keys and values are in its pages), and
a chunk computes the next few. The last chunk of a prompt, and each chunk of one token after it, also samples a token. Everything
counts from the moment of scheduling, because the device works in order: the results of one step are there for the next, whether or
not the host knows them.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

State = Literal["waiting", "prefill", "decode", "finished"]
GIVEN_BACK = -1
"""In a page table: the page fell behind the sliding window."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and its generated tokens. The caller that adds it sets the fields above `prompt`, and `drafts`; the scheduler sets
    the rest."""

    key: Hashable
    tokens: list[int]
    """The prompt, then the generated tokens that the host knows."""
    max_new: int
    """Tokens to generate at most, 1 or more."""
    priority: int = 0
    """Lower goes first."""
    user: str = ""
    salt: bytes = b""
    """Only sequences of the same salt share pages of the prefix cache."""
    lookahead: bool = True
    """Whether its next token may be scheduled before the last is known. A sequence with drafts or a grammar must know it."""
    reads_cache: bool = True
    """Whether pages of the prefix cache may replace a part of its prompt; not where logprobs of the prompt are requested."""

    prompt: int = field(init=False)
    """Number of tokens of the prompt."""
    end: int = field(init=False)
    """Number of tokens when it ends at its limit."""
    drafts: list[int] = field(default_factory=list, init=False)
    """Draft tokens that may follow the last known one, verified by the next step that is scheduled; empty after its update."""
    arrival: int = field(default=-1, init=False)
    order: tuple[int, int] = field(default=(0, -1), init=False)
    """Priority and arrival: the sequence with the latest order is preempted first."""
    state: State = field(default="waiting", init=False)
    computed: int = field(default=0, init=False)
    """Tokens whose keys and values are in pages when the steps scheduled so far have run, including drafts not yet verified."""
    pending: int = field(default=0, init=False)
    """Sampled tokens not known yet: 1 while a step that samples is in flight, 2 while the next is scheduled ahead of it."""
    pages: list[int] = field(default_factory=list, init=False)
    """The page of each `page_tokens` tokens; -1 where it was released behind the sliding window."""
    host_pages: list[int] = field(default_factory=list, init=False)
    """The host pages that its pages were swapped to, except released ones."""
    slot: int = field(default=-1, init=False)
    """A number below `max_sequences` that no other running sequence has, the index of a runner's per-sequence state; -1 when not
    running."""
    cached: int = field(default=-1, init=False)
    """Tokens that were in the prefix cache when it was first admitted, or shared when it was forked; -1 before."""

    limit: int = field(default=0, init=False)
    """Positions below this one are decoded without further checks: there is a page of its own to write to, and no end in sight."""
    given_back: int = field(default=0, init=False)
    """Leading entries of `pages` that are -1."""
    digests: list[bytes] = field(default_factory=list, init=False)
    """Digests of its leading full pages, as far as they were needed."""
    registered: int = field(default=0, init=False)
    """Leading pages that were reported to the prefix cache."""
    charged: int = field(default=0, init=False)
    """Tokens that its user was charged for, or that were free."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.end = self.prompt + self.max_new

    @property
    def generated(self) -> int:
        """Number of generated tokens that are known."""
        return len(self.tokens) - self.prompt

    def fork(self, key: Hashable, length: int, sampled: Items[int], lookahead: bool) -> Sequence:
        """Another sequence that begins with the first `length` known tokens of this one, followed by the `sampled` ones."""
        tokens = [*self.tokens[:length], *sampled]
        if not self.prompt <= length <= len(self.tokens) or len(tokens) >= self.end:
            raise ValueError(
                f"a fork after {length} tokens with {len(sampled)} more: its parent has {len(self.tokens)}, "
                f"{self.prompt} of them its prompt, and may have {self.end}"
            )
        fork = Sequence(key, tokens, self.max_new, self.priority, self.user, self.salt, lookahead)
        fork.prompt, fork.end = self.prompt, self.end
        return fork


order_of = attrgetter("order")


@dataclass(eq=False, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of a sequence, computed in one step. `samples` is how many of them, from the end, need
    logits: none before a prompt's last chunk, one there and in decode, all where drafts are verified.

    The token at `start` is `sequence.tokens[start]`, or, where that is not known yet, the token that the step before sampled for
    it; drafts follow."""

    sequence: Sequence
    start: int
    count: int
    samples: int


@dataclass(eq=False, slots=True)
class Step:
    """One step of the device, in this order: swap_out, swap_in, copies, then compute. The entries of each list may run in any
    order. In each layer, the keys and values of all chunks are written before any attention reads: a chunk may read pages that an
    earlier chunk in the list computes.

    A scheduled step is executed as it is, even where sequences have ended since. Its page tables are those of `sequence.pages`
    before the next call of the scheduler."""

    chunks: list[Chunk] = field(default_factory=list)
    """Decoding sequences first, then prompts."""
    decoding: int = 0
    """Number of chunks of decoding sequences."""
    tokens: int = 0
    """Tokens computed by all chunks."""
    sampling: int = 0
    """Number of chunks that sample."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """From a device page to a device page."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """From a device page to a host page."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """From a host page to a device page."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that were given a slot."""
    changed: list[Sequence] = field(default_factory=list)
    """Sequences with a chunk whose `pages` have changed since their last chunk, including the admitted ones."""
