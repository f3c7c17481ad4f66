"""Pipeline parallelism: executes the action list of a schedule, the same list that the planner times.

A rank holds one or several stages; parameters shrink by p, activations by what the schedule keeps in flight. Stages exchange the
residual stream of a microbatch, forward, and its gradient, backward: batch x sequence x hidden elements (context and tensor ranks
each send their shard). A rank sends one message per microbatch for each of its stages that is not the last, and one for each that
is not the first; neighbouring stages on one rank send nothing. Where microbatches enter at both ends, every stage is on two ranks,
which sum its gradients (`gradients.py`). Sends never wait; receives are posted in the order of the sends, so nothing depends on
luck or tags. A run without a pipeline is the same executor with one stage.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.model.adapters import TokenKeys
from shardwise.model.layers import Gemm, Linear
from shardwise.model.transformer import Transformer
from shardwise.parallel.activations.handover import Handover, lasting
from shardwise.parallel.activations.saving import saving
from shardwise.parallel.activations.swap import Swap
from shardwise.parallel.fp8_all_gather import Scales
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch, Objective
from shardwise.parallel.observer import Observers
from shardwise.parallel.p2p import irecv, isend
from shardwise.parallel.rendezvous import group_of
from shardwise.parallel.shard import end_forward_passes, prepare_backward, reduce_deferred_gradients, sharded_modules
from shardwise.schedules import PASSES, Action, Message, Schedule, message_of, messages_to
from shardwise.schedules.make import cached_schedule


class DeferredGradient(NamedTuple):
    """A weight gradient to compute later: the matrix's name in the stage, its GEMM, and the tensors saved for it."""

    name: str
    weight: Tensor
    gemm: Gemm
    saved: tuple[Tensor, ...]


class DeferredGradients:
    """Weight gradients deferred during a backward pass for the input, to be computed by a later action."""

    def __init__(self) -> None:
        self.deferred: deque[DeferredGradient] = deque()

    def take(self) -> deque[DeferredGradient]:
        """The gradients deferred since the last call."""
        taken, self.deferred = self.deferred, deque()
        return taken


class _SplitBackward(torch.autograd.Function):
    """A GEMM whose backward pass computes the input's gradient and defers the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gemm: Gemm, store: DeferredGradients, name: str) -> Tensor:
        out, saved = gemm.forward(x, weight)
        ctx.save_for_backward(*saved)
        ctx.weight, ctx.gemm, ctx.store, ctx.matrix = weight, gemm, store, name
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad, saved = ctx.gemm.grad_input(grads[0], ctx.saved_tensors)
        # Detached, since its history would keep the stage's input alive until the weights' gradients are computed.
        ctx.store.deferred.append(DeferredGradient(ctx.matrix, ctx.weight, ctx.gemm, tuple(t.detach() for t in saved)))
        return grad, None, None, None, None


class SplitBackwardGemm(Gemm):
    """Wraps a GEMM with a split backward: the weight's gradient is deferred."""

    def __init__(self, gemm: Gemm, store: DeferredGradients, name: str) -> None:
        self.gemm, self.store, self.name = gemm, store, name

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = _SplitBackward.apply(x, weight, self.gemm.select(x, weight), self.store, self.name)
        return out if bias is None else out + bias.to(x.dtype)


def split_backward(model: nn.Module) -> DeferredGradients:
    """Make the matrices of a stage defer their weight gradients."""
    store = DeferredGradients()
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weight.requires_grad:
            module.gemm = SplitBackwardGemm(module.gemm, store, name)
    return store


