"""The training loop: batch, forward, backward, step, record, evaluate, save; until the last step.

The samples of a step depend only on its number (and on the batches that were excluded as bad), so a resumed run sees the samples
that an uninterrupted run would have seen. The fault monitor (`faults/monitor.py`) handles faults.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.format import RUN_FILE
from shardwise.checkpoint.job import hold_folder
from shardwise.checkpoint.resume import load_weights, resume
from shardwise.checkpoint.saver import Saver
from shardwise.files import write_atomically
from shardwise.model.device import choose_device
from shardwise.parallel.mesh import Mesh
from shardwise.plan.cost.flops import CONVENTION, parameters, training_flops
from shardwise.report.words import clock
from shardwise.run import AXES, Problem, Run, UserError, to_toml
from shardwise.train import cuda_graph, tune_gemms
from shardwise.train.batches.source import Source, TokenSource
from shardwise.train.elastic import Elastic, SharedMetrics
from shardwise.train.faults.guard import History
from shardwise.train.faults.monitor import FaultMonitor, RollBack
from shardwise.train.faults.stop import Preempted
from shardwise.train.processes.check import OpenSource
from shardwise.train.progress.display import PlainDisplay, Progress, make_display
from shardwise.train.progress.metrics import Metrics
from shardwise.train.progress.result import StepResult
from shardwise.train.progress.speed import peak_flops, peak_memory
from shardwise.train.step import TrainState


def train(run: Run, out: Path, has_agent: bool = False, open_source: OpenSource = TokenSource) -> None:
    """Train the run into the folder `out`, resuming from its newest checkpoint if there is one. Every rank calls this. `has_agent`:
    the process that started this rank records failures. Raises `Preempted` when asked to stop, after saving."""
    source = open_source(run)
    elastic = Elastic.here(run)
    mesh = Mesh((run if elastic is None else elastic.run).layout, choose_device(run.train.device).type)
    with (
        make_display(quiet=mesh.rank > 0) as display,
        hold_folder(run, out, mesh, display.log) if elastic is None else nullcontext(),
        FaultMonitor(run, out, mesh.rank if elastic is None else elastic.rank, has_agent) as monitor,
    ):
        if elastic is not None:
            monitor.records = lambda: elastic.first
            elastic.members.note = lambda: monitor.note_bytes(1)
        excluded: list[int] = []
        while True:
            try:
                _attempt(run, out, source, mesh, elastic, monitor, display, excluded)
                return
            except RollBack as bad:
                monitor.detach()
                source.detach()
                excluded.append(bad.batch)
                display.log(f"{bad}; going back to the last checkpoint, and on without batch {bad.batch}")
            gc.collect()  # a train state and its CUDA graph refer to each other, and the next one needs their memory


def _attempt(
    run: Run,
    out: Path,
    source: Source,
    mesh: Mesh,
    elastic: Elastic | None,
    monitor: FaultMonitor,
    display: PlainDisplay,
    excluded: list[int],
) -> None:
    """Train from the newest checkpoint to the last step, without the batches that earlier attempts found bad."""
    train_state = TrainState(run, mesh, elastic)
    joins = elastic is not None and elastic.begin(train_state)
    begun = joins or _restore(train_state, out, source, monitor, display)
    train_state.history.excluded = sorted({*train_state.history.excluded, *excluded})
    if train_state.reference is not None:
        train_state.reference.read(display.log, monitor.note_bytes)
    _introduce(train_state, source, display, begun)
    if train_state.step >= run.train.steps:
        display.log(f"{out} is trained to step {train_state.step} already; raise train.steps to go on")
        return
    metrics: Metrics | SharedMetrics | None = None
    if mesh.rank == 0:
        if monitor.records() and not joins:
            _write_run(run, out, begun=begun, log=display.log)
        if elastic is None:
            metrics = Metrics(out, run, display.log, resumed_step=train_state.step)
        else:
            metrics = SharedMetrics(elastic, out, display.log, None if joins else train_state.step)
        monitor.event("repeat", **metrics.repeats)
    saver = Saver(out, mesh, source.tokenizer, source.fingerprint, display.log, monitor.note_bytes)
    source.attach(train_state, display.log, monitor.note_bytes)
    monitor.attach(train_state)
    tune_gemms.attach(train_state, display.log)
    cuda_graph.attach(train_state, display.log)
    began, step_before, tokens_before = time.perf_counter(), train_state.step, train_state.tokens
    loop = _Loop(train_state, source, metrics, saver, display, monitor)
    try:
        loop.steps()
        loop.write_end()
    except RollBack:
        saver.finish()
        raise
    except BaseException:
        saver.abandon()
        raise
    finally:
        if metrics is not None:
            metrics.close()
    took = clock(time.perf_counter() - began)
    since = f" since step {step_before}, {train_state.tokens:,} in all" if step_before else ""
    display.log(f"trained {train_state.tokens - tokens_before:,} tokens in {took}{since}; everything is in {out}")


def _restore(train_state: TrainState, out: Path, source: Source, monitor: FaultMonitor, display: PlainDisplay) -> bool:
    """Load the newest checkpoint, or the weights that the run starts from; returns whether there was a checkpoint."""
    resumed = resume(train_state, out, source.fingerprint, display.log, monitor.note_bytes)
    if resumed is None:
        load_weights(train_state, source.tokenizer, display.log, monitor.note_bytes)
        if train_state.outer is not None:
            train_state.outer.restart()
    else:
        train_state.history = History(**resumed.more)
    return resumed is not None


def _write_run(run: Run, out: Path, begun: bool, log: Callable[[str], None]) -> None:
    """Write the resolved run into its folder. If that fails, a resumed run continues without it, because the disk may have room
    again by the next save. A new folder that cannot be written is an error."""
    file = out / RUN_FILE
    try:
        write_atomically(file, to_toml(run).encode())
    except OSError as e:
        problem = f"cannot be written: {e.strerror}"
        if not begun and not file.exists():
            raise UserError(Problem(problem, where=str(file))) from None
        log(f"warning: {file} {problem}; training goes on, and the file stays as it was")


@dataclass
class _Loop:
    """A train state on its way to the last step, with what reads, writes and watches it."""

    train_state: TrainState
    source: Source
    metrics: Metrics | SharedMetrics | None
    saver: Saver
    display: PlainDisplay
    monitor: FaultMonitor

    def steps(self) -> None:
        """Run all steps to the last, or to the one after which a rank was asked to stop."""
        train = self.train_state.run.train
        step_log = _StepLog(self)
        for batch in self.source.batches(train.steps):
            step_log.add(self.monitor.step(batch), self.source.figures())
            step, last = self.train_state.step, self.train_state.step == train.steps
            evaluates = bool(train.eval_every) and (last or step % train.eval_every == 0)
            saves_now = last or (bool(train.checkpoint_every) and step % train.checkpoint_every == 0)
            stop = step_log.read(all_steps=self.monitor.stragglers.due(step) or evaluates or saves_now)
            if stop:
                step_log.read(all_steps=True)
            compared = self.monitor.stragglers.compare(step)
            if compared is not None and self.metrics is not None:
                slowest = dict(slowest=compared.slowest, slowest_ratio=compared.ratio)
                self.metrics.record(step=step, compute_seconds=compared.seconds, **slowest)
            elastic = self.train_state.elastic
            if elastic is not None:
                elastic.after_step(self.train_state, self.metrics)
                if last or stop:  # `write_end` evaluates and saves, on one of the replicas
                    return
            writes = elastic is None or elastic.members.writes
            if evaluates and not stop and writes:
                self.evaluate()
            if (saves_now or stop) and writes:
                self.save()
            if stop and not last:
                return
            step_log.restart_clock()

    def evaluate(self) -> None:
        with self.monitor.phase("evaluation", done="evaluated"):
            records, sentence = self.source.evaluate()
        if self.metrics is not None:
            self.metrics.record(step=self.train_state.step, **records)
        self.display.log(f"step {self.train_state.step}: {sentence}")

    def save(self) -> None:
        with self.monitor.phase("saving", done="saved"):
            self.source.before_saving()
            self.saver.save(self.train_state, asdict(self.train_state.history))

    def write_end(self) -> None:
        """Finish writing after the last step, or after the step at which the run was asked to stop. Of elastic replicas only one
        evaluates and saves, and the others wait for it."""
        elastic, last = self.train_state.elastic, self.train_state.step == self.train_state.run.train.steps
        if elastic is not None:
            if not elastic.members.finish():
                if not last:
                    raise Preempted("stop requested; another replica has saved")
                return
            if last and self.train_state.run.train.eval_every:
                self.evaluate()
            self.save()
        try:
            self.finish()
        finally:
            if elastic is not None:
                elastic.members.finished()

    def finish(self) -> None:
        """Wait for the last checkpoint to be written, and retry it if it is the run's final one; then report on the whole run."""
        train, step = self.train_state.run.train, self.train_state.step
        with self.monitor.phase("saving", done="saved"):
            problem = self.saver.finish()
            for retry in range(train.restarts if step == train.steps else 0):
                if not problem:
                    break
                wait = train.restart_wait * 2**retry
                self.display.log(f"the last checkpoint is not saved; retrying in {wait:g} s")
                time.sleep(wait)
                self.saver.save(self.train_state, asdict(self.train_state.history))
                problem = self.saver.finish()
        if step < train.steps:
            saved = f"step {step} of {train.steps} is not saved: {problem}" if problem else f"saved step {step}"
            raise Preempted(f"stop requested; {saved}")
        if problem:
            raise UserError(f"the last checkpoint is not saved: {problem}")
        if self.metrics is not None:
            goodput = self.monitor.goodput()
            self.metrics.record(step=step, **goodput.record())
            self.display.log(goodput.sentence())
        slow = self.monitor.stragglers.summary()
        if slow:
            self.display.log(slow)


