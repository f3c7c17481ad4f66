"""Whole lives of a scheduler, drawn at random and executed by the toy device, with everything checked that must always hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from toy_device import ToyDevice, continuation

from shardwise.schedules.serving import PagePool, Scheduler, Sequence, Settings, Step
from shardwise.schedules.serving.tables import PageTables

STOP = 0


@dataclass(frozen=True)
class Case:
    """What is drawn; all else follows from the seed."""

    page_tokens: int
    spare_pages: int
    """Beyond what the longest sequence needs by itself."""
    host_pages: int
    max_sequences: int
    spare_tokens: int
    """Of the budget, beyond one for each sequence."""
    longest: int
    preemption: str
    window: int
    prefix_cache: bool
    ahead: bool
    sequences: int
    together: bool
    """All arrive before the first step."""
    vocab: int
    aborts: float
    forks: float
    drafts: float
    patient: float
    """Share of sequences that are not scheduled ahead."""
    stages: int
    """With several, as many steps are under way, and no sequence is scheduled ahead."""
    seed: int

    @property
    def kept(self) -> int:
        """Steps left under way."""
        return self.stages - 1 or int(self.ahead)


def draw_case(number: Callable[[int, int], int]) -> Case:
    """A case from a function that draws a number between two."""
    rate = lambda: (0.0, 0.0, 0.05, 0.3)[number(0, 3)]  # noqa: E731
    return Case(
        page_tokens=number(1, 6),
        spare_pages=(0, 1, 4, 20)[number(0, 3)],
        host_pages=(0, 3, 20)[number(0, 2)],
        max_sequences=number(1, 6),
        spare_tokens=number(0, 4) ** 2,
        longest=number(2, 40),
        preemption=("recompute", "swap")[number(0, 1)],
        window=(0, 0, 1, 3, 8)[number(0, 4)],
        prefix_cache=number(0, 3) > 0,
        ahead=number(0, 2) > 0,
        sequences=number(1, 12),
        together=number(0, 1) > 0,
        vocab=number(2, 5),
        aborts=rate(),
        forks=rate(),
        drafts=rate() * 3,
        patient=rate(),
        stages=(1, 1, 2, 3, 5)[number(0, 4)],
        seed=number(0, 2**30),
    )


class Life:
    """One scheduler from its first sequence to its last."""

    def __init__(self, case: Case) -> None:
        self.case, self.draw = case, Random(case.seed)
        lone = PageTables(PagePool(2, case.page_tokens), case.window).fewest(case.longest - 1)
        self.pool = PagePool(1 + lone + case.spare_pages, case.page_tokens, case.host_pages, case.prefix_cache)
        self.settings = Settings(
            case.max_sequences,
            case.max_sequences + case.spare_tokens,
            case.longest,
            case.preemption,  # type: ignore[arg-type]
            case.window,
            self.draw.choice((0.0, 0.1)),
            case.stages,
        )
        self.scheduler = Scheduler(self.settings, self.pool)
        self.device = ToyDevice(self.pool.pages, case.page_tokens, case.host_pages, case.window, case.vocab)
        self.live: list[Sequence] = []
        self.expected: dict[Sequence, list[int]] = {}
        self.arrived = self.forked = self.aborted = self.finished = 0
        self.under_way: list[Step] = []

    def play(self) -> None:
        """Until all have arrived and ended."""
        case, steps = self.case, 0
        while self.arrived < case.sequences or self.live:
            self._happen()
            if len(self.under_way) <= case.kept and (not self.under_way or self.draw.random() < 0.9):
                self._schedule()
                steps += 1
                self._happen()
            if self.under_way and (len(self.under_way) > case.kept or self.draw.random() < 0.2):
                self._update()
            assert steps < 20_000, "starved"
        while self.under_way:
            self._update()
        self._check_the_end()

    def _happen(self) -> None:
        """What comes from outside, at any moment."""
        case, draw = self.case, self.draw
        while self.arrived < case.sequences and (case.together or draw.random() < 0.3):
            self._arrive()
        if self.live and draw.random() < case.aborts / 3:
            self._end(draw.choice(self.live), abort=True)
        if self.live and draw.random() < case.forks and self.forked < 10:
            self._fork(draw.choice(self.live))
        for sequence in self.live:
            if draw.random() < case.drafts:
                self._speculate(sequence)

    def _arrive(self) -> None:
        case, draw = self.case, self.draw
        prompt = draw.randint(1, max(1, case.longest // draw.choice((1, 4)) - 1))
        new = case.longest - prompt if draw.random() < 0.5 else draw.randint(1, case.longest - prompt)
        shared = Random(case.seed).choices(range(case.vocab), k=draw.randint(0, prompt))  # many begin alike
        tokens = shared + draw.choices(range(case.vocab), k=prompt - len(shared))
        sequence = Sequence(
            self.arrived * 2 + draw.randint(0, 1),
            tokens,
            new,
            priority=draw.choice((0, 0, 0, 1)),
            user=draw.choice("ab"),
            salt=draw.choice((b"", b"", b"salt")),
            lookahead=draw.random() >= case.patient and case.stages == 1,
            reads_cache=draw.random() < 0.9,
        )
        self.arrived += 1
        self.scheduler.add(sequence)
        self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        new = continuation(
            sequence.tokens, sequence.end - len(sequence.tokens), sequence.key, sequence.salt, self.case.vocab
        )
        if self.draw.random() < 0.3:  # it ends at a stop token
            new = new[: new.index(STOP) + 1] if STOP in new else new
        self.expected[sequence] = sequence.tokens + new
        self.device.begin(sequence)
        self.live.append(sequence)

    def _fork(self, parent: Sequence) -> None:
        draw, key = self.draw, 1001 + 2 * self.forked
        length = draw.choice((None, None, draw.randint(parent.prompt, len(parent.tokens))))
        begun = parent.tokens[: parent.prompt if length is None else length]
        given = continuation(begun, draw.choice((0, 0, 1, 3)), key, parent.salt, self.case.vocab)
        if len(begun) + len(given) >= parent.end:
            return
        self.forked += 1
        ahead = draw.random() >= self.case.patient and self.case.stages == 1
        self._begin(self.scheduler.fork(parent, key, length, given, lookahead=ahead))

    def _speculate(self, sequence: Sequence) -> None:
        """Drafts are mostly right; where a token is under way they are late, and must do no harm."""
        if sequence.state != "decode" or sequence.drafts:
            return
        drafts = continuation(sequence.tokens, self.draw.randint(1, 4), sequence.key, sequence.salt, self.case.vocab)
        if self.draw.random() < 0.5:
            drafts[self.draw.randrange(len(drafts))] = self.draw.randrange(self.case.vocab)
        sequence.drafts = drafts

    def _schedule(self) -> None:
        step = self.scheduler.schedule()
        self._check_step(step)
        self.device.submit(step)
        if step.chunks:
            self.under_way.append(step)
        else:
            assert self.under_way or not self.live, "nothing is scheduled, and nothing will change that"

    def _update(self) -> None:
        step = self.under_way.pop(0)
        sampled = self.device.execute(step)
        self.scheduler.update(step, sampled)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.state == "finished":
                continue
            assert sequence.tokens == self.device.tokens[sequence][: len(sequence.tokens)]
            assert len(sequence.tokens) <= sequence.end
            if len(sequence.tokens) >= len(self.expected[sequence]):
                self._end(sequence, abort=False)

    def _end(self, sequence: Sequence, abort: bool) -> None:
        if abort:
            self.scheduler.finish(sequence)
            self.aborted += 1
        else:
            # After a stop token there may be more, which was accepted with it.
            whole = self.expected[sequence]
            assert sequence.tokens[: len(whole)] == whole
            self.scheduler.finish(sequence)
            self.finished += 1
        self.live.remove(sequence)
        assert sequence.slot == -1
        assert not sequence.pages

    def _check_step(self, step: Step) -> None:
        chunks, settings = step.chunks, self.settings
        assert step.tokens == sum(chunk.count for chunk in chunks) <= settings.max_step_tokens
        assert step.sampling == sum(chunk.samples > 0 for chunk in chunks)
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        assert self.scheduler.running + self.scheduler.waiting == len(self.live)
        running = [sequence for sequence in self.live if sequence.slot >= 0]
        assert len({sequence.slot for sequence in running}) == len(running) == self.scheduler.running
        assert len(running) <= settings.max_sequences
        assert all(chunk.count == chunk.samples for chunk in chunks[: step.decoding])
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.start + chunk.count == sequence.computed
            assert chunk.start < sequence.end - 1
            assert sequence.pending <= (2 if sequence.lookahead and self.under_way else 1)
        held = Counter(page for sequence in self.live for page in sequence.pages if page >= 0)
        assert [held[page] for page in range(len(self.pool.counts))] == self.pool.counts
        assert self.pool.used == len(held)
        swapped = [page for sequence in self.live for page in sequence.host_pages]
        assert len(set(swapped)) == len(swapped) == self.case.host_pages - self.pool.available_host

    def _check_the_end(self) -> None:
        assert self.scheduler.idle
        assert self.scheduler.waiting == self.scheduler.running == 0
        assert self.pool.available == self.pool.pages - 1
        assert not any(self.pool.counts)
        assert self.pool.available_host == self.case.host_pages
        assert not self.scheduler._forks
        assert not self.scheduler._waiting._users
        assert self.finished + self.aborted == self.case.sequences + self.forked
