"""A reference, whose log-probabilities an objective compares with those of the trained network: what a network with adapters is
without them, or a frozen second network on the same ranks. A teacher is such a network of its own sizes.

That one is laid out as the trained one, sharded as ZeRO-3 shards, in the dtype of the arithmetic: its memory is that of the
parameters in that dtype over the ranks that shard. Either way a step has one more forward pass, before its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.format import Progress, unwatched
from shardwise.checkpoint.resume import read_model
from shardwise.checkpoint.weights import open_weights
from shardwise.model.adapters import adapters_off
from shardwise.model.logprobs import LogProbHead
from shardwise.model.transformer import Transformer
from shardwise.parallel.apply import Parallel, apply
from shardwise.parallel.local_parameter import LocalParameter
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch, Objective
from shardwise.run import Run
from shardwise.run.sections.objective import FACTS, targets_of


class CollectLogProbs(Objective):
    """Puts the log-probabilities of the targets into each microbatch, under a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        def keep(logprobs: Tensor) -> Tensor:
            microbatch[self.name] = logprobs
            return logprobs.new_zeros(())

        return head(hidden, unembedding, microbatch["targets"], make=keep)


class CollectLikeliest(Objective):
    """Puts the tokens that a teacher finds likeliest into each microbatch, with their log-probabilities."""

    def __init__(self, run: Run) -> None:
        self.count = targets_of(run.objective, run.model.vocab) - 1
        self.temperature = run.objective.temperature

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        assert isinstance(head, LogProbHead)
        hidden = hidden / self.temperature if self.temperature != 1 else hidden
        microbatch["teacher_tokens"], said = head.top(hidden, unembedding, self.count)
        microbatch["teacher_logprobs"] = said
        return said.new_zeros(())


class AdaptersOff:
    """The trained network without its adapters, which holds nothing more."""

    models: tuple[Transformer, ...] = ()
    parameters: tuple[LocalParameter, ...] = ()

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def read(self, log: Callable[[str], None], progress: Progress = unwatched) -> None:
        """There is nothing to read."""

    def add_logprobs(self, microbatches: list[Microbatch], stream: Tensor) -> None:
        """As a frozen network's."""
        with contextlib.ExitStack() as open_now:
            for model in self.parallel.models:
                open_now.enter_context(adapters_off(model))
            collect(self.parallel, microbatches, stream, "reference")


def collect(parallel: Parallel, microbatches: list[Microbatch], stream: Tensor, name: str) -> None:
    """Pass microbatches forward through a network in training, which learns nothing of it, and keep the log-probabilities."""
    training = [model.training for model in parallel.models]
    for model in parallel.models:
        model.eval()  # routers count what they learn from
    parallel.pipeline.run(microbatches, stream, CollectLogProbs(name), None)
    for model, before in zip(parallel.models, training, strict=True):
        model.train(before)


class Reference:
    """The frozen network. Its weights are those that training begins with, until others are read."""

    def __init__(self, run: Run, mesh: Mesh, device: torch.device) -> None:
        self.run, self.mesh, self.device = run, mesh, device
        self.parallel = apply(run, mesh, device, frozen=True)
        self.models, self.parameters = tuple(self.parallel.models), tuple(self.parallel.parameters)
        teaches = FACTS[run.objective.kind].teacher
        self.called = "teacher" if teaches else "reference"
        self.collects = CollectLikeliest(run) if teaches else CollectLogProbs("reference")
        for model in self.models:
            model.eval()

    @property
    def source(self) -> Path | None:
        """The folder that its weights are from."""
        named = _named(self.run)
        return checkpoint_folder(named) if named else None

    def read(self, log: Callable[[str], None], progress: Progress = unwatched) -> None:
        """Read its weights. A resumed run does so too: they are not in its checkpoints."""
        if self.source is not None:
            read_model(self, open_weights(self.source, self.run.model, progress))
            log(f"the {self.called} has the weights of {self.source}")

    def add_logprobs(self, microbatches: list[Microbatch], stream: Tensor) -> None:
        """Put the log-probabilities of the targets into each microbatch, or a teacher's likeliest tokens, on the ranks of the last
        stage."""
        stream = (
            stream if stream.shape[-1] == self.run.model.hidden else stream[..., :1].repeat(1, 1, self.run.model.hidden)
        )
        self.parallel.pipeline.run(microbatches, stream, self.collects, None)


def _named(run: Run) -> str:
    """The folder of a frozen network, as the run names it; of a reference, what training begins with where it names none."""
    if FACTS[run.objective.kind].teacher:
        return run.objective.teacher
    return run.objective.reference or run.train.weights
