"""Drafts by a small model of the same vocabulary, which reuses the engine's parts: it has its own runner, whose pages have the
same numbers as the large model's. Whatever the scheduler does to a page (share, copy, swap or find it again) is done to both. So
the draft model needs no scheduler, and prefix hits, forks and preemption work for it too.

It computes prompts together with the large model. Then, in each step, it computes the tokens accepted since its last draft, and
drafts one token after the other, each with the noise that the large model will draw with. On a GPU there is no host sync in
between. KV cache entries of rejected drafts are overwritten the next time.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from shardwise.schedules.serving import Chunk, Sequence, Step
from shardwise.serve.request import Sampling
from shardwise.serve.runner import Launched, Row, Runner
from shardwise.serve.speculate.drafter import Drafter

TO_FILL = -1


class DraftModel(Drafter):
    """The draft model of an engine."""

    def __init__(self, runner: Runner, count: int) -> None:
        self.runner, self.count = runner, count
        self.computed: dict[Sequence, int] = {}
        """How many known tokens of each sequence have their keys in the draft model's pages."""

    def warm(self, step_tokens: int, host_pages: int) -> None:
        """Capture its CUDA graphs, too."""
        self.runner.warm(step_tokens, host_pages)

    def propose(self, sequences: Iterable[Sequence]) -> None:
        """Reserve placeholders: drafts need pages, which the scheduler allocates."""
        for sequence in sequences:
            if not (sequence.pending or sequence.drafts):
                sequence.drafts = [TO_FILL] * self.count

    def swap(self, step: Step, host_pages: int) -> None:
        """Swap its pages along with the large model's."""
        self.runner.swap(step.swap_out, step.swap_in, host_pages)

    def assign(self, slot: int, sampling: Sampling, seed: int) -> None:
        """Assign a slot. It draws with the same noise, after the same top-k, top-p and min-p cuts. Penalties would need counts of
        its own, and would only improve some drafts."""
        plain = replace(
            sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logprobs=None, prompt_logprobs=None
        )  # fmt: skip
        self.runner.sampler.assign(slot, plain, seed, (), ())

    def fill(self, step: Step, changes: Items[tuple[int, int, int]]) -> None:
        """Compute the step's prompts, and draft."""
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
            # Logits that are not finite yield no token (-1); any other draft is then as good.
            sequence.drafts = [max(0, tokens[order[slot]]) for tokens, order in found[: chunk.count - 1]]
            self.computed[sequence] = chunk.start + chunk.count - 1

    def _prompt(self, chunk: Chunk) -> Row:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        self.computed[sequence] = end
        return Row(sequence.slot + 1, chunk.start, sequence.tokens[chunk.start : end], chunk.count, 0)

    def _known(self, chunk: Chunk) -> Row:
        """The known tokens that are not computed here yet; the large model computes the last of them in this step."""
        sequence, end = chunk.sequence, chunk.start + 1
        start = min(self.computed[sequence], chunk.start)
        return Row(sequence.slot + 1, start, sequence.tokens[start:end], end - start, 1)

    def forget(self, sequence: Sequence) -> None:
        self.computed.pop(sequence, None)
