"""From the engine's tokens to the text of choices: the new text of each choice, with the logprobs of its tokens.

A choice is one answer to one prompt; answer i to prompt p has index p × n + i. A token is returned once all of its text is, so
that tokens and text agree while text is held back for a stop string.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from shardwise.data.tokenizer import Tokenizer
from shardwise.serve.request import Logprob, Output, Request
from shardwise.serve.server.errors import ApiError
from shardwise.serve.server.metrics import Timing
from shardwise.serve.service import Service
from shardwise.serve.text import Detokenizer, Place, Reader


@dataclass(frozen=True)
class Token:
    """A token of an answer or of an echoed prompt; the first token of a prompt has no logprob."""

    token: int
    logprob: Logprob | None
    start: int
    """Characters of the text before this token."""


@dataclass(frozen=True)
class Echo:
    """A prompt that begins each of its choices."""

    text: str
    logprobs: Any
    """As the endpoint writes them; None if they were not asked for."""


@dataclass
class Delta:
    """The new text of one choice."""

    choice: int
    text: str
    tokens: Sequence[Token] = ()
    finish: str | None = None
    echo: Echo | None = None
    """The prompt, before the first text of a choice."""


@dataclass
class Usage:
    """The token counts of a request."""

    prompt: int = 0
    answer: int = 0
    cached: int = 0

    def json(self) -> dict[str, object]:
        """In OpenAI's format."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class _Choice:
    reader: Reader
    held: deque[tuple[Logprob, Place]] = field(default_factory=deque)
    """Tokens whose text is still held back."""
    offset: int = 0
    """Characters of the echoed prompt."""
    done: bool = False


@dataclass
class Choice:
    """One answer that has ended."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str = ""
    echo: Echo | None = None

    @property
    def text(self) -> str:
        """The complete text, without the prompt."""
        return "".join(self.texts)


class Answers:
    """Reads the outputs of requests as text. Use `async for delta in answers.read()`; afterwards `usage` is complete."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        timing: Timing,
        stops: Sequence[str] = (),
        echo: Callable[[Sequence[Token]], Any] | None = None,
        silent: bool = False,
    ) -> None:
        """`echo` writes the logprobs of a prompt, with which each of its choices is then to begin; `silent` leaves out the answers
        themselves."""
        self.usage = Usage(prompt=sum(len(request.prompt) for request in requests))
        self._service, self._tokenizer, self._requests = service, tokenizer, requests
        self._timing = timing
        self._echo, self._silent = echo, silent
        self._numbers = {request.id: number for number, request in enumerate(requests)}
        self._choices = [
            _Choice(
                Reader(tokenizer, stops, request.prompt, frozenset() if request.ignore_end else request.stop_tokens)
            )
            for request in requests
            for _ in range(request.n)
        ]
        self._begun: set[int] = set()
        self._echoes: dict[str, Echo | None] = {}
        """By request, once it has its first output."""

    async def whole(self) -> list[Choice]:
        """All choices, once they are complete."""
        found = [Choice() for _ in self._choices]
        async with aclosing(self.read()) as deltas:
            async for delta in deltas:
                choice = found[delta.choice]
                choice.texts.append(delta.text)
                choice.tokens.extend(delta.tokens)
                choice.echo = choice.echo or delta.echo
                choice.finish = delta.finish or ""
        return found

    async def read(self) -> AsyncGenerator[Delta]:
        """The new text, as it arrives. Leaving early aborts the requests."""
        requests = self._requests
        async with aclosing(self._service.generate(*requests)) as outputs:
            async for output in outputs:
                if output.finish == "abort":
                    raise ApiError(503, "the request was aborted", code="aborted")
                number = self._numbers[output.request]
                at = number * requests[number].n + output.index
                choice = self._choices[at]
                if choice.done:
                    continue
                delta = self._read(choice, output, at, requests[number])
                if at not in self._begun:
                    await self._begin(choice, output, delta, requests[number])
                if delta.text or delta.tokens or delta.finish or delta.echo:
                    yield delta
        self._timing.end(self.usage.prompt, self.usage.answer, len(self._choices))

    def _read(self, choice: _Choice, output: Output, at: int, request: Request) -> Delta:
        reader, text = choice.reader, ""
        if self._silent:
            choice.done = output.finish is not None
            return Delta(at, "", (), "length" if choice.done else None)
        count = 0
        for number, token in enumerate(output.tokens):
            more, place = reader.add(token)
            text += more
            if output.logprobs:
                choice.held.append((output.logprobs[number], place))
            count += 1
            if reader.stopped:
                break
        self.usage.answer += count
        self._timing.tokens(count)
        finish: str | None = output.finish
        if reader.stopped:
            self._service.finish(request.id, output.index)
            finish = "stop"
        elif finish:
            text += reader.end()
            if reader.stopped:
                finish = "stop"
        choice.done = finish is not None
        return Delta(at, text, self._certain(choice) if choice.held else (), finish)

    def _certain(self, choice: _Choice) -> list[Token]:
        """The tokens whose text is completely returned. If a stop string ends the answer, the token in which it begins is
        included, and those after it are not."""
        found, reader, end = [], choice.reader, choice.done
        while choice.held:
            logprob, place = choice.held[0]
            cut = reader.stopped and place.start >= reader.given
            if cut or (place.end > reader.given and not end):
                break
            found.append(Token(logprob.token, logprob, choice.offset + place.start))
            choice.held.popleft()
        return found

    async def _begin(self, choice: _Choice, output: Output, delta: Delta, request: Request) -> None:
        """Complete the first delta of a choice with its prompt. The echo is made once for all choices of a prompt, and in a thread,
        so that a long one does not block the event loop."""
        self._begun.add(delta.choice)
        if request.id not in self._echoes:
            self.usage.cached += output.cached_tokens
            made = await asyncio.to_thread(self._echo_of, request, output, self._echo) if self._echo else None
            self._echoes[request.id] = made
        delta.echo = self._echoes[request.id]
        if delta.echo is not None:
            choice.offset = len(delta.echo.text)
            delta.tokens = [Token(each.token, each.logprob, each.start + choice.offset) for each in delta.tokens]

    def _echo_of(self, request: Request, output: Output, write: Callable[[Sequence[Token]], Any]) -> Echo:
        """The echo of a prompt; its first output has its logprobs."""
        logprobs, detokenizer = output.prompt_logprobs, Detokenizer(self._tokenizer)
        texts, start, tokens = [], 0, []
        for number, token in enumerate(request.prompt):
            texts.append(detokenizer.add(token))
            tokens.append(Token(token, logprobs[number] if number < len(logprobs) else None, start))
            start += len(texts[-1])
        texts.append(detokenizer.end() if self._silent else "")
        return Echo("".join(texts), None if request.sampling.logprobs is None else write(tokens))


def finite(logprob: float) -> float:
    """A logprob that JSON can represent: at least -9999, as OpenAI writes impossible tokens."""
    return logprob if logprob > -9999.0 else -9999.0
