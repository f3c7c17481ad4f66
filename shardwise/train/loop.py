"""The training loop, as a story: batch, step, record, evaluate, save; until the last step.

The samples of a step are a function of its number alone (and of the batches that were left out as bad), so a resumed run sees
what the unbroken one would have seen. Whether all goes well is the business of `watch`.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.batches import Batch, Samples
from shardwise.data.open import Data, open_data
from shardwise.files import write_atomically
from shardwise.parallel.mesh import Mesh
from shardwise.plan.work import CONVENTION, parameters, training_flops
from shardwise.run import AXES, Run, UserError, to_toml
from shardwise.train import replay, saves, tune
from shardwise.train.display import PlainDisplay, Progress, clock, make_display
from shardwise.train.metrics import Metrics
from shardwise.train.speed import peak_flops, peak_memory
from shardwise.train.step import StepResult, Trainee, choose_device
from shardwise.train.watch.guard import History
from shardwise.train.watch.stop import Preempted
from shardwise.train.watch.watch import RollBack, Watch


def check(run: Run, out: Path) -> None:
    """Raise what is wrong with a run's data or with its folder before any rank starts. A machine that comes later than others
    finds the folder in use, by the run that it joins."""
    open_data(run)
    saves.check_weights(run, out)
    if run.cluster.nodes == 1:
        saves.check_folder(run, out)


def train(run: Run, out: Path, watched: bool = False) -> None:
    """Train the run into the folder `out`, going on from its newest checkpoint if there is one. Every rank calls this; `watched`
    when the process that started it keeps the account of failures. Raises `Preempted` when told to stop, after saving."""
    data = open_data(run)
    mesh = Mesh(run.layout, choose_device(run.train.device).type)
    with (
        make_display(quiet=mesh.rank > 0) as display,
        saves.held(run, out, mesh, display.say),
        Watch(run, out, mesh.rank, watched) as watch,
    ):
        excluded: list[int] = []
        while True:
            try:
                _attempt(run, out, data, mesh, watch, display, excluded)
                return
            except RollBack as bad:
                watch.end()
                excluded.append(bad.batch)
                display.say(f"{bad}; going back to the last checkpoint, and on without batch {bad.batch}")
            gc.collect()  # a trainee and what replays its steps hold each other, and the next one needs their memory


def _attempt(
    run: Run, out: Path, data: Data, mesh: Mesh, watch: Watch, display: PlainDisplay, excluded: list[int]
) -> None:
    """From the newest checkpoint to the last step, leaving out the batches that earlier attempts found bad."""
    trainee = Trainee(run, mesh)
    resumed = saves.resume(trainee, out, data.fingerprint, display.say)
    if resumed is None:
        saves.begin(trainee, data.tokenizer, display.say)
    else:
        trainee.history = History(**resumed.more)
    trainee.history.excluded = sorted({*trainee.history.excluded, *excluded})
    _introduce(trainee, data, display, resumed is not None)
    if trainee.step >= run.train.steps:
        display.say(f"{out} is trained to step {trainee.step} already; raise train.steps to go on")
        return
    metrics = None
    if mesh.rank == 0:
        write_atomically(out / "run.toml", to_toml(run).encode())
        metrics = Metrics(out, run, display.say, resumed_step=trainee.step)
        watch.event("repeat", steps=metrics.dropped_steps, seconds=metrics.dropped_seconds)
    saver = saves.Saver(out, mesh, data.tokenizer, data.fingerprint, display.say)
    watch.begin(trainee)
    tune.attach(trainee, display.say)
    replay.attach(trainee, display.say)
    try:
        _steps(trainee, data, out, metrics, saver, display, watch)
    except RollBack:
        saver.finish()
        raise
    except BaseException:
        saver.abandon()
        raise
    finally:
        if metrics is not None:
            metrics.close()


def _steps(
    trainee: Trainee,
    data: Data,
    out: Path,
    metrics: Metrics | None,
    saver: saves.Saver,
    display: PlainDisplay,
    watch: Watch,
) -> None:
    train = trainee.run.train
    peak, peak_source = peak_flops(trainee.device, trainee.dtype)
    flops = training_flops(trainee.run.model, train.seq_len) * trainee.run.batch_tokens
    display.say(f"MFU: {CONVENTION}; of {peak_source}")
    began = time.perf_counter()

    def note(step: int, **values: Any) -> None:
        if metrics is not None:
            metrics.record(step=step, **values)

    report = _Report(trainee, peak, flops, note, display, watch)
    stop = False
    for batch in batches(data.train, trainee, train.steps):
        report.take(watch.step(batch))
        step, ending = trainee.step, trainee.step == train.steps
        compares = watch.stragglers.due(step)
        evaluates = bool(train.eval_every) and (ending or step % train.eval_every == 0)
        saves_now = ending or (bool(train.checkpoint_every) and step % train.checkpoint_every == 0)
        stop = report.read(all_of_them=compares or evaluates or saves_now)
        if stop:
            report.read(all_of_them=True)
        compared = watch.stragglers.compare(step)
        if compared is not None:
            note(step, compute_seconds=compared.seconds, slowest=compared.slowest, slowest_ratio=compared.ratio)
        if evaluates and not stop:
            with watch.phase("evaluation", done="evaluated"):
                eval_loss = trainee.evaluate(data.validation.take, _spread(data.validation.count, train.eval_sequences))
            note(step, eval_loss=eval_loss)
            display.say(f"step {step}: validation loss {eval_loss:.4f}")
        if saves_now or stop:
            with watch.phase("saving", done="saved"):
                saver.save(trainee, asdict(trainee.history))
        if stop and not ending:
            break
        report.go_on()
    with watch.phase("saving", done="saved"):
        problem = saver.finish()
        for again in range(train.restarts if trainee.step == train.steps else 0):
            if not problem:
                break
            wait = train.restart_wait * 2**again
            display.say(f"the end of the run is not saved; trying again in {wait:g} s")
            time.sleep(wait)
            saver.save(trainee, asdict(trainee.history))
            problem = saver.finish()
    if trainee.step < train.steps:
        what = (
            f"step {trainee.step} of {train.steps} is not saved: {problem}" if problem else f"saved step {trainee.step}"
        )
        raise Preempted(f"told to stop; {what}")
    if problem:
        raise UserError(f"the end of the run is not saved: {problem}")
    if metrics is not None:
        account = watch.goodput()
        note(trainee.step, **account.record())
        display.say(account.sentence())
    slow = watch.stragglers.summary()
    if slow:
        display.say(slow)
    display.say(f"trained {trainee.tokens:,} tokens in {clock(time.perf_counter() - began)}; everything is in {out}")


def steps_behind(device: torch.device) -> int:
    """How many steps the host may have begun beyond the one whose loss it reads."""
    return 1 if device.type == "cuda" else 0


class _Report:
    """What steps measured, read once it is there. A GPU's host reads a step only when it has begun the next: it would otherwise
    wait for the last kernel, and the GPU then for the first. Steps are read at once before anything that rests on them."""

    def __init__(
        self,
        trainee: Trainee,
        peak: float,
        flops: float,
        note: Callable[..., None],
        display: PlainDisplay,
        watch: Watch,
    ) -> None:
        self.trainee, self.note, self.display, self.watch = trainee, note, display, watch
        self.peak, self.flops = peak * trainee.run.layout.world, flops
        self.behind = steps_behind(trainee.device)
        self.unread: deque[tuple[StepResult, int]] = deque()
        self.pace = 0.0
        self.last = time.perf_counter()

    def take(self, result: StepResult) -> None:
        """A step that was begun."""
        self.unread.append((result, self.trainee.tokens))

    def go_on(self) -> None:
        """What came since the last step, an evaluation or a checkpoint, is not part of the next."""
        if not self.unread:
            self.last = time.perf_counter()

    def read(self, all_of_them: bool) -> bool:
        """Read the steps that are due; gives whether a rank was told to stop."""
        stop = False
        while len(self.unread) > (0 if all_of_them else self.behind):
            stop = self._read(*self.unread.popleft()) or stop
        return stop

    def _read(self, result: StepResult, tokens: int) -> bool:
        run = self.trainee.run
        loss, grad_norm, stop = result.read()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        skipped = self.watch.judge(loss, grad_norm, result, self.display.say)
        self.note(
            result.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=result.learning_rate,
            tokens=tokens,
            tokens_per_s=run.batch_tokens / seconds,
            seconds=seconds,
            **({"skipped": True} if skipped else {}),
        )
        # The first steps are slow; a moving mean forgets them soon.
        self.pace = seconds if result.step <= 2 or not self.pace else 0.95 * self.pace + 0.05 * seconds
        self.display.show(
            Progress(
                step=result.step,
                steps=run.train.steps,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=result.learning_rate,
                tokens_per_s=run.batch_tokens / self.pace,
                utilization=self.flops / self.pace / self.peak,
                memory=peak_memory(self.trainee.device),
                seconds_left=self.pace * (run.train.steps - result.step),
            )
        )
        return stop


def batches(samples: Samples, trainee: Trainee, last: int) -> Iterator[Batch]:
    """This rank's batches of the steps still to come, each read in the background while the one before is computed."""
    size = trainee.run.train.global_batch

    def read(step: int) -> Batch:
        number = trainee.history.batch_of(step)
        return samples.take(trainee.samples(np.arange((number - 1) * size, number * size)))

    first = trainee.step + 1
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(read, first)
        for step in range(first, last + 1):
            batch = coming.result()
            if step < last:
                coming = reader.submit(read, step + 1)
            yield batch


def _spread(count: int, wanted: int) -> np.ndarray:
    """The same samples each time, spread evenly, so that a few speak for the whole set."""
    wanted = min(wanted, count)
    return np.arange(wanted) * count // wanted


def _introduce(trainee: Trainee, data: Data, display: PlainDisplay, resumed: bool) -> None:
    run, count = trainee.run, parameters(trainee.run.model)
    active = f" ({count.active:,} active)" if count.active != count.total else ""
    display.say(
        f"{run.name}: {count.total:,} parameters{active}, {run.train.dtype} on {_ranks(run, trainee)}, "
        f"{run.train.global_batch} x {run.train.seq_len} tokens a step"
        + (f" in {run.accumulation} microbatches" if run.accumulation > 1 else "")
    )
    display.say(f"data: {data.train.count:,} sequences an epoch, {data.validation.count:,} for validation")
    if resumed:
        display.say(f"going on from step {trainee.step}")


def _ranks(run: Run, trainee: Trainee) -> str:
    sizes = [f"{axis} {getattr(run.layout, axis)}" for axis in AXES if getattr(run.layout, axis) > 1]
    return f"{run.layout.world} x {trainee.device.type} ({', '.join(sizes)})" if sizes else str(trainee.device)
