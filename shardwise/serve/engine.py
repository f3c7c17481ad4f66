"""The engine: requests in, tokens out, a step at a time. The scheduler decides what a step computes, the runner computes it, and
this file connects both to the requests.

While a GPU computes one step, the next is scheduled and launched, so the GPU never waits for the host: the sampled tokens of a
step are read after the next step is launched. A sequence that turns out to have ended has then wasted one token of compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shardwise.model.invariant.network import exactly_read
from shardwise.model.quantized.model import keep_weights
from shardwise.model.transformer import Transformer
from shardwise.plan.serving.pool import host_pages
from shardwise.run import LayoutConfig, Run, UserError
from shardwise.run.sections.serve import ServeConfig
from shardwise.schedules.serving import Chunk, PagePool, Scheduler, Sequence, Settings, Step
from shardwise.serve.grammar import masks_along
from shardwise.serve.leader import Leader
from shardwise.serve.prepare import check_served, draft_runner_of, load_draft, memory_of, runner_of
from shardwise.serve.request import Finish, Logprob, Output, Request, Stats
from shardwise.serve.runner import Row, Runner
from shardwise.serve.sampler import read_logprobs, seed_of
from shardwise.serve.speculate.draft import DraftModel
from shardwise.serve.speculate.drafter import DraftCounts, Drafter
from shardwise.serve.speculate.ngram import NgramDrafter
from shardwise.serve.under_way import Answer, LaunchedStep, order_of


class Engine:
    """A model that answers requests. `ahead`: launch a step before the previous one is read."""

    def __init__(
        self,
        runner: Runner | Leader,
        settings: ServeConfig,
        pages: int,
        ahead: bool | None = None,
        seed: int = 0,
        host_pages: int = 0,
        draft: Runner | None = None,
    ) -> None:
        """`draft`: the runner of the draft model, with the same number of pages and slots."""
        config = runner.model.config
        self.runner, self.seed = runner, seed
        self.vocab = config.vocab
        # Pipeline stages work on different sequences, whose last tokens the host must know; so must a drafter.
        alone = runner.stages == 1 and settings.speculate == "none"
        self.ahead = alone and (runner.gpu if ahead is None else ahead)
        self.kept = runner.stages - 1 or int(self.ahead)
        """Launched steps that are left unread."""
        self.host_pages = host_pages
        self.pool = PagePool(pages, settings.page_tokens, host_pages, settings.prefix_cache)
        self.scheduler = Scheduler(
            Settings(
                min(settings.max_sequences, settings.max_step_tokens), settings.max_step_tokens, runner.longest,
                preemption=settings.preemption, window=config.sliding_window, stages=runner.stages,
            ),
            self.pool,
        )  # fmt: skip
        self.max_tokens = self.scheduler.most_tokens
        self.answers: dict[str, list[Answer]] = {}
        self.by_sequence: dict[Sequence, Answer] = {}
        self.unforked: dict[Sequence, Answer] = {}
        self.under_way: deque[LaunchedStep] = deque()
        self.outputs: list[Output] = []
        self.tables: list[list[int]] = [[] for _ in range(runner.sequences)]
        self.steps = self.computed_tokens = self.generated_tokens = 0
        self.constrained = 0
        """Answers that a grammar constrains."""
        self.drafter = drafter_of(settings, draft)
        self.drafts = DraftCounts(settings.draft_tokens if self.drafter else 0)

    def reasons(self, request: Request) -> list[str]:
        """The reasons why a request can never run, one sentence each; empty if it can run."""
        problems = self.scheduler.reasons(len(request.prompt), request.max_tokens)
        if request.prompt and not 0 <= min(request.prompt) <= max(request.prompt) < self.vocab:
            problems.append(f"the prompt has tokens that are not below the vocabulary's {self.vocab}")
        return problems

    def add(self, request: Request) -> None:
        """Take a request; raises `UserError` if it can never run."""
        problems = self.reasons(request)
        if request.id in self.answers:
            problems.append(f'there is a request "{request.id}" already')
        if problems:
            raise UserError(*problems)
        sequence = Sequence(
            (request.id, 0), list(request.prompt), request.max_tokens, request.priority, request.user,
            lookahead=self.ahead and not request.grammars, reads_cache=request.sampling.prompt_logprobs is None,
        )  # fmt: skip
        answer = Answer(request, 0, sequence)
        self.answers[request.id] = [answer]
        self.by_sequence[sequence] = answer
        self.constrained += bool(request.grammars)
        if request.n > 1:
            self.unforked[sequence] = answer
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Abort a request; its pages are free at once."""
        self._end(self.answers.get(request_id, ()), "abort")

    def finish(self, request_id: str, index: int) -> None:
        """End an answer whose reader has seen enough, unless it has already ended. The first of several answers runs on until the
        others are forked from its prompt."""
        for answer in [a for a in self.answers.get(request_id, ()) if a.index == index]:
            answer.unwanted = True
            if answer.sequence not in self.unforked:
                self._end([answer], None)

    def warm(self) -> None:
        """Do now what the first requests would otherwise wait for: compile kernels and capture CUDA graphs."""
        self.runner.warm(self.scheduler.settings.max_step_tokens, self.host_pages)
        if self.drafter is not None:
            self.drafter.warm(self.scheduler.settings.max_step_tokens, self.host_pages)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle and not self.under_way and not self.outputs

    def stats(self) -> Stats:
        """Current statistics."""
        pool = self.pool
        return Stats(
            self.scheduler.running, self.scheduler.waiting, pool.pages - 1 - pool.available, pool.pages - 1, pool.queried_tokens,
            pool.found_tokens, self.scheduler.preemptions, self.computed_tokens, self.generated_tokens,
            tuple(self.drafts.drafted), tuple(self.drafts.accepted),
        )  # fmt: skip

    def step(self) -> list[Output]:
        """Launch one step and read one; returns the new outputs."""
        if self.drafter is not None:
            self.drafter.propose(self.scheduler.decoding)
        step = self.scheduler.schedule()
        self.runner.swap(step.swap_out, step.swap_in, self.host_pages)
        if self.drafter is not None:
            self.drafter.swap(step, self.host_pages)
        if step.chunks:
            self.under_way.append(self._launch(step))
            self._fork()
        if self.under_way and (len(self.under_way) > self.kept or not step.chunks):
            self._read(self.under_way.popleft())
        outputs, self.outputs = self.outputs, []
        return outputs

    def _launch(self, step: Step) -> LaunchedStep:
        """Send new sequences and changed pages to the runner, and launch the step."""
        sampler = self.runner.sampler
        for sequence in step.admitted:
            answer = self.by_sequence[sequence]
            request, tokens = answer.request, sequence.tokens
            seed = seed_of(request.sampling, request.id, answer.index, self.seed)
            sampler.assign(
                sequence.slot + 1, request.sampling, seed, tokens[: sequence.prompt], tokens[sequence.prompt :]
            )
            if self.drafter is not None:
                self.drafter.assign(sequence.slot + 1, request.sampling, seed)
            self.tables[sequence.slot] = []
        changes = []
        for sequence in step.changed:
            sent, slot = self.tables[sequence.slot], sequence.slot + 1
            pages = sequence.pages
            changes += [(slot, n, page) for n, page in enumerate(pages) if n >= len(sent) or sent[n] != page]
            self.tables[sequence.slot] = pages.copy()
        self.runner.set_pages(changes)
        self.runner.copy_pages(step.copies)
        if self.drafter is not None:
            self.drafter.fill(step, changes)
        order = order_of(step.chunks)
        rows = [self._row(step.chunks[n], n < step.decoding) for n in order]
        asked = []
        if step.decoding < len(rows):
            owners = [self.by_sequence[step.chunks[n].sequence] for n in order]
            asked = [(own, row.wanted) for own, row in zip(owners, rows, strict=True) if row.wanted]
        launched = self.runner.launch(rows, self._masks(step, order), bool(asked))
        self.steps += 1
        self.computed_tokens += step.tokens
        return LaunchedStep(step, order, launched, asked)

    def _row(self, chunk: Chunk, decoding: bool) -> Row:
        sequence, start, count = chunk.sequence, chunk.start, chunk.count
        tokens: list[int] | None
        if decoding and count == 1 and sequence.lookahead:
            tokens = None  # only the device knows the sampled token
        elif decoding:
            tokens = [sequence.tokens[start], *sequence.drafts]
        else:
            tokens = sequence.tokens[start : start + count]
        wanted = None if decoding else self.by_sequence[sequence].wants(chunk)
        return Row(sequence.slot + 1, start, tokens, count, chunk.samples, wanted)

    def _masks(self, step: Step, order: list[int]) -> np.ndarray | None:
        """Bit masks of the tokens that grammars allow next; None if no sampled sequence has a grammar."""
        if not self.constrained:
            return None
        chunks = [step.chunks[n] for n in order if step.chunks[n].samples]
        if not any(self.by_sequence[chunk.sequence].request.grammars for chunk in chunks):
            return None
        masks = np.full((sum(chunk.samples for chunk in chunks), -(-self.vocab // 32)), -1, np.int32)
        row = 0
        for chunk in chunks:
            answer = self.by_sequence[chunk.sequence]
            if answer.request.grammars:
                drafts = chunk.sequence.drafts[: chunk.samples - 1]
                made = masks_along(answer.request.grammars[answer.index], drafts, masks.shape[1])
                masks[row : row + len(made)] = made
            row += chunk.samples
        return masks

    def _fork(self) -> None:
        """Fork the other answers of a request once the prompt of the first is computed."""
        for sequence, answer in list(self.unforked.items()):
            if sequence.state != "decode":
                continue
            del self.unforked[sequence]
            request = answer.request
            for index in range(1, request.n):
                child = self.scheduler.fork(sequence, (request.id, index), lookahead=sequence.lookahead)
                other = Answer(request, index, child)
                self.answers[request.id].append(other)
                self.by_sequence[child] = other
                self.constrained += bool(request.grammars)
            if answer.unwanted:
                self._end([answer], None)

    def _read(self, under_way: LaunchedStep) -> None:
        """Read the sampled tokens of a step."""
        step, launched = under_way.step, under_way.launched
        tokens = launched.read()
        under_way.read_prompts()
        logprobs: list[Logprob | None] = []
        picked, chunks = launched.picked, step.chunks
        if picked is not None and picked.logprobs is not None and picked.top is not None:
            asked = [most for n in under_way.order for most in self._asked(chunks[n])]
            logprobs = read_logprobs(tokens, picked.logprobs, picked.top, asked)
        first = 0
        accepted: list[list[int]] = [[]] * len(chunks)
        found: list[list[Logprob | None]] = [[]] * len(chunks)
        for n in under_way.order:
            samples = chunks[n].samples
            if not samples:
                continue
            last = first + samples
            accepted[n] = tokens[first:last] if samples == 1 else self._accepted(chunks[n], tokens[first:last])
            if logprobs:
                found[n] = logprobs[first : first + len(accepted[n])]
            first = last
        self.scheduler.update(step, [new for new in accepted if new])
        for chunk, new, known in zip(chunks, accepted, found, strict=True):
            if new and chunk.sequence.state != "finished":
                self._tell(chunk.sequence, new, known)

    def _asked(self, chunk: Chunk) -> list[int | None]:
        """How many logprobs the client wants for each sampled token. The slot cannot tell: its sequence may have been preempted
        since, and another sequence may hold it."""
        answer = self.by_sequence.get(chunk.sequence)
        return [None if answer is None else answer.request.sampling.logprobs] * chunk.samples

    def _accepted(self, chunk: Chunk, picked: list[int]) -> list[int]:
        """The accepted tokens: the leading drafts that match the sampled tokens, and the one sampled after them."""
        drafts = chunk.sequence.drafts[: chunk.samples - 1]
        right = 0
        while right < len(drafts) and picked[right] == drafts[right]:
            right += 1
        if drafts:
            self.drafts.add(len(drafts), right)
        return picked[: right + 1]

    def _tell(self, sequence: Sequence, tokens: list[int], logprobs: list[Logprob | None]) -> None:
        """Output the new tokens of an answer, and end it at a stop token or at its length limit."""
        answer = self.by_sequence[sequence]
        request = answer.request
        finish: Finish | None = None
        if -1 in tokens:  # no token could be sampled from the logits
            self._end([answer], "abort")
            return
        stops = frozenset() if request.ignore_end else request.stop_tokens
        if stops or request.grammars:
            for n, token in enumerate(tokens, 1):
                if request.grammars:
                    request.grammars[answer.index].accept(token)
                if token in stops:
                    finish, tokens, logprobs = "stop", tokens[:n], logprobs[:n]
                    break
        if finish is None and sequence.generated >= sequence.max_new:
            finish = "length"
        self.generated_tokens += len(tokens)
        known = tuple([p for p in logprobs if p is not None]) if logprobs else ()
        output = Output(request.id, answer.index, tuple(tokens), known, finish)
        if not answer.told:
            output.prompt_logprobs, output.cached_tokens = tuple(answer.prompt_logprobs), max(0, sequence.cached)
            answer.told = True
        self.outputs.append(output)
        if finish is not None:
            self._forget(answer)

    def _end(self, answers: Iterable[Answer], finish: Finish | None) -> None:
        for answer in list(answers):
            unborn = range(1, answer.request.n) if answer.sequence in self.unforked else ()
            if finish is not None:
                for index in (answer.index, *unborn):
                    self.outputs.append(Output(answer.request.id, index, (), finish=finish))
            self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        self.scheduler.finish(answer.sequence)
        self.unforked.pop(answer.sequence, None)
        if self.drafter is not None:
            self.drafter.forget(answer.sequence)
        del self.by_sequence[answer.sequence]
        self.constrained -= bool(answer.request.grammars)
        left = self.answers[answer.request.id]
        left.remove(answer)
        if not left:
            del self.answers[answer.request.id]


def engine_of(
    model: Transformer, run: Run, ahead: bool | None = None, longest: int = 0, draft: Transformer | None = None
) -> Engine:
    """An engine on one device, for a model in memory and an optional draft model, with as many pages as the plan leaves room
    for."""
    run = replace(run, layout=LayoutConfig())
    kept = keep_weights(model, run.serve.weights, run.serve.head)
    memory = memory_of(run, next(model.parameters()).device, weights=kept)
    runner = runner_of(model, run, memory.pages, longest)
    guessing = draft_runner_of(draft, run, memory.pages, longest)
    return Engine(runner, run.serve, memory.pages, ahead, run.train.seed, host_pages(run, memory), guessing)


def make_engine(folder: Path, run: Run, longest: int = 0) -> Engine:
    """An engine on one device for a checkpoint folder, with the dtype and settings of a run, whatever layout it was trained on."""
    check_served(run)
    from shardwise.checkpoint.weights import load_model
    from shardwise.model.device import choose_device

    dtype, device = getattr(torch, run.train.dtype), choose_device(run.train.device)
    model, _ = load_model(folder, dtype, device, exactly_read(run, device), run.serve.weights)
    model.dtype = dtype
    return engine_of(model.requires_grad_(False), run, longest=longest, draft=load_draft(run, device))


def drafter_of(settings: ServeConfig, draft: Runner | None) -> Drafter | None:
    """The drafter that `serve.speculate` names; `draft` is the runner of the draft model."""
    if settings.speculate == "ngram":
        return NgramDrafter(settings.ngram_min, settings.ngram_max, settings.draft_tokens)
    return DraftModel(draft, settings.draft_tokens) if draft is not None else None
