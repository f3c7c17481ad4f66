"""Guesses by a small model of the same vocabulary, with the parts of the engine: a runner of its own, whose pages are numbered as
the large one's. Whatever the scheduler does to a page, to share, copy, swap or find it again, is done to both; so the small model
needs no scheduler, and prefix hits, forks and preemption hold for it too.

It computes prompts along with the large one. Then, for each step, it computes the tokens that were accepted since its last guess
and one guess after the other, each with the noise that the large model will draw with. On a GPU nothing is waited for in between.
What it has written of guesses that were wrong is written over the next time.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from shardwise.schedules.serving import Chunk, Sequence, Step
from shardwise.serve.request import Sampling
from shardwise.serve.runner import Launched, Row, Runner

TO_FILL = -1


class DraftModel:
    """The small model of an engine."""

    def __init__(self, runner: Runner, count: int) -> None:
        self.runner, self.count = runner, count
        self.computed: dict[Sequence, int] = {}
        """Tokens of each sequence, as far as they are known, whose keys are in the small model's pages."""

    def warm(self, step_tokens: int) -> None:
        """Record its steps, too."""
        self.runner.warm(step_tokens)

    def propose(self, sequences: Iterable[Sequence]) -> None:
        """Places to fill: what is guessed needs pages, which the scheduler gives."""
        for sequence in sequences:
            if not (sequence.pending or sequence.drafts):
                sequence.drafts = [TO_FILL] * self.count

    def swap(self, step: Step, host_pages: int) -> None:
        """Its pages go with the large model's."""
        self.runner.swap(step.swap_out, step.swap_in, host_pages)

    def assign(self, slot: int, sampling: Sampling, seed: int) -> None:
        """It draws with the same noise, from what the same cuts leave. Penalties would need counts of its own, and only make some
        guesses better."""
        plain = replace(
            sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logprobs=None, prompt_logprobs=None
        )  # fmt: skip
        self.runner.sampler.assign(slot, plain, seed, (), ())

    def fill(self, step: Step, changes: Items[tuple[int, int, int]]) -> None:
        """Compute the step's prompts, and guess."""
        self.runner.set_pages(changes)
        self.runner.copy_pages(step.copies)
        rows, guessing = [], []
        for number, chunk in enumerate(step.chunks):
            if number >= step.decoding:
                rows.append(self._prompt(chunk))
            elif chunk.samples > 1:
                guessing.append(chunk)
                rows.append(self._known(chunk))
        if not rows:
            return
        rows.sort(key=lambda row: not row.single)
        order = {row.slot: n for n, row in enumerate(row for row in rows if row.samples)}
        made = [(self.runner.launch(rows), order)]
        for place in range(1, max((chunk.count - 1 for chunk in guessing), default=1)):
            rows = [
                Row(chunk.sequence.slot + 1, chunk.start + place, None, 1, 1)
                for chunk in guessing
                if chunk.count - 1 > place
            ]
            made.append((self.runner.launch(rows), {row.slot: n for n, row in enumerate(rows)}))
        self._read(guessing, made)

    def _read(self, guessing: list[Chunk], made: list[tuple[Launched, dict[int, int]]]) -> None:
        found = [(launched.read(), order) for launched, order in made] if guessing else []
        for chunk in guessing:
            sequence, slot = chunk.sequence, chunk.sequence.slot + 1
            # Scores that are no numbers make no token; any other is then as good.
            sequence.drafts = [max(0, tokens[order[slot]]) for tokens, order in found[: chunk.count - 1]]
            self.computed[sequence] = chunk.start + chunk.count - 1

    def _prompt(self, chunk: Chunk) -> Row:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        self.computed[sequence] = end
        return Row(sequence.slot + 1, chunk.start, sequence.tokens[chunk.start : end], chunk.count, 0)

    def _known(self, chunk: Chunk) -> Row:
        """The tokens that are known and not computed here, the last of which the large model computes now."""
        sequence, end = chunk.sequence, chunk.start + 1
        start = min(self.computed[sequence], chunk.start)
        return Row(sequence.slot + 1, start, sequence.tokens[start:end], end - start, 1)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self.computed.pop(sequence, None)
