"""`shardwise scale noise`: measures the critical batch of a run."""

from __future__ import annotations

import argparse
import json
import math

from shardwise.cli.machinery.terminal import progress_line
from shardwise.report import words
from shardwise.run import read_run
from shardwise.scale.published import step_law
from shardwise.scale.runs import count


def noise(args: argparse.Namespace) -> int:
    """Measure and print the critical batch."""
    from shardwise.measure.noise import measure_noise

    run = read_run(args.run, args.overrides)
    with progress_line() as tell:
        found = measure_noise(run, args.steps, args.draws, tell=tell)
    rate, batch = step_law(float(count(run)), float(run.train.steps * run.batch_tokens))
    known = math.isfinite(found.critical_batch) and found.critical_batch > 0
    if args.json:
        values = dict(
            step=found.step, loss=found.loss if math.isfinite(found.loss) else None, signal=found.signal, variance=found.variance,
            critical_batch_tokens=found.critical_batch if known else None, batch_tokens=run.batch_tokens,
            step_law_batch_tokens=batch, step_law_lr=rate,
        )  # fmt: skip
        print(json.dumps(values))
        return 0
    if known:
        print(f"critical batch after {found.step} steps: {words.count(round(found.critical_batch))} tokens")
    else:
        print(f"after {found.step} steps the noise hides the gradient: give more --draws or a larger batch")
    by_law = f"by the Step law {words.count(round(batch))}, with lr {rate:.2g}"
    print(f"the run's batch: {words.count(run.batch_tokens)} tokens; {by_law}")
    return 0
