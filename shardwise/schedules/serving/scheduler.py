"""The scheduler of a serving engine: which tokens of which sequences the next step computes, and in which pages.

Continuous batching (Orca, Yu et al. 2022): sequences join and leave at every step, which computes at most `max_step_tokens` tokens.
Decoding sequences come first, since someone reads along; the rest of the budget goes to chunks of prompts (Sarathi-Serve, Agrawal
et al. 2024), first of those that have begun, then of those that wait. Memory is not reserved: a sequence gets a page when it
reaches it. When there are none left, the latest of the least important sequences gives up its pages, to be recomputed or swapped to
the host.

The engine executes these steps and the planner plays them, so nothing here knows of a device. The device must not wait for the
host: a decoding sequence that stays within its page costs a comparison and three assignments; all else happens at the edges of
pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import ceil

from shardwise.schedules.serving.pages import PagePool
from shardwise.schedules.serving.queues import Running, WaitingQueue
from shardwise.schedules.serving.sequence import Chunk, Sequence, Step
from shardwise.schedules.serving.settings import Settings
from shardwise.schedules.serving.tables import PageTables


@dataclass
class SchedulerCounters:
    """Counters of a scheduler since it began, or since they were reset."""

    steps: int = 0
    most_running: int = 0
    most_pages: int = 0

    def count(self, running: int, pages: int) -> None:
        """Count one more step, with this many running sequences that hold this many pages."""
        self.steps += 1
        self.most_running = max(self.most_running, running)
        self.most_pages = max(self.most_pages, pages)


class Scheduler:
    """Call `schedule`, execute the step, `update` with the sampled tokens, `finish` the sequences that have ended, and so on. To
    keep the device busy, `schedule` may be called once more before `update`: the next tokens are scheduled while the last are not
    known. With several stages, it may be called once per stage."""

    def __init__(self, settings: Settings, pool: PagePool) -> None:
        self.settings = settings
        self.pool = pool
        self.preemptions = 0
        self.did = SchedulerCounters()
        pool.leaves_first = not settings.window
        self._tables = PageTables(pool, settings.window)
        self._watermark = ceil(settings.watermark * (pool.pages - 1))
        self._waiting = WaitingQueue()
        self._running = Running(settings.max_sequences)
        self._forks: dict[Sequence, None] = {}  # waiting sequences that nevertheless hold pages
        self._under_way: deque[Step] = deque()
        self._arrivals = 0
        self._short = False  # whether this step lacked pages

    @property
    def waiting(self) -> int:
        """Sequences that wait, for the first time or after preemption."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences whose prompt is computed, by importance."""
        return self._running.decode

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._running)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence that can run."""
        pool, longest = self.pool, self.settings.longest
        fits = self._tables.fewest(longest - 1) < pool.pages
        return longest if fits else (pool.pages - 1) * pool.page_tokens + 1  # the last token is never computed

    def reasons(self, prompt: int, max_new: int) -> list[str]:
        """The reasons why a sequence of such lengths can never run, one sentence each; empty when it can."""
        settings, pool, tokens = self.settings, self.pool, prompt + max_new
        reasons = []
        if prompt < 1 or max_new < 1:
            reasons.append(f"a prompt of {prompt} tokens to be continued by {max_new}: both have to be at least 1")
        if tokens > settings.longest:
            reasons.append(
                f"{prompt} tokens and {max_new} to generate are {tokens}: a sequence has {settings.longest} at most"
            )
        if self._tables.fewest(tokens - 1) >= pool.pages:
            reasons.append(
                f"{tokens} tokens do not fit the {pool.pages - 1} pages of {pool.page_tokens} tokens that there are"
            )
        return reasons

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence. Raises `ValueError` if it can never run."""
        reasons = self.reasons(sequence.prompt, sequence.max_new)
        if reasons:
            raise ValueError("; ".join(reasons))
        self._arrive(sequence)
        self._waiting.add(sequence)

    def fork(
        self,
        parent: Sequence,
        key: Hashable,
        length: int | None = None,
        sampled: Items[int] = (),
        lookahead: bool = True,
    ) -> Sequence:
        """Add a sequence that begins with the first `length` known tokens of another, by default its prompt, followed by the
        `sampled` ones. Their computed pages are shared, and copied on write. Without `sampled`, the last token is computed again,
        to sample another token after it. Where the parent has no pages now, the fork is computed like any other sequence."""
        length = parent.prompt if length is None else length
        child = parent.fork(key, length, sampled, lookahead)
        self._arrive(child)
        if self._tables.fork(parent, child, length):
            child.charged = child.cached = child.computed
            self._forks[child] = None
            self._waiting.add_fork(child)
        else:
            self._waiting.add(child)
        return child

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, at any moment, and release its pages; computed ones stay in the prefix cache. Steps in flight may still
        write to them: the sequence that gets them next writes later."""
        if sequence.state == "finished":
            return
        self._waiting.charge(sequence)
        if sequence.state == "waiting":
            self._waiting.remove(sequence)
            self._forks.pop(sequence, None)
        else:
            self._running.stop(sequence)
        self._tables.release(sequence)
        sequence.state, sequence.drafts = "finished", []
        self._waiting.leave(sequence)

    def schedule(self) -> Step:
        """The next step. A step without chunks needs no update; if it moves no pages either, there is nothing to do before the next
        update or arrival."""
        if len(self._under_way) >= max(2, self.settings.stages):
            raise RuntimeError(
                f"{len(self._under_way)} steps are under way: update the first before another is scheduled"
            )
        step = Step()
        self._short = False
        self._schedule_decoding(step)
        self._schedule_prefill(step)
        if not self._short:
            self._admit(step)
        self.pool.unpin()
        if step.chunks:
            self._under_way.append(step)
            self.did.count(self.running, self.pool.used)
        return step

    def update(self, step: Step, sampled: Items[Items[int]]) -> None:
        """Take the tokens that a step has sampled, for each of its chunks that sample, in order: one token, or the accepted drafts
        and one more. Tokens of sequences that have ended meanwhile are ignored."""
        if not step.chunks:
            return
        if not self._under_way or step is not self._under_way[0]:
            raise RuntimeError("steps are updated once each, in the order in which they were scheduled")
        if len(sampled) != step.sampling:
            raise ValueError(f"{step.sampling} chunks of the step sample, but there are tokens for {len(sampled)}")
        self._under_way.popleft()
        answers = iter(sampled)
        for chunk in step.chunks:
            samples, sequence = chunk.samples, chunk.sequence
            if samples:
                new = next(answers)
                if sequence.state != "finished":
                    sequence.tokens += new
                    sequence.pending -= 1
                    if samples > 1:
                        self._judge(sequence, samples - len(new))

    def _judge(self, sequence: Sequence, rejected: int) -> None:
        """Drafts were verified: the keys and values of rejected ones do not count. If the sequence was preempted meanwhile, none
        do."""
        sequence.drafts = []
        if sequence.computed:
            sequence.computed -= rejected

    def _schedule_decoding(self, step: Step) -> None:
        """Schedule one token of every decoding sequence, or of a share of them where there are stages, in order. A sequence
        preempted on the way is the last of the list, so never one that already has its chunk."""
        append = step.chunks.append
        decode = self._running.decode
        spare = self.settings.max_step_tokens - len(decode)
        drafts, share = 0, -(-len(decode) // self.settings.stages)
        for sequence in decode:
            if len(step.chunks) == share:
                break
            start = sequence.computed
            if start < sequence.limit and not sequence.drafts:
                sequence.computed = start + 1
                sequence.pending += 1
                append(Chunk(sequence, start, 1, 1))
            else:
                drafts += self._decode_at_edge(sequence, spare - drafts, step)
        step.decoding = step.sampling = len(step.chunks)
        step.tokens = step.decoding + drafts

    def _decode_at_edge(self, sequence: Sequence, spare: int, step: Step) -> int:
        """Schedule a decoding sequence that needs a page, has drafts, or may have to wait until its tokens are known. Returns the
        number of drafts, which are verified as far as budget and pages allow."""
        start, known, pending, tables = sequence.computed, len(sequence.tokens), sequence.pending, self._tables
        ends = known + pending >= sequence.end
        verifying = start >= known + pending
        if ends or verifying or (pending and not sequence.lookahead):
            return 0
        self._waiting.charge(sequence)
        tables.register(sequence)
        changed = tables.give_back(sequence)
        # Drafts follow the last known token; with a sampled token in flight they come too late.
        drafts = [] if pending else sequence.drafts[: min(spare, sequence.end - known - 1)]
        if drafts and tables.missing(sequence, start + 1 + len(drafts)) > self.pool.available:
            drafts = []
        end = start + 1 + len(drafts)
        if not self._make_room(sequence, end, step):
            return 0
        if tables.extend(sequence, end, step) or changed:
            step.changed.append(sequence)
        step.chunks.append(Chunk(sequence, start, end - start, end - start))
        sequence.drafts, sequence.computed = drafts, end
        sequence.pending += 1
        self._set_limit(sequence)
        return len(drafts)

    def _schedule_prefill(self, step: Step) -> None:
        """Schedule the next chunks of prompts that have begun."""
        prefill, at = self._running.prefill, 0
        while at < len(prefill) and step.tokens < self.settings.max_step_tokens:
            if not self._schedule_chunk(prefill[at], step):
                at += 1

    def _schedule_chunk(self, sequence: Sequence, step: Step) -> bool:
        """Schedule as much of a prompt as the budget and the pages allow. True when that is its last chunk, which samples a
        token."""
        start, known, tables = sequence.computed, len(sequence.tokens), self._tables
        tables.give_back(sequence)
        end = min(known, start + self.settings.max_step_tokens - step.tokens)
        if tables.reach(sequence) < end:
            self._short = True
            if not self._make_room(sequence, start + 1, step):
                return False
            end = min(end, tables.reach(sequence))
        tables.extend(sequence, end, step)
        last = end == known
        step.chunks.append(Chunk(sequence, start, end - start, int(last)))
        step.changed.append(sequence)
        step.tokens += end - start
        sequence.computed = end
        tables.register(sequence)
        self._waiting.charge(sequence)
        if last:
            step.sampling += 1
            sequence.pending += 1
            self._running.decodes(sequence)
            self._set_limit(sequence)
        return last

    def _admit(self, step: Step) -> None:
        """Admit waiting sequences, in order, while there are budget, slots and pages. A sequence that does not fit holds up the
        others: it would starve if smaller ones overtook it."""
        while self._running.slots and step.tokens < self.settings.max_step_tokens:
            sequence = self._waiting.head()
            if sequence is None or sequence.pending or not self._bring_pages(sequence, step):
                return
            self._waiting.remove(sequence)
            self._running.start(sequence)
            step.admitted.append(sequence)
            self._schedule_chunk(sequence, step)

    def _bring_pages(self, sequence: Sequence, step: Step) -> bool:
        """Give a waiting sequence the pages that exist for it: shared, swapped or cached. False where there is no room beside the
        running ones for all of its tokens (with a window, for a chunk): computing half a prompt that is then preempted is wasted.
        Alone, it gets by with the pages there are."""
        pool, tables, known, alone = self.pool, self._tables, len(sequence.tokens), not self._running
        first, found = tables.match(sequence) if not sequence.computed else (sequence.given_back, [])
        start = sequence.computed or (first + len(found)) * pool.page_tokens
        end = min(known, start + self.settings.max_step_tokens - step.tokens) if self.settings.window else known
        if sequence in self._forks:
            need = tables.missing(sequence, end)
        else:
            need = tables.pages_of(end) - first - sum(pool.counts[page] > 0 for page in found)
        if need + (0 if alone else self._watermark) > pool.available:
            if not alone:
                return False
            for fork in [fork for fork in self._forks if fork is not sequence]:
                self._take_fork(fork)
        if not sequence.computed:
            tables.adopt(sequence, first, found)
            if sequence.cached < 0:
                sequence.cached = sequence.computed
                pool.queried_tokens += known
                pool.found_tokens += sequence.computed
            sequence.charged = max(sequence.charged, sequence.computed)
        elif sequence in self._forks:
            del self._forks[sequence]
        else:
            tables.swap_in(sequence, step)
        return True

    def _make_room(self, sequence: Sequence, end: int, step: Step) -> bool:
        """Make pages available for a running sequence to reach position `end`, whichever sequence loses them. False if only the
        sequence itself and those that already have their chunk are left to lose any: then it is preempted if it is in decode, and
        waits if it is in prefill."""
        while self._tables.missing(sequence, end) > self.pool.available:
            self._short = True
            if self._forks:
                self._take_fork(next(reversed(self._forks)))
                continue
            decoding = sequence.state == "decode"
            victim = self._running.last(decoding)
            if decoding or victim is not sequence:
                self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _take_fork(self, fork: Sequence) -> None:
        """A waiting fork loses its pages, and is computed like any other sequence when its turn comes."""
        del self._forks[fork]
        self._tables.release(fork)

    def _preempt(self, victim: Sequence, step: Step) -> None:
        self.preemptions += 1
        self._waiting.charge(victim)
        self._running.stop(victim)
        if self.settings.preemption != "swap" or not self._tables.swap_out(victim, step):
            self._tables.release(victim)
        victim.state, victim.drafts = "waiting", []
        self._waiting.put_back(victim)

    def _arrive(self, sequence: Sequence) -> None:
        sequence.arrival = self._arrivals
        sequence.order = (sequence.priority, self._arrivals)
        self._arrivals += 1

    def _set_limit(self, sequence: Sequence) -> None:
        within = sequence.lookahead and not sequence.drafts
        sequence.limit = min(len(sequence.pages) * self.pool.page_tokens, sequence.end - 1) if within else 0
