"""The training loop, as a story: batch, step, record, evaluate, save; until the last step.

The samples of a step are a function of its number alone, so a resumed run sees what the unbroken one would have seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shardwise.data.batches import Batch, Samples
from shardwise.data.open import Data, open_data
from shardwise.plan.work import CONVENTION, parameters, training_flops
from shardwise.run import Run, UserError, to_toml
from shardwise.train import checkpoint
from shardwise.train.display import PlainDisplay, Progress, clock, make_display
from shardwise.train.metrics import Metrics
from shardwise.train.speed import peak_flops, peak_memory
from shardwise.train.step import Trainee


def train(run: Run, out: Path) -> None:
    """Train the run into the folder `out`, going on from its newest checkpoint if there is one."""
    if run.layout.world > 1:
        raise UserError(f"the layout needs {run.layout.world} ranks; this version trains on one")
    data = open_data(run)
    saved = checkpoint.complete_checkpoints(out)
    if saved:
        checkpoint.check_same_job(saved[-1], run)
    with make_display() as display:
        trainee = Trainee(run)
        if saved:
            checkpoint.load(trainee, saved[-1], data.fingerprint)
        _introduce(trainee, data, display, resumed=bool(saved))
        if trainee.step >= run.train.steps:
            display.say(f"{out} is trained to step {trainee.step} already; raise train.steps to go on")
            return
        out.mkdir(parents=True, exist_ok=True)
        (out / "run.toml").write_text(to_toml(run))
        metrics = Metrics(out, run, resumed_step=trainee.step)
        try:
            _steps(trainee, data, out, metrics, display)
        finally:
            metrics.close()


def _steps(trainee: Trainee, data: Data, out: Path, metrics: Metrics, display: PlainDisplay) -> None:
    train = trainee.run.train
    peak, peak_source = peak_flops(trainee.device, trainee.dtype)
    flops = training_flops(trainee.run.model, train.seq_len) * trainee.run.batch_tokens
    display.say(f"MFU: {CONVENTION}; of {peak_source}")
    pace = 0.0
    began = last = time.perf_counter()
    for batch in _batches(data.train, trainee.run, trainee.step):
        result = trainee.train_step(batch)
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        now = time.perf_counter()
        seconds, last = now - last, now
        metrics.record(
            step=trainee.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=result.learning_rate,
            tokens=trainee.tokens,
            tokens_per_s=batch.tokens.size / seconds,
            seconds=seconds,
        )
        # The first steps are slow; a moving mean forgets them soon.
        pace = seconds if trainee.step <= 2 or not pace else 0.95 * pace + 0.05 * seconds
        display.show(
            Progress(
                step=trainee.step,
                steps=train.steps,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=result.learning_rate,
                tokens_per_s=batch.tokens.size / pace,
                utilization=flops / pace / peak,
                memory=peak_memory(trainee.device),
                seconds_left=pace * (train.steps - trainee.step),
            )
        )
        ending = trainee.step == train.steps
        if train.eval_every and (ending or trainee.step % train.eval_every == 0):
            eval_loss = trainee.evaluate(_validation_batch(data.validation, train.eval_sequences))
            metrics.record(step=trainee.step, eval_loss=eval_loss)
            display.say(f"step {trainee.step}: validation loss {eval_loss:.4f}")
        if ending or (train.checkpoint_every and trainee.step % train.checkpoint_every == 0):
            folder = checkpoint.save(trainee, out, data.tokenizer, data.fingerprint)
            display.say(f"step {trainee.step}: saved {folder}")
        last = time.perf_counter()
    display.say(f"trained {trainee.tokens:,} tokens in {clock(time.perf_counter() - began)}; everything is in {out}")


def _batches(samples: Samples, run: Run, done: int) -> Iterator[Batch]:
    """The batches of the steps still to come, each read in the background while the one before is computed."""
    size = run.train.global_batch
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(samples.take, np.arange(done * size, (done + 1) * size))
        for step in range(done + 1, run.train.steps + 1):
            batch = coming.result()
            if step < run.train.steps:
                coming = reader.submit(samples.take, np.arange(step * size, (step + 1) * size))
            yield batch


def _validation_batch(samples: Samples, sequences: int) -> Batch:
    """The same sequences each time, spread evenly, so that a few speak for the whole set."""
    sequences = min(sequences, samples.count)
    return samples.take(np.arange(sequences) * samples.count // sequences)


def _introduce(trainee: Trainee, data: Data, display: PlainDisplay, resumed: bool) -> None:
    run, count = trainee.run, parameters(trainee.run.model)
    active = f" ({count.active:,} active)" if count.active != count.total else ""
    display.say(
        f"{run.name}: {count.total:,} parameters{active}, {run.train.dtype} on {trainee.device}, "
        f"{run.train.global_batch} x {run.train.seq_len} tokens a step"
        + (f" in {run.accumulation} microbatches" if run.accumulation > 1 else "")
    )
    display.say(f"data: {data.train.count:,} sequences an epoch, {data.validation.count:,} for validation")
    if resumed:
        display.say(f"going on from step {trainee.step}")