class P2PChannel:
    """P2P messages between this rank and the other ranks of its pipeline during one step."""

    def __init__(self, mesh: Mesh, like: Tensor, expected: Mapping[int, Iterable[Message]] | None) -> None:
        """`expected`: the messages of the step, by sender, in the order in which they are sent. Without it, over all steps: then
        messages are asked for in that order."""
        self.ranks = mesh.pipeline_ranks()
        self.me = mesh.index("pipeline")
        self.like = like
        self.mesh = mesh
        self.expected = {sender: deque(them) for sender, them in (expected or {}).items()}
        self.arriving: dict[Message, tuple[Tensor, Any]] = {}
        self.sending: list[tuple[Tensor, Any]] = []

    def send(self, x: Tensor, receiver: int) -> None:
        """Start sending; the tensor is held until it has been sent."""
        x = x.contiguous()
        self.sending.append((x, isend(x, self.ranks[receiver], group_of(self.mesh, self.me, receiver))))

    def let_go(self) -> None:
        """Free the tensors that have been sent."""
        self.sending = [(sent, work) for sent, work in self.sending if not work.is_completed()]

    def post(self, message: Message, sender: int) -> None:
        """Start receiving a message, and those that were sent before it, in the order they were sent."""
        while message not in self.arriving:
            following = self.expected[sender].popleft() if self.expected else message
            buffer = torch.empty_like(self.like)
            work = irecv(buffer, self.ranks[sender], group_of(self.mesh, sender, self.me))
            self.arriving[following] = (buffer, work)

    def receive(self, message: Message, sender: int) -> Tensor:
        """Wait for a message."""
        self.post(message, sender)
        buffer, work = self.arriving.pop(message)
        work.wait()
        return buffer

    def close(self) -> None:
        """Wait until everything has been sent."""
        for _, work in self.sending:
            work.wait()
        self.sending = []


@dataclass
class Stage:
    """A stage on this rank: the module to call, its network, and its state between the passes of a microbatch."""

    module: nn.Module
    model: Transformer
    split: DeferredGradients | None = None
    tokens: TokenKeys | None = None
    copies: tuple[Tensor, ...] = ()
    """Compute copies of its matrices."""
    inputs: dict[int, Tensor] = field(default_factory=dict)
    roots: dict[int, list[Tensor]] = field(default_factory=dict)
    deferred: dict[int, deque[DeferredGradient]] = field(default_factory=dict)

    @cached_property
    def sharded(self) -> list[FSDPModule]:
        """The modules that `fully_shard` handles, found once: it takes longer than a layer's launches."""
        return list(sharded_modules(self.model)) if isinstance(self.model, FSDPModule) else []


