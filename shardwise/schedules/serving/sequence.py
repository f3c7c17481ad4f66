"""What the scheduler plans with: sequences of tokens, the chunks of them that one step computes, and the step.

There is no prefill and no decoding apart from each other: a sequence has tokens, some of which are computed (their keys and values
are in its pages), and a chunk computes the next few. The last chunk of a prompt, and each chunk of one token after it, also samples
a token. All of it counts at the moment of scheduling, because the device works in order: what one step computes is there for the
next, whether or not the host has heard of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

State = Literal["waiting", "prefill", "decode", "finished"]
GIVEN_BACK = -1
"""In a table of pages: the page fell behind the sliding window."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what has been generated. Who adds it chooses what stands above `prompt`, and sets `drafts`; the scheduler does
    the rest."""

    key: Hashable
    tokens: list[int]
    """The prompt, then what was generated as far as the host knows it."""
    max_new: int
    """Tokens to generate at most, 1 or more."""
    priority: int = 0
    """Lower goes first."""
    user: str = ""
    salt: bytes = b""
    """Only sequences of the same salt share pages of the prefix cache."""
    lookahead: bool = True
    """Whether its next token may be scheduled before the last is known. A sequence with drafts or a grammar needs to know it."""
    reads_cache: bool = True
    """Whether pages of the prefix cache may stand for a part of its prompt; not where logprobs of the prompt are asked for."""

    prompt: int = field(init=False)
    """Tokens of the prompt."""
    end: int = field(init=False)
    """Tokens when it ends at its limit."""
    drafts: list[int] = field(default_factory=list, init=False)
    """Tokens speculated to follow the last known one, verified by the next step that is scheduled; empty after it is updated."""
    arrival: int = field(default=-1, init=False)
    order: tuple[int, int] = field(default=(0, -1), init=False)
    """Priority and arrival: who comes later is preempted first."""
    state: State = field(default="waiting", init=False)
    computed: int = field(default=0, init=False)
    """Tokens whose keys and values are in pages when the steps scheduled so far have run; with drafts not yet judged among them."""
    pending: int = field(default=0, init=False)
    """Samples not known yet: 1 while a step that samples is under way, 2 while the next is scheduled ahead of it."""
    pages: list[int] = field(default_factory=list, init=False)
    """The page of each `page_tokens` tokens; -1 where it was given back behind the sliding window."""
    host_pages: list[int] = field(default_factory=list, init=False)
    """Where its pages were swapped to, those that were not given back."""
    slot: int = field(default=-1, init=False)
    """A number below `max_sequences` that no other running sequence has, for what a runner keeps for each; -1 when not running."""
    cached: int = field(default=-1, init=False)
    """Tokens that were in the prefix cache when it was first admitted, or shared when it was forked; -1 before."""

    limit: int = field(default=0, init=False)
    """Positions below this one are decoded without a second look: there is a page of its own to write to, and no end in sight."""
    given_back: int = field(default=0, init=False)
    """Leading entries of `pages` that are -1."""
    digests: list[bytes] = field(default_factory=list, init=False)
    """Of its leading full pages, as far as they were needed."""
    registered: int = field(default=0, init=False)
    """Leading pages that the prefix cache was told of."""
    charged: int = field(default=0, init=False)
    """Tokens that its user was charged for, or did not have to be."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.end = self.prompt + self.max_new

    @property
    def generated(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - self.prompt

    def fork(self, key: Hashable, length: int, sampled: Items[int], lookahead: bool) -> Sequence:
        """Another that begins with the first `length` known tokens of this one, and what was sampled to follow them."""
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
    logits: none before a prompt's last chunk, one there and when decoding, all where drafts are verified.

    The token at `start` is `sequence.tokens[start]`, or, where that is not known yet, what the step before sampled for it; drafts
    follow."""

    sequence: Sequence
    start: int
    count: int
    samples: int


@dataclass(eq=False, slots=True)
class Step:
    """What the device does at once, in this order: swap_out, swap_in, copies, then compute. Each of these lists may be done in any
    order. In each layer, the keys and values of all chunks are written before any attention reads: a chunk may read pages that one
    before it in the list computes.

    A step that has been scheduled is executed as it stands, also where sequences have ended since. The tables are those of
    `sequence.pages` before the next call of the scheduler."""

    chunks: list[Chunk] = field(default_factory=list)
    """Decoding sequences first, then prompts."""
    decoding: int = 0
    """How many of the chunks are of decoding sequences."""
    tokens: int = 0
    """Tokens computed by all chunks."""
    sampling: int = 0
    """How many of the chunks sample."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """From a device page to a device page."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """From a device page to a host page."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """From a host page to a device page."""
    admitted: list[Sequence] = field(default_factory=list)
    """Those that were given a slot."""
    changed: list[Sequence] = field(default_factory=list)
    """Those with a chunk whose `pages` are not what they were at their last; the admitted are among them."""