def steps_behind(device: torch.device) -> int:
    """How many steps the host may have launched beyond the one whose loss it reads."""
    return 1 if device.type == "cuda" else 0


class _StepLog:
    """Reads, checks, records and shows the results of steps. On a GPU the host reads a step's result only after it has launched the
    next step: otherwise the GPU would idle until that launch. All results are read before anything that depends on them."""

    def __init__(self, loop: _Loop) -> None:
        self.train_state, self.metrics = loop.train_state, loop.metrics
        self.display, self.monitor = loop.display, loop.monitor
        run = self.train_state.run
        peak, source = peak_flops(self.train_state.device, self.train_state.dtype)
        self.display.log(f"MFU: {CONVENTION}; of {source}")
        self.peak = peak * run.layout.world
        self.flops = training_flops(run.model, run.train.seq_len, run.adapter) * run.batch_tokens
        self.unread: deque[tuple[StepResult, int, dict[str, Any]]] = deque()
        self.pace = 0.0
        self.last = time.perf_counter()

    def add(self, result: StepResult, figures: dict[str, Any]) -> None:
        """Add a launched step and its batch's figures."""
        self.unread.append((result, self.train_state.tokens, figures))

    def restart_clock(self) -> None:
        """Exclude the time of an evaluation or a checkpoint from the next step's time."""
        if not self.unread:
            self.last = time.perf_counter()

    def read(self, all_steps: bool) -> bool:
        """Read the results that are due; returns whether a rank was asked to stop."""
        stop = False
        # Ranks of an asynchronous pipeline are never at the same step.
        behind = 1 if self.train_state.updates is not None else steps_behind(self.train_state.device)
        if self.train_state.run.train.guard == "skip":  # it judges a step by those before it, which must have been read
            behind = 0
        while len(self.unread) > (0 if all_steps else behind):
            stop = self._read(*self.unread.popleft()) or stop
        return stop

    def _read(self, result: StepResult, tokens: int, figures: dict[str, Any]) -> bool:
        run, elastic = self.train_state.run, self.train_state.elastic
        replicas = 1 if elastic is None else elastic.members.count
        loss, grad_norm, stop = result.read()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        memory = peak_memory(self.train_state.device)
        objective = self.train_state.objective
        measured = objective.shown(dict(zip(objective.metrics, result.read_measured(), strict=True)))
        # A batch of answers reports its tokens without padding, and how many rows were computed after packing.
        counted = figures.get("step_tokens", run.batch_tokens) * replicas
        flops = self.flops * figures.get("packed_rows", run.train.global_batch) / run.train.global_batch
        skipped = self.monitor.judge(loss, grad_norm, result, self.display.log)
        if self.metrics is not None:
            self.metrics.record(
                step=result.step,
                loss=loss,
                grad_norm=grad_norm,
                lr=result.learning_rate,
                tokens=tokens,
                tokens_per_s=counted / seconds,
                seconds=seconds,
                mfu=flops / seconds / self.peak,
                memory_gib=round(memory / 2**30, 3),
                **figures,
                **measured,
                **({"skipped": True} if skipped else {}),
            )
        # The first steps are slow; a moving average soon forgets them.
        self.pace = seconds if result.step <= 2 or not self.pace else 0.95 * self.pace + 0.05 * seconds
        self.display.show(
            Progress(
                step=result.step,
                steps=run.train.steps,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=result.learning_rate,
                tokens_per_s=counted / self.pace,
                mfu=flops / self.pace / self.peak,
                memory=memory,
                seconds_left=self.pace * (run.train.steps - result.step),
                reward=figures.get("reward"),
                measured=measured,
            )
        )
        return stop


def _introduce(train_state: TrainState, source: Source, display: PlainDisplay, resumed: bool) -> None:
    run = train_state.job if train_state.elastic is None else train_state.elastic.whole
    count = parameters(run.model)
    active = f" ({count.active:,} active)" if count.active != count.total else ""
    display.log(
        f"{run.name}: {count.total:,} parameters{active}, {run.train.dtype} on {_ranks(run, train_state)}, "
        f"{run.train.global_batch} x {run.train.seq_len} tokens a step"
        + (f" in {run.accumulation} microbatches" if run.accumulation > 1 else "")
    )
    display.log(source.describe())
    if train_state.elastic is not None:
        display.log(
            f"replica {train_state.elastic.place.replica} of {train_state.elastic.layout.replicate}, on its share of that"
        )
    if resumed:
        display.log(f"going on from step {train_state.step}")


def _ranks(run: Run, train_state: TrainState) -> str:
    sizes = [f"{axis} {getattr(run.layout, axis)}" for axis in AXES if getattr(run.layout, axis) > 1]
    return f"{run.layout.world} x {train_state.device.type} ({', '.join(sizes)})" if sizes else str(train_state.device)
