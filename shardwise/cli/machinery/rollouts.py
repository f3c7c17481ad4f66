"""What a plan shows of a run that makes its own answers."""

from __future__ import annotations

from shardwise.plan.serving.rollouts import RolloutPlan
from shardwise.report import words
from shardwise.run import Run, counted


def rollout_figures(run: Run, plan: RolloutPlan) -> list[tuple[str, str, str]]:
    """Rows beside those of the training step."""
    memory, asked = plan.memory, run.objective
    steps = asked.minibatches * asked.iterations
    engine = f"keys and values {words.size(memory.cache)}, weights besides the trainer's {words.size(memory.weights)}"
    looking = f"; looking back takes {words.seconds(plan.look_back_seconds)} more" if plan.passes else ""
    age = ", while the round before is learned from" if asked.asynchronous else ""
    lengths = (
        f"{asked.group} to each prompt of {plan.prompt_tokens} tokens, {asked.completion_tokens} tokens long at most"
    )
    cut = [f"{axis} {size}" for axis in ("tensor", "pipeline", "expert") if (size := getattr(plan.layout, axis)) > 1]
    if cut:
        engine = f"a rank of {counted(plan.layout.replicate, 'engine')} of {' x '.join(cut)}: {engine}"
    sent = f"; {words.seconds(plan.relaying_seconds)} of it laying weights anew" if plan.relaying_seconds else ""
    speed = words.rate(plan.tokens_per_s, "tokens")
    share = f"with its share of a round; {words.seconds(plan.train_seconds)} of it training"
    return [
        ("answers", f"{plan.answers:,} a round", f"{lengths}; for {counted(steps, 'step')}"),
        ("engine", words.size(memory.total), f"with training at its peak: {engine}: " + ("fits" if plan.fits else "DOES NOT FIT")),
        ("rollouts", words.seconds(plan.rollout_seconds), f"a round, {speed}{sent}{age}{looking}"),
        ("whole step", words.seconds(plan.step_seconds), share),
    ]  # fmt: skip
