"""An engine without a model, of the real one's interface: the next token is a hash of the tokens so far, at once or after a delay.

It hands out pages, one for each 16 tokens of a sequence, and takes them back, so that a request that is left behind shows. Seeds,
biases and grammars change its tokens as they would a model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from shardwise.run import UserError
from shardwise.serve.request import Logprob, Output, Request, Stats

PAGE_TOKENS = 16
Script = Callable[[Request, int], Sequence[int]]
"""What an answer is to be, from the request and the answer's index; the end of it is the token that ends a text."""


@dataclass(eq=False)
class Running:
    """One answer in the making."""

    request: Request
    index: int
    hash: int
    script: Iterator[int] | None
    made: int = 0
    pages: int = 0
    prompt_told: bool = False


@dataclass
class FakeEngine:
    """Answers `max_sequences` sequences at a time."""

    vocab: int = 257
    max_tokens: int = 4096
    end: int = 256
    max_sequences: int = 64
    pages: int = 4096
    delay: float = 0.0
    """Seconds that a step takes."""
    script: Script | None = None
    fails_at: int = -1
    """The step that raises an error."""
    requests: list[Request] = field(default_factory=list)
    """What was asked, for tests to look at; the latest thousand."""
    aborted: int = 0
    finished: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        self._told: list[Output] = []
        self._used = self._made = self._computed = self._hits = 0

    def add(self, request: Request) -> None:
        if len(request.prompt) + request.max_tokens > self.max_tokens:
            raise UserError(f"{len(request.prompt)} + {request.max_tokens} tokens are more than {self.max_tokens}")
        self.requests = [*self.requests[-999:], request]
        start = crc32(np.array(request.prompt, dtype=np.int32).tobytes())
        if request.sampling.temperature and request.sampling.seed is not None:
            start = crc32(str(request.sampling.seed).encode(), start)
        for index in range(request.n):
            script = iter(self.script(request, index)) if self.script else None
            self._waiting.append(Running(request, index, crc32(b"%d" % index, start), script))

    def abort(self, request_id: str) -> None:
        for each in [each for each in self._all() if each.request.id == request_id]:
            self.aborted += 1
            self._end(each)
            self._told.append(Output(request_id, each.index, (), finish="abort"))

    def finish(self, request_id: str, index: int) -> None:
        for each in [each for each in self._all() if each.request.id == request_id and each.index == index]:
            self.finished += 1
            self._end(each)

    def step(self) -> list[Output]:
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("the fake engine was told to fail")
        while self._waiting and len(self._running) < self.max_sequences:
            needed = self._pages_for(self._waiting[0])
            if self._used + needed > self.pages:
                break
            self._running.append(self._waiting.pop(0))
            self._computed += len(self._running[-1].request.prompt)
        if self.delay and self._running:
            time.sleep(self.delay)
        outputs, self._told = self._told, []
        for each in [*self._running]:
            outputs.append(self._next(each))
        return outputs

    def warm(self) -> None:
        """There is nothing to warm."""

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running and not self._told

    def stats(self) -> Stats:
        return Stats(
            len(self._running), len(self._waiting), self._used, self.pages, prefix_hits=self._hits,
            computed_tokens=self._computed, generated_tokens=self._made,
        )  # fmt: skip

    def _all(self) -> list[Running]:
        return self._waiting + self._running

    def _pages_for(self, each: Running) -> int:
        return -(-(len(each.request.prompt) + each.made + 1) // PAGE_TOKENS)

    def _end(self, each: Running) -> None:
        (self._running if each in self._running else self._waiting).remove(each)
        self._used -= each.pages
        each.pages = 0

    def _next(self, each: Running) -> Output:
        needed = self._pages_for(each)
        self._used += needed - each.pages
        each.pages = needed
        request, token = each.request, self._token(each)
        each.hash = crc32(b"%d" % token, each.hash)
        each.made += 1
        self._made += 1
        ends = token in request.stop_tokens and not request.ignore_end
        finish: Any = "stop" if ends else "length" if each.made == request.max_tokens else None
        first = not each.prompt_told
        each.prompt_told = True
        if finish:
            self._end(each)
        wanted = request.sampling.logprobs
        return Output(
            request.id,
            each.index,
            (token,),
            logprobs=() if wanted is None else (self._logprob(token, each.hash, wanted),),
            finish=finish,
            prompt_logprobs=self._of_prompt(request) if first else (),
            cached_tokens=len(request.prompt) // PAGE_TOKENS * PAGE_TOKENS if first else 0,
        )

    def _token(self, each: Running) -> int:
        if each.request.grammars:
            grammar = each.request.grammars[each.index]
            words: Any = grammar.allowed()
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self.vocab]
            allowed = np.flatnonzero(bits)
            token = int(allowed[each.hash % len(allowed)])
            # A grammar may go on forever; a model would not.
            if self.end in allowed:
                token = self.end
            grammar.accept(token)
            return token
        for token, bias in each.request.sampling.logit_bias.items():
            if bias == 100:
                return token
        if each.script is not None:
            return next(each.script, self.end)
        return each.hash % self.vocab

    def _logprob(self, token: int, seed: int, count: int) -> Logprob:
        others = [((token + each) % self.vocab, -1.0 - each) for each in range(count)]
        return Logprob(token, -1.0 - seed % 7, tuple(others))

    def _of_prompt(self, request: Request) -> tuple[Logprob | None, ...]:
        if (count := request.sampling.prompt_logprobs) is None:
            return ()
        return (None, *(self._logprob(token, token, count) for token in request.prompt[1:]))


def letters(request: Request, index: int) -> list[int]:
    """A script of letters that depend on the prompt, its seed and the answer's index."""
    start = crc32(repr((request.prompt, request.sampling.seed, index)).encode())
    return [97 + crc32(b"%d" % at, start) % 26 for at in range(request.max_tokens)]


def says(text: str) -> Script:
    """A script that is a text, as bytes."""
    return lambda request, index: list(text.encode())