class Pipeline:
    """Runs this rank's part of a schedule."""

    replaces_saved = False
    """Whether layers let some saved tensors be replaced."""
    swap: Swap | None = None
    """Holds the saved tensors that leave the device."""
    routed = False
    """Whether the saved tensors depend on how tokens are routed."""

    def __init__(
        self,
        stages: dict[int, Stage],
        schedule: Schedule,
        mesh: Mesh,
        zero: int,
        scales: Scales,
        observers: Observers,
        planned: Callable[[int], int] = lambda stage: 0,
    ) -> None:
        """`planned` returns the bytes that a stage hands to its partner per microbatch, for fake tensors, which have no data."""
        self.stages = stages
        self.observers = observers
        self.scales = scales
        self.mesh = mesh
        self._set_schedule(schedule)
        self.sync_every, self.shards_parameters = zero > 1, mesh.layout.gathers_each_pass
        self.waiting: tuple[Message, int] | None = None  # the message this rank waits for, and the rank that sends it
        self.planned = planned
        self.handed_sizes: dict[Any, int] = {}  # of microbatches handed to a partner, as measured
        self.handover: Handover | None = None
        self.executed: list[Action] = []
        self.times: list[tuple[float, float]] = []  # when the host began and ended each action

    def _set_schedule(self, schedule: Schedule) -> None:
        self.schedule = schedule
        forward = tuple(tuple(action for action in actions if action.kind == "F") for actions in schedule.ranks)
        self.forward_only = replace(schedule, ranks=forward)
        self.expected = tuple(messages_to(self.mesh.index("pipeline"), each) for each in (schedule, self.forward_only))

    def run(
        self, microbatches: list[Microbatch], like: Tensor, objective: Objective, factor: Tensor | float | None
    ) -> Tensor:
        """Run all microbatches through the schedule; returns the summed loss of the last stage (zero elsewhere).

        `like` has the shape and dtype of the residual stream of a microbatch. Backward passes are those of the objective's loss
        times `factor`; None runs only the forward passes.
        """
        self.loss = torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self.microbatches, self.objective, self.factor = microbatches, objective, factor
        if len(microbatches) != self.schedule.microbatches:
            ranks, stages = len(self.schedule.ranks), self.schedule.stages
            self._set_schedule(cached_schedule(self.schedule.name, ranks, len(microbatches), stages // ranks))
        self.scales.update()
        schedule = self.schedule if factor is not None else self.forward_only
        self.channel = P2PChannel(self.mesh, like, self.expected[factor is None])
        self.local: dict[Message, Tensor] = {}
        hands = schedule.partners and factor is not None
        known = self.handed_sizes, self.planned, like.device, self.routed
        self.handover = Handover(schedule, self.mesh, *known) if hands else None
        self.executed, self.times = [], []
        actions = schedule.ranks[self.mesh.index("pipeline")]
        remaining = Counter((a.stage, a.kind) for a in actions)
        for number, action in enumerate(actions):
            start = time.perf_counter()
            remaining[action.stage, action.kind] -= 1
            with self.observers.action(action):
                self.channel.let_go()
                if self.handover is not None:
                    self.handover.let_go()
                # The message of the next action travels while this one computes; on a CPU messages travel in any case.
                ahead = actions[number : number + 2] if like.is_cuda else ()
                for needed in filter(None, map(self._needs, ahead)):
                    self.channel.post(needed, self.schedule.placement[needed.stage])
                self._execute(action, last=not remaining[action.stage, action.kind])
            self.executed.append(action)
            self.times.append((start, time.perf_counter()))
        self.channel.close()
        if self.handover is not None:
            self.handover.finish_evictions()
        for stage in self.stages.values() if factor is None else ():
            end_forward_passes(stage.model, self.mesh)
        if factor is not None:
            for stage in self.stages.values():
                if stage.split is not None:
                    with self.observers.phase("gradients"):
                        reduce_deferred_gradients(stage.model)
        return self.loss

    def input_of(self, action: Action) -> Tensor:
        """The input of the forward pass that was just done."""
        return self.stages[action.stage].inputs[action.microbatch]

    def batches(self) -> Iterable[Microbatch]:
        """The microbatches of the step."""
        return self.microbatches

    def _needs(self, action: Action) -> Message | None:
        """The message from another rank that an action needs before it begins."""
        begins = self.schedule.is_first if action.kind == "F" else self.schedule.is_last
        if action.kind not in PASSES or begins(action.stage):
            return None
        kind, sender = ("activation", action.stage - 1) if action.kind == "F" else ("gradient", action.stage + 1)
        home = self.schedule.placement
        return Message(kind, sender, action.microbatch) if home[sender] != home[action.stage] else None  # type: ignore[arg-type]

    def _execute(self, action: Action, last: bool) -> None:
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            self._weight_gradients(self.stages[action.stage].deferred.pop(action.microbatch))
        elif action.kind in ("E", "L"):
            self._hand(action)
        else:
            self._backward(action, last)

    def _hand(self, action: Action) -> None:
        """This rank's side of a transfer of saved activations between partners."""
        assert self.handover is not None
        key, batch = (action.stage, action.microbatch), self.microbatches[action.microbatch]
        stage = self.stages.get(action.stage)
        if stage is None and action.kind == "E":
            self.handover.accept(key, batch)
        elif stage is None:
            self.handover.give_back(key)
        elif action.kind == "L":
            self.handover.load(key)
        else:
            received = [] if self.schedule.is_first(action.stage) else [stage.inputs[action.microbatch]]
            stays = (*lasting(stage.model, stage.copies), *batch.values())
            self.handover.evict(key, batch, stays, (*received, stage.roots[action.microbatch][0]))

    def _forward(self, action: Action) -> None:
        stage, batch = self.stages[action.stage], self.microbatches[action.microbatch]
        first, last = self.schedule.is_first(action.stage), self.schedule.is_last(action.stage)
        x = batch["tokens"] if first else self._get(Message("activation", action.stage - 1, action.microbatch))
        training = self.factor is not None
        if training and not first:
            x.requires_grad_()
        finish = partial(self.objective.loss, batch, stage.model.loss) if last else None
        self._draw_for(stage, batch)
        if self.handover is not None:
            self.handover.finish_evictions()
        with self._gradients_wait(stage, action) if training else torch.no_grad(), self._saving(action, training):
            result, auxiliary = stage.module(
                x, positions=batch["positions"], documents=batch.get("documents"), finish=finish
            )
        if last:
            self.loss += result.detach()
        else:
            self._put(action, result.detach())
        if self.factor is not None:
            roots = [result * self.factor if last else result]
            if auxiliary is not None and auxiliary.requires_grad:
                weights = self.objective.auxiliary_weights.to(auxiliary.dtype) * self.factor
                roots.append((auxiliary * weights).sum())
            stage.inputs[action.microbatch], stage.roots[action.microbatch] = x, roots

    def _backward(self, action: Action, last: bool) -> None:
        stage = self.stages[action.stage]
        ends = self.schedule.is_last(action.stage)
        grad = None if ends else self._get(Message("gradient", action.stage + 1, action.microbatch))
        roots = stage.roots.pop(action.microbatch)
        if self.handover is not None:
            self.handover.finish_load((action.stage, action.microbatch))
        whole = stage.split is None
        prepare_backward(stage.sharded, whole and (self.sync_every or last), whole and last, self.shards_parameters)
        self._draw_for(stage, self.microbatches[action.microbatch])  # recompute draws the same dropout
        with self._gradients_wait(stage, action):
            torch.autograd.backward(roots, [grad, *[None] * (len(roots) - 1)])
        x = stage.inputs.pop(action.microbatch)
        if stage.split is not None:
            taken = stage.split.take()
            if action.kind == "I":
                stage.deferred[action.microbatch] = taken
            else:
                self._weight_gradients(taken)
        if x.grad is not None:
            self._put(action, x.grad)

    def _draw_for(self, stage: Stage, batch: Microbatch) -> None:
        """Set the token keys of a microbatch, by which dropout is drawn."""
        if stage.tokens is not None:
            stage.tokens.keys = batch["dropout"]

    def _weight_gradients(self, deferred: deque[DeferredGradient]) -> None:
        """Compute the weight gradients that a backward pass deferred, and let go of what each was computed from."""
        with self.observers.weight_gradients():
            while deferred:
                with self.observers.weight_gradient((each := deferred.popleft()).name):
                    torch.autograd.backward(each.weight, each.gemm.grad_weight(each.saved, each.weight.dtype))

    def _gradients_wait(self, stage: Stage, action: Action) -> Any:
        """Replicas sum their gradients only after the last microbatch."""
        if isinstance(stage.module, DistributedDataParallel) and action.microbatch < self.schedule.microbatches - 1:
            return stage.module.no_sync()
        return contextlib.nullcontext()

    def _saving(self, action: Action, training: bool) -> Any:
        """Tensor ranks save only their shards of sequences, some tensors are rematerialized, and a microbatch that will be evicted
        saves its tensors so that they can be."""
        if self.handover is not None and self.handover.will_evict(action):
            return saving(self.handover.keeper(action))
        replaces = self.mesh.size("tensor") > 1 or self.replaces_saved
        if self.swap is not None:
            self.swap.begin()
        return saving() if training and replaces else contextlib.nullcontext()

    def _put(self, action: Action, x: Tensor) -> None:
        sent = message_of(action, self.schedule.placement)
        if sent is not None:
            self.channel.send(x, sent[0])
            return
        kind, ends = (
            ("activation", self.schedule.is_last) if action.kind == "F" else ("gradient", self.schedule.is_first)
        )
        if not ends(action.stage):
            self.local[Message(kind, action.stage, action.microbatch)] = x  # type: ignore[arg-type]

    def _get(self, message: Message) -> Tensor:
        if message in self.local:
            return self.local.pop(message)
        sender = self.schedule.placement[message.stage]
        self.waiting = (message, self.channel.ranks[sender])
        arrived = self.channel.receive(message, sender)
        self.waiting = None
        return arrived
