"""One training step: microbatches forward and backward, gradients clipped, parameters updated, on any layout.

The objective defines the loss: a sum over all tokens of the global batch divided by the objective's count, so one batch of 8 and 8
accumulated batches of 1 give the same gradient. The count is all-reduced while the passes run, and the gradients are rescaled by
it as they are clipped. Loss and gradient norm follow in a second all-reduce. The first all-reduce also carries whether any rank
was asked to stop, so that all ranks end after the same step. With a 16-bit compute dtype, parameters, gradients and optimizer
state are float32. On a GPU there is no host sync here, unless a guard must see the loss first: the host is free to prepare the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.batches import IGNORE_INDEX, Batch
from shardwise.data.order import mix64
from shardwise.model.device import choose_device
from shardwise.model.moe.layer import Router
from shardwise.model.transformer import Transformer
from shardwise.parallel.apply import apply
from shardwise.parallel.asynchronous import AsynchronousPipeline
from shardwise.parallel.compress.exchange import Exchange
from shardwise.parallel.gradients import reduce_partial_gradients
from shardwise.parallel.members import ElasticOuter
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch
from shardwise.parallel.outer import Outer
from shardwise.plan.trainer.rank import reference_run
from shardwise.run import Run
from shardwise.run.derive import forward_passes
from shardwise.run.sections.objective import FACTS, facts_of
from shardwise.train import asynchronous
from shardwise.train.batches.microbatches import cut, on_device, stream_of
from shardwise.train.batches.reference import AdaptersOff, Reference, collect
from shardwise.train.elastic import Elastic
from shardwise.train.faults.guard import History
from shardwise.train.faults.recheck import check_repeatable, passes_twice
from shardwise.train.objectives import OBJECTIVES
from shardwise.train.optimizers.optimizer import Optimizer
from shardwise.train.optimizers.schedule import LossScale
from shardwise.train.progress.result import StepResult

if TYPE_CHECKING:
    from shardwise.train.tune_gemms import Tuner

BESIDE = "beside_"
"""Prefix of a microbatch's tensors that belong to forward-only rows."""


