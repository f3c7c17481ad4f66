"""Speculative decoding in a simulated load: how many draft tokens are accepted, and how long the draft model takes.

Every draft token is accepted with the same probability if all before it were (`serve.acceptance`), so a step with k draft tokens
yields (1 - a^(k+1)) / (1 - a) tokens per sequence on average (Leviathan et al. 2023, equation 1). The simulation draws them one by
one, with a seed, since the scheduler only handles whole tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from shardwise.plan.serving.step_time import StepTime
from shardwise.run.sections.serve import ServeConfig
from shardwise.schedules.serving import Sequence, Step


def tokens_a_step(acceptance: float, drafts: int) -> float:
    """Mean tokens per sequence and step with `drafts` draft tokens: the accepted ones and the token sampled after them."""
    return sum(acceptance**n for n in range(drafts + 1))


def acceptance_of(tokens: float, drafts: int) -> float:
    """The acceptance rate that yields `tokens` tokens per step, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_a_step(middle, drafts) < tokens else (low, middle)
    return high


@dataclass
class Speculation:
    """Draft tokens of a simulated load. `times` are those of the draft model, None where drafting takes no device time."""

    drafts: int
    acceptance: float
    times: StepTime | None
    draw: Random
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, serve: ServeConfig, times: StepTime | None, seed: int = 0) -> Speculation | None:
        """As the run configures it; None where it does not speculate."""
        if serve.speculate == "none":
            return None
        return cls(serve.draft_tokens, serve.acceptance, times, Random(seed))

    def propose(self, sequences: list[Sequence]) -> None:
        """Before a step is scheduled: draft tokens for all sequences whose last token is known."""
        for sequence in sequences:
            if not (sequence.pending or sequence.drafts):
                sequence.drafts = [0] * self.drafts

    def sampled(self, step: Step) -> list[list[int]]:
        """The tokens that a step yields for each chunk that samples."""
        found = []
        for chunk in step.chunks:
            if chunk.samples:
                right = 0
                while right < chunk.samples - 1 and self.draw.random() < self.acceptance:
                    right += 1
                self.drafted += chunk.samples - 1
                self.accepted += right
                found.append([0] * (1 + right))
        return found

    def seconds(self, step: Step) -> float:
        """Seconds until the draft tokens of a step are on the host: the draft model computes the step's prompts together with the
        last known tokens, then one draft token after the other, each launched while the device works."""
        if self.times is None:
            return 0.0
        prompts = [(chunk.start, chunk.count) for chunk in step.chunks[step.decoding :]]
        guessing = [chunk for chunk in step.chunks[: step.decoding] if chunk.samples > 1]
        host = device = 0.0
        for place in range(max((chunk.samples - 1 for chunk in guessing), default=int(bool(prompts)))):
            rows = [chunk for chunk in guessing if chunk.samples - 1 > place]
            keys = sum(chunk.start + 1 + place for chunk in rows)
            spent = self.times.of(len(rows), keys, [] if place else prompts, len(rows))
            device = max(host + spent.before, device) + spent.device
            host += spent.before + spent.launch
        return max(host, device) if guessing else host
