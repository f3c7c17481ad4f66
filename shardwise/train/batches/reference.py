"""The reference model, whose log-probabilities an objective compares with those of the trained network. It is the trained network
with its adapters off, or a frozen second network on the same ranks. A teacher is such a second network with its own sizes.

The frozen network has the trained network's layout, is sharded like ZeRO-3, and is held in the compute dtype: its memory is its
parameters in that dtype divided by the ranks that shard. Either way a step has one more forward pass, before its own.
"""

from __future__ import annotations

from collections.abc import Callable

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
    """Stores the log-probabilities of the targets in each microbatch, under `name`."""

    def __init__(self, name: str, temperature: float = 1.0) -> None:
        self.name, self.temperature = name, temperature

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        hidden = hidden / self.temperature if self.temperature != 1 else hidden

        def keep(logprobs: Tensor) -> Tensor:
            microbatch[self.name] = logprobs
            return logprobs.new_zeros(())

        return head(hidden, unembedding, microbatch["targets"], make=keep)


class CollectLikeliest(Objective):
    """Stores the teacher's top-k tokens and their log-probabilities in each microbatch."""

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
    """The trained network without its adapters as the reference; it needs no further memory."""

    models: tuple[Transformer, ...] = ()
    parameters: tuple[LocalParameter, ...] = ()

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def read(self, log: Callable[[str], None], progress: Progress = unwatched) -> None:
        """There is nothing to read."""

    def add_logprobs(self, microbatches: list[Microbatch], stream: Tensor) -> None:
        """The same as `Reference.add_logprobs`, with the adapters off."""
        with adapters_off(*self.parallel.models):
            collect(self.parallel, microbatches, stream, "reference")


def collect(
    parallel: Parallel, microbatches: list[Microbatch], stream: Tensor, name: str, temperature: float = 1.0
) -> None:
    """Run microbatches forward through the network in training, without gradients, and store the log-probabilities in them."""
    training = [model.training for model in parallel.models]
    for model in parallel.models:
        model.eval()  # in training mode routers would count these tokens for load balancing
    parallel.pipeline.run(microbatches, stream, CollectLogProbs(name, temperature), None)
    for model, before in zip(parallel.models, training, strict=True):
        model.train(before)


class Reference:
    """The frozen network. It has the initial weights of training until `read` loads others."""

    def __init__(self, run: Run, mesh: Mesh, device: torch.device) -> None:
        self.run, self.mesh, self.device = run, mesh, device
        self.parallel = apply(run, mesh, device, frozen=True)
        self.models, self.parameters = tuple(self.parallel.models), tuple(self.parallel.parameters)
        teaches = FACTS[run.objective.kind].teacher
        self.called = "teacher" if teaches else "reference"
        self.collects = CollectLikeliest(run) if teaches else CollectLogProbs("reference")
        for model in self.models:
            model.eval()

    def read(self, log: Callable[[str], None], progress: Progress = unwatched) -> None:
        """Read its weights. A resumed run does so too: they are not in its checkpoints."""
        if named := frozen_weights(self.run):
            source = checkpoint_folder(named)
            read_model(self, open_weights(source, self.run.model, progress))
            log(f"the {self.called} has the weights of {source}")

    def add_logprobs(self, microbatches: list[Microbatch], stream: Tensor) -> None:
        """Store the log-probabilities of the targets, or a teacher's top-k tokens, in each microbatch, on the ranks of the last
        stage."""
        if stream.shape[-1] != self.run.model.hidden:
            stream = stream[..., :1].repeat(1, 1, self.run.model.hidden)
        self.parallel.pipeline.run(microbatches, stream, self.collects, None)


def frozen_weights(run: Run) -> str:
    """The folder of the frozen network, as the run names it; a reference without one uses the initial weights of training."""
    if FACTS[run.objective.kind].teacher:
        return run.objective.teacher
    return run.objective.reference or run.train.weights