class TrainState:
    """A model being trained: this rank's shards of it, its optimizer, the loss scale, step and tokens, and the history of steps."""

    def __init__(self, run: Run, mesh: Mesh | None = None, elastic: Elastic | None = None) -> None:
        """`elastic`: given on a rank of a replica that may leave and rejoin the run."""
        self.elastic, self.job = elastic, run  # `job` is the run that a checkpoint describes
        if elastic is not None:
            run, self.job = elastic.run, elastic.job
        self.run = run
        self.device = choose_device(run.train.device)
        torch.manual_seed(run.train.seed)
        if self.device.type == "cuda" and run.train.deterministic:
            torch.use_deterministic_algorithms(True)
        self.mesh = mesh or Mesh(run.layout, self.device.type)
        self.dtype: torch.dtype = getattr(torch, run.train.dtype)
        self.loss_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.parallel = apply(run, self.mesh, self.device)
        self.observers = self.parallel.pipeline.observers
        self.optimizer = Optimizer(self.parallel.parameters, self.mesh, run, self.observers)
        if self.optimizer.host is not None:
            self.optimizer.host.watch(self.parallel.models)
        self.exchange: Exchange | None = None  # for replicas that compress their gradients
        self.outer: Outer | None = None  # for replicas that synchronize only every `layout.sync_every` steps
        if elastic is not None:
            self.outer = ElasticOuter(self.parallel.parameters, elastic.layout, elastic.members)
        elif run.layout.replicate > 1 and run.layout.sync_every > 1:
            self.outer = Outer(self.parallel.parameters, run.layout, self.mesh.group("replicate"))
        elif run.layout.replicas_apart and run.layout.replicate > 1:
            self.exchange = Exchange(self.parallel.parameters, self.mesh, run.train)
        self.checks_overflow = self.dtype == torch.float16
        self.loss_scale = LossScale(run.train.loss_scale if self.checks_overflow else 1.0)
        self.routers = [m for model in self.parallel.models for m in model.modules() if isinstance(m, Router)]
        self.objective = OBJECTIVES[run.objective.kind](run, self.device, self.mesh)
        self.reference: Reference | AdaptersOff | None = None
        if facts_of(run.objective).reference:
            self.reference = AdaptersOff(self.parallel)
            if forward_passes(run)[0]:  # through a second network
                self.reference = Reference(reference_run(run), self.mesh, self.device)
        self.as_one = False  # whether replicas with `sync_every` all-reduce gradients in this step (warm-up)
        self.step = 0
        self.tokens = 0
        self.history = History()
        self.kept: dict[str, Tensor] = {}  # further tensors for the checkpoint, the same on every rank
        self.tuner: Tuner | None = None  # chooses GEMM algorithms before a step (see `tune_gemms.py`)
        # Runs forward and backward in place of `passes` (see `cuda_graph.py`).
        self.replay: Callable[[Batch], Tensor] | None = None
        pipeline = self.parallel.pipeline
        self.updates = asynchronous.Updates(self, pipeline) if isinstance(pipeline, AsynchronousPipeline) else None
        check_repeatable(self)

    @property
    def full_count(self) -> float:
        """What the loss of a batch is divided by in which every token counts."""
        return self.objective.full_count

    @property
    def all_models(self) -> list[Transformer]:
        """This rank's stages, and those of the reference model if there is one."""
        return [*self.parallel.models, *(self.reference.models if self.reference is not None else ())]

    @property
    def model(self) -> torch.nn.Module:
        """The network, on a rank that holds one stage of it."""
        return self.parallel.models[0]

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """This rank's share of the samples of a step."""
        indices = indices if self.elastic is None else self.elastic.share(indices)
        return np.split(indices, self.run.layout.data_ranks)[self.mesh.data_index]

    def train_step(
        self,
        batch: Batch,
        stop: bool = False,
        accept: Callable[[float, float], bool] | None = None,
        recheck: bool = False,
    ) -> StepResult:
        """One step over this rank's share of the global batch.

        `stop` asks all ranks to stop after this step. `accept` sees the loss and the gradient norm before anything is updated, and
        must return the same on every rank; without it the host does not wait for them. `recheck` runs the passes twice.
        """
        for model in self.parallel.models:
            if not model.training:
                model.train()
        if self.updates is not None:
            return self.updates.train_step(batch, stop)
        layout, phase = self.run.layout, self.observers.phase
        self.as_one = self.outer is not None and self.outer.is_plain(self.step + 1)
        with phase("gradients"):
            self.optimizer.zero_grad()
        if self.tuner is not None:
            self.tuner()
        # Ranks that share samples divide their count, so that a sum over all ranks counts each sample once.
        share = self.objective.count(batch) * layout.data_ranks / layout.world
        counted = self.start_all_reduce(on_device(torch.tensor([share, float(stop)], dtype=torch.float64), self.device))
        if self.objective.has_auxiliary:
            self.objective.weigh_auxiliary(counted()[0])
        loss = passes_twice(self, batch) if recheck else (self.replay or self.passes)(batch)
        self.step += 1
        counted_tokens = self.run.batch_tokens if batch.step_tokens is None else batch.step_tokens
        self.tokens += counted_tokens * (1 if self.elastic is None else self.elastic.members.count)
        own_square = self._exchange_gradients(counted)
        with phase("clip"):
            square = self.optimizer.squared_norm(self.device) if own_square is None else own_square
        own = torch.cat((loss[None], self.objective.measured)).double() / layout.tensor
        sums = self.start_all_reduce(torch.cat((square[None], own)))
        # DDP replicas have the same gradients and so the same norm: then the all-reduce overlaps with the optimizer.
        square = square * layout.world if layout.uses_ddp else sums()[0]
        if self.as_one:  # each replica has counted the full gradient
            square = square / layout.replicate
        count = counted()[0].clamp(min=1)
        with phase("clip"):
            grad_norm, factor = self._norm_and_factor(square, count, clips=own_square is None)
        usable, rescaled = self._usable(grad_norm)
        # All ranks must decide from the same loss, so this waits for the sum over ranks.
        accepted = not usable or accept is None or accept(*torch.stack((sums()[1] / count, grad_norm)).tolist())
        if usable and accepted:
            with phase("optimizer"):
                self.optimizer.step(self.step, factor)
        asked = self._sync(counted()[1])
        with phase("balance"):
            self._reduce_loads()
            for router in self.routers:
                router.rebalance(self.run.train.balance_rate if accepted and not self.run.adapter.used else 0.0)
        rate = self.optimizer.learning_rate(self.step)
        loss, *measured = (sums()[1:] / count).unbind()
        found = torch.stack(measured) if measured else None
        return StepResult(self.step, loss, grad_norm, rate, asked, usable, rescaled, accepted, found)

    def passes(self, batch: Batch) -> Tensor:
        """All microbatches forward and backward, and the gradients reduced; returns this rank's share of the loss."""
        return self.passes_of(self.microbatches(batch))

    def passes_of(self, microbatches: list[Microbatch]) -> Tensor:
        """The same as `passes`, for a batch that is already on the device in microbatches."""
        self.refresh()
        # DistributedDataParallel averages gradients; everything else sums them.
        replicas = self.mesh.size("replicate") if self.mesh.layout.uses_ddp else 1
        factor = self.loss_scale.scale * replicas / self.objective.divisor
        self.objective.begin()
        microbatches = self._with_reference(microbatches)
        loss = self.parallel.pipeline.run(microbatches, self._stream(), self.objective, factor)
        if self.updates is None:
            with self.observers.phase("gradients"):
                reduce_partial_gradients(self.parallel.parameters, self.mesh)
        return loss

    def drain(self) -> None:
        """Finish the passes that an asynchronous pipeline has in flight."""
        if self.updates is not None:
            self.updates.pipeline.drain()

    @torch.no_grad()
    def evaluate(self, samples: Callable[[np.ndarray], Batch], indices: np.ndarray) -> float:
        """Mean loss over the tokens of the samples with these indices, divided among the data ranks."""
        self.drain()
        self.refresh()
        for model in self.parallel.models:
            model.eval()
        ranks, at_once = self.run.layout.data_ranks, self.run.train.microbatch * self.run.accumulation
        share = indices[self.mesh.data_index :: ranks]
        self.objective.begin()
        loss = torch.zeros((), dtype=self.loss_dtype, device=self.device)
        counted = 0.0

        def batches() -> Iterator[Batch]:
            for start in range(0, -(-len(indices) // ranks), at_once):
                own = share[start : start + at_once]
                # All ranks run full schedules; rows beyond a rank's share are padding without a loss.
                batch = samples(np.concatenate((own, np.full(at_once - len(own), indices[0]))))
                batch.targets[len(own) :] = IGNORE_INDEX
                yield batch

        if FACTS[self.run.objective.kind].forward_only:  # summed over all samples before any loss
            strayed = sum((self._strayed(self.microbatches(batch)) for batch in batches()), start=loss.new_zeros(2))
            self.objective.set_strayed(self._whole_loss(strayed))
        for batch in batches():
            microbatches = self._with_reference(self.microbatches(batch))
            loss += self.parallel.pipeline.run(microbatches, self._stream(), self.objective, None)
            counted += self.objective.count(batch)
        count = self._summed(torch.tensor(counted, dtype=torch.float64, device=self.device), "replicate", "shard")
        return (self._whole_loss(loss) / count.item()).item()

    def _with_reference(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """The microbatches with the reference's log-probabilities added, if there is a reference."""
        if self.reference is None:
            return microbatches
        known = [dict(microbatch) for microbatch in microbatches]
        with self.observers.phase("reference"):
            self.reference.add_logprobs(known, self._stream())
            if FACTS[self.run.objective.kind].forward_only and self.parallel.models[0].training:
                self.objective.set_strayed(self._whole_loss(self._strayed(known)))
        return known

    def _strayed(self, microbatches: list[Microbatch]) -> Tensor:
        """This rank's share of the objective's sums over forward-only rows."""
        assert self.reference is not None
        beside = [
            {key.removeprefix(BESIDE): value for key, value in each.items() if key.startswith(BESIDE)}
            for each in microbatches
        ]
        self.reference.add_logprobs(beside, self._stream())
        collect(self.parallel, beside, self._stream(), "policy")
        total = torch.zeros(2, dtype=self.loss_dtype, device=self.device)
        for each in beside:
            if "policy" in each:  # only on the rank where the forward pass ends
                total += self.objective.strayed(each)
        return total

    def refresh(self) -> None:
        """Bring compute copies of parameters up to date."""
        if self.optimizer.host is not None:
            self.optimizer.host.refresh()
        for each in self.parallel.parameters:
            if each.compute_copy is not None:
                each.compute_copy.refresh()

    def _stream(self) -> Tensor:
        return stream_of(self.run, self.device)

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        """The batch as microbatches on the device, with this context rank's shard of every sequence."""
        with self.observers.phase("data"):
            made = self._cut(batch)
            other = self.objective.beside(batch)
            for mine, more in zip(made, self._cut(other) if other is not None else (), strict=other is not None):
                mine.update({BESIDE + key: value for key, value in more.items()})
        return made

    def _cut(self, batch: Batch) -> list[Microbatch]:
        of_tokens = self.objective.token_arrays(batch)
        if self.run.adapter.dropout:
            of_tokens["dropout"] = self._dropout_keys(*batch.tokens.shape)
        return cut(batch, of_tokens, self.run, self.mesh, self.device)

    def _dropout_keys(self, rows: int, length: int) -> np.ndarray:
        """A random key for each token, from the seed, the step, the sample's index in the global batch and the token's position."""
        replica = 0 if self.elastic is None else self.elastic.place.replica
        first = (replica * self.run.layout.data_ranks + self.mesh.data_index) * rows
        places = np.arange(first * length, (first + rows) * length).reshape(rows, length)
        step = np.random.default_rng((self.run.train.seed, self.step)).integers(-(2**62), 2**62)
        return mix64(mix64(places.astype(np.uint64)) ^ np.int64(step).astype(np.uint64)).view(np.int64)

    def _summed(self, x: Tensor, *axes: str) -> Tensor:
        """A tensor, summed in place over the ranks of these axes."""
        for axis in axes:
            if self.mesh.group(axis) is not None:
                dist.all_reduce(x, group=self.mesh.group(axis))
        return x

    def _whole_loss(self, loss: Tensor) -> Tensor:
        """The loss summed over data and context ranks, on every rank of the pipeline."""
        return self._summed(loss, "replicate", "shard", "context", "pipeline")

    def _reduce_loads(self) -> None:
        """All-reduce the number of tokens routed to each expert of this rank's stages, over the whole batch."""
        if not self.routers:
            return
        replicas = ("replicate",) if self.outer is None else ()
        loads = torch.stack([router.load for router in self.routers])
        self._summed(loads, *replicas, "zero", "tensor", "mirror")
        for router, load in zip(self.routers, loads, strict=True):
            router.load.copy_(load)

    def start_all_reduce(self, share: Tensor) -> Callable[[], Tensor]:
        """Start an all-reduce over all ranks; the returned function waits for the sum."""
        with self.observers.phase("gradients"):
            speaking = "world" if self.as_one else self.mesh.speaking
            alone = self.mesh.size(speaking) == 1
            group = self.mesh.group(speaking)  # None: all ranks
            work = None if alone else dist.all_reduce(share, group=group, async_op=True)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            return share

        return finish

    def _exchange_gradients(self, counted: Callable[[], Tensor]) -> Tensor | None:
        """Sum gradients over replicas that do not use PyTorch's wrappers for it. If the result does not have the gradients' scale,
        returns the squared norm of each replica's own gradients, and nothing is clipped."""
        if self.as_one and self.outer is not None:
            with self.observers.phase("gradients"):
                self.outer.add_up()
        if self.exchange is None:
            return None
        square = None
        if self.exchange.hides_norm(self.step):
            square = self.optimizer.squared_norm(self.device) * self.run.layout.replicate**2
        factor = self.objective.divisor / (counted()[0].clamp(min=1) * self.loss_scale.scale)
        with self.observers.phase("gradients"):
            self.exchange.add_up(self.step, self.optimizer.momentum_of, factor)
        return square

    def _sync(self, stop: Tensor) -> Tensor:
        """Run the exchange that is due between replicas with `sync_every`. Returns whether any rank was asked to stop: such
        replicas learn it only in an exchange."""
        if self.outer is None or self.as_one:
            if self.outer is not None:
                self.outer.step(self.step, last=False)
            return stop
        with self.observers.phase("gradients"):
            return self.outer.sync(self.step, self.step == self.run.train.steps, stop)

    def _norm_and_factor(self, square: Tensor, count: Tensor, clips: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the gradient norm, and the factor on the gradients that divides by the objective's count, removes the loss scale
        and clips the norm."""
        factor = self.objective.divisor / (count * self.loss_scale.scale)
        norm = square.sqrt() * factor
        if self.run.train.clip and clips:
            factor = factor * (self.run.train.clip / (norm + 1e-6)).clamp(max=1.0)
        return norm, factor

    def _usable(self, grad_norm: Tensor) -> tuple[bool, bool]:
        """Whether the gradients are finite, and whether the loss scale was lowered; only float16 waits for the answer."""
        if not self.checks_overflow:
            return True, False
        finite = bool(grad_norm.isfinite())
        return finite, self.loss_scale.update(finite)
