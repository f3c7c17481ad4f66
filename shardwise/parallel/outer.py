"""Replicas that rarely communicate: each trains alone for H = `layout.sync_every` steps, then they exchange how far they came.

Let x be the weights of the last exchange, the same everywhere, and x_i a replica's own: the outer gradient is the mean of x - x_i
over the replicas. Local SGD applies it directly; DiLoCo (Douillard et al. 2023) passes it to SGD with Nesterov's momentum. Then
every replica continues from the new x, with its own inner optimizer state. Streaming DiLoCo (Douillard et al. 2025) exchanges
fragments of the network at different steps, and keeps training for some steps while an exchange is in flight: the result is mixed
with the weights that the replica has by then. For the first `layout.compress_warmup` steps replicas sum their gradients and train
as one, as DiLoCo starts from a network that was pretrained that way. After the last step of a run everything is exchanged at once,
so that all replicas end with the same weights.

Traffic per rank: the gradients' bytes once in H steps, 2(r-1)/r of a rank's parameters in float32, or in 8 or 4 bits with
`layout.compress`, in one message per fragment (two in fewer bits). Memory: x, and the momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.compress.exchange import gradient_of
from shardwise.parallel.compress.quantized import PendingReduction, Quantized
from shardwise.parallel.gradients import all_reduce_together
from shardwise.parallel.local_parameter import LocalParameter, local
from shardwise.run import LayoutConfig
from shardwise.run.compression import fragment_of, is_due


@dataclass
class Sent:
    """The outer gradients of a fragment in flight."""

    due: int | None
    """The step after which they are needed; unknown for those restored from a checkpoint."""
    gradients: list[Tensor]
    """This replica's own, replaced by the sums when they have arrived."""
    replicas: int
    """Number of replicas in the sums."""
    flat: Tensor | None = None
    work: dist.Work | None = None
    quantized: PendingReduction | None = None


