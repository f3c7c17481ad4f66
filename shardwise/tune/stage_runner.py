"""The runner of a rank whose engine is sharded over ranks that each run their own scheduler.

Every rank of a run knows the prompts of a round, and a scheduler is a deterministic function of its inputs. So the ranks of an
engine do not send each other schedules, as those of a server do: each has an engine and makes the same steps. Tensor ranks sample
the same tokens from the same logits. In a pipeline only the last stage samples, and it broadcasts the sampled tokens to the earlier
stages: 16 bytes a token, which those read where they would have read their own.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from shardwise.serve.runner import Launched, Row, Runner, sampled
from shardwise.serve.sampler import Picked


class StageRunner(Runner):
    """A runner that receives the tokens that the last stage sampled."""

    group: dist.ProcessGroup | None = None
    """The process group of the pipeline's ranks, for the sampled tokens."""

    def join(self) -> None:
        """Make the process group with the other stages. Every rank calls it."""
        assert self.peers is not None
        ranks = self.peers.place.pipeline_ranks
        self.stages = len(ranks)
        if self.stages > 1:
            self.group = dist.new_group(sorted(ranks), group_desc="picked", use_local_synchronization=True)

    def launch(self, rows: list[Row], masks: np.ndarray | None = None, keep_logits: bool = False) -> Launched:
        made = super().launch(rows, masks, keep_logits)
        count = len(sampled(rows)[0])
        return _Shared(self, made, count) if self.group is not None and count else made


class _Shared(Launched):
    """A step whose tokens come from the last stage. A CPU broadcasts them as soon as they are sampled; a GPU broadcasts them when
    they are read, to avoid an earlier host sync."""

    def __init__(self, runner: StageRunner, made: Launched, count: int) -> None:
        super().__init__(made.picked, made.slots, made.logits, made.done, made.tokens)
        self._runner, self._made = runner, made
        self._values = torch.empty(2, count, dtype=torch.float64, device=runner.device)  # tokens are exact in float64
        self._work: dist.Work | None = None
        if not runner.gpu:
            self._begin()

    def _begin(self) -> None:
        runner, picked = self._runner, self._made.picked
        assert runner.peers is not None
        if runner.model.last:
            assert picked is not None
            tokens = torch.tensor(self._made.read(), dtype=torch.float64)
            logprobs = torch.zeros_like(tokens) if picked.logprobs is None else picked.logprobs.double()
            self._values.copy_(torch.stack((tokens, logprobs.cpu())))
        last = runner.peers.place.pipeline_ranks[-1]
        self._work = dist.broadcast(self._values, last, group=runner.group, async_op=True)

    def read(self) -> list[int]:
        if self._work is None:
            self._begin()
        assert self._work is not None
        self._work.wait()
        tokens, logprobs = self._values.cpu()
        if not self._runner.model.last:
            nothing = torch.empty(len(tokens), 0)
            self.picked = Picked(tokens.long(), logprobs, (nothing.long(), nothing))
        return [int(token) for token in tokens]