class Outer:
    """The outer optimizer of this rank's parameters."""

    def __init__(
        self, parameters: Sequence[LocalParameter], layout: LayoutConfig, group: dist.ProcessGroup | None
    ) -> None:
        self.layout, self.group = layout, group
        self.parameters = [h for h in parameters if not h.entry.frozen]
        learned = [(n, h) for n, h in enumerate(parameters) if not h.entry.frozen]
        self.shards = {n: local(h.parameter.detach()) for n, h in learned}
        self.shards = {n: shard for n, shard in self.shards.items() if shard.numel()}
        self.anchors: dict[int, Tensor] = {}
        self.momenta: dict[int, Tensor] = {}
        self.fragments: list[list[int]] = [[] for _ in range(self.layout.sync_fragments)]
        for n in self.shards:
            self.fragments[fragment_of(parameters[n].name, self.layout.sync_fragments)].append(n)
        self.underway: dict[int, Sent] = {}
        self.asked: Tensor | None = None  # whether a rank of this replica was asked to stop since the last exchange
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Take the current parameters as those of an exchange."""
        self.anchors = {n: shard.clone() for n, shard in self.shards.items()}
        if self.layout.outer_optimizer == "nesterov" and self.layout.outer_momentum:
            self.momenta = {n: torch.zeros_like(shard) for n, shard in self.shards.items()}

    def is_plain(self, step: int) -> bool:
        """Whether replicas still sum their gradients in a step, counted from 1, and train as one."""
        return step <= self.layout.compress_warmup

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the gradients of such a step over the replicas."""
        gradients = [gradient_of(h) for h in self.parameters]
        all_reduce_together([g for g in gradients if g.numel()], self.group)

    def state_of(self, index: int) -> dict[str, Tensor]:
        """The outer state of a parameter, the same on all replicas."""
        kept = (("anchor", self.anchors), ("momentum", self.momenta))
        return {name: tensors[index] for name, tensors in kept if index in tensors}

    def speaks(self, step: int) -> bool:
        """Whether something is sent after a step, counted from 1."""
        lay = self.layout
        if self.is_plain(step):
            return True
        return any(is_due(step, f, lay.sync_fragments, lay.sync_every) for f in range(lay.sync_fragments))

    def sync(self, step: int, last: bool, stop: Tensor) -> Tensor:
        """Exchange the fragments due after a step, and whether this replica's ranks were asked to stop. Returns whether any rank
        of any replica was asked to stop; replicas learn it at an exchange."""
        self.asked = stop if self.asked is None else self.asked + stop
        self.step(step, last)
        if not (last or self.speaks(step)):
            return torch.zeros_like(stop)
        asked, self.asked = self.asked, None
        dist.all_reduce(asked, group=self.group)
        return asked

    @torch.no_grad()
    def step(self, step: int, last: bool) -> None:
        """Exchange the fragments due after a step, counted from 1; everything if it is the `last`."""
        lay = self.layout
        if self.is_plain(step):
            if step == lay.compress_warmup:
                self.restart()
            return
        for f in range(lay.sync_fragments):
            if last and f in self.underway:
                self._apply(f, last)
            if last or is_due(step, f, lay.sync_fragments, lay.sync_every):
                self._send(f, step, last)
            if f in self.underway:
                sent = self.underway[f]
                due = self._due(f, step) if sent.due is None else sent.due
                if sent.quantized is not None and step >= due - lay.sync_overlap // 2:
                    sent.quantized.add()
                if last or step >= due:
                    self._apply(f, last)

    def _due(self, fragment: int, step: int) -> int:
        """The step after which a fragment is needed that was sent before this one."""
        lay = self.layout
        before = range(step - 1, step - 1 - lay.sync_every, -1)
        sent = next(s for s in before if is_due(s, fragment, lay.sync_fragments, lay.sync_every))
        return sent + lay.sync_overlap

    @torch.no_grad()
    def settle(self) -> dict[int, Tensor]:
        """Wait for the exchanges in flight, so that a checkpoint can hold them: sums over replicas by parameter index."""
        every = ((f, self._arrived(sent), sent.replicas) for f, sent in self.underway.items())
        return {
            n: total if replicas == self.layout.replicate else total * (self.layout.replicate / replicas)
            for f, sums, replicas in every
            for n, total in zip(self.fragments[f], sums, strict=True)
        }

    def receive(self, arriving: dict[int, Tensor]) -> None:
        """Restore the exchanges in flight when a checkpoint was made."""
        self.underway = {
            f: Sent(None, [arriving[n] for n in numbers], self.layout.replicate)
            for f, numbers in enumerate(self.fragments)
            if numbers and numbers[0] in arriving
        }

    def _gradients(self, fragment: int) -> list[Tensor]:
        return [self.anchors[n] - self.shards[n] for n in self.fragments[fragment]]

    def _send(self, fragment: int, step: int, last: bool) -> None:
        numbers, lay = self.fragments[fragment], self.layout
        if not numbers or self.group is None:
            return
        sent = Sent(step + lay.sync_overlap, self._gradients(fragment), lay.replicate)
        if lay.compress == "none":
            sent.flat = torch.cat([g.flatten() for g in sent.gradients])
            sent.work = dist.all_reduce(sent.flat, group=self.group, async_op=True)
        else:
            sent.quantized = Quantized(lay.compress, self.group, sent.gradients).start(sent.gradients)
        self.underway[fragment] = sent

    def _arrived(self, sent: Sent) -> list[Tensor]:
        """The sums over replicas."""
        if sent.work is not None and sent.flat is not None:
            sent.work.wait()
            parts = sent.flat.split([g.numel() for g in sent.gradients])
            for gradient, part in zip(sent.gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        if sent.quantized is not None:
            sent.quantized.finish()
        sent.work = sent.flat = sent.quantized = None
        return sent.gradients

    def _apply(self, fragment: int, last: bool) -> None:
        lay, sent = self.layout, self.underway.pop(fragment)
        sums = self._arrived(sent)
        for n, total in zip(self.fragments[fragment], sums, strict=True):
            mean = total.div_(sent.replicas)
            anchor, shard = self.anchors[n], self.shards[n]
            if lay.outer_optimizer == "average":
                anchor.sub_(mean)
            elif n in self.momenta:
                momentum = self.momenta[n].mul_(lay.outer_momentum).add_(mean)
                anchor.sub_(mean.add_(momentum, alpha=lay.outer_momentum), alpha=lay.outer_lr)
            else:
                anchor.sub_(mean, alpha=lay.outer_lr)
            if lay.sync_overlap and not last:
                shard.mul_(lay.sync_mix).add_(anchor, alpha=1 - lay.sync_mix)
            else:
                shard.copy_(anchor)
