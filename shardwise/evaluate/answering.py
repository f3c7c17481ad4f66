"""The model that answers an evaluation: an engine in this process, or a server with OpenAI's API. Both return the log-likelihood of
a continuation, and generate text. Tokenization happens here, so that both see the same tokens."""

from __future__ import annotations

import http.client
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.run import Run, UserError
from shardwise.serve.engine import Engine, make_engine
from shardwise.serve.generate import continue_prompts, encode_prompt, ends_of
from shardwise.serve.request import Request, Sampling

AT_ONCE = 16
"""Requests that a server answers at a time."""


@dataclass(frozen=True)
class Likelihood:
    """The log-probability of a continuation, and whether every token of it is the likeliest one."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class Wanted:
    """A prompt to continue."""

    prompt: Sequence[int]
    max_tokens: int
    stop: Sequence[str] = ()
    temperature: float = 0.0


class Answerer(ABC):
    """A model that answers requests. `longest` is the maximum number of tokens of context and continuation together."""

    tokenizer: Tokenizer
    longest: int

    @property
    def first(self) -> int:
        """The token that stands in for an empty context."""
        return self.tokenizer.special_tokens.get("bos", ("", self.tokenizer.end))[1]

    def encode(self, text: str) -> list[int]:
        """The tokens of a context."""
        return encode_prompt(self.tokenizer, text)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """A context and its continuation as tokens of the joined text, split as lm-eval does: white space between the two belongs
        to the continuation."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return [self.first], self.tokenizer.encode(continuation)
        before = self.encode(context)
        return before, self.encode(context + continuation)[len(before) :]

    def room(self, max_tokens: int) -> int:
        """The maximum number of prompt tokens that leaves room for an answer; at least 1."""
        return max(1, self.longest + 1 - max_tokens)

    def cut(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], list[int]]:
        """Drop tokens from the left until both fit the model's context."""
        both = [*context, *continuation][-self.longest :]
        kept = min(len(continuation), len(both) - 1)
        return both[: len(both) - kept], both[len(both) - kept :]

    @abstractmethod
    def likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        """The likelihood of each continuation after its context."""

    @abstractmethod
    def generate(self, wanted: Sequence[Wanted]) -> list[str]:
        """The generated texts, up to and without their stop strings."""


class EngineAnswerer(Answerer):
    """An engine in this process."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, ends: frozenset[int] = frozenset()) -> None:
        """`ends`: tokens that end an answer, besides the tokenizer's end token."""
        self.engine, self.tokenizer, self.ends = engine, tokenizer, ends
        self.longest = engine.max_tokens - 1  # the engine always generates one token

    def likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        found = [Likelihood(0.0, True)] * len(pairs)
        counts = {}
        sampling = Sampling(0.0, prompt_logprobs=1)
        for number, pair in enumerate(pairs):
            context, continuation = self.cut(*pair)
            if continuation:
                counts[number] = len(continuation)
                self.engine.add(Request(str(number), (*context, *continuation), 1, sampling))
        while not self.engine.idle:
            for output in self.engine.step():
                if output.finish == "abort":
                    raise UserError("the model's scores are not finite numbers; are its weights?")
                if not output.prompt_logprobs:
                    continue
                number = int(output.request)
                own = [each for each in output.prompt_logprobs[-counts[number] :] if each is not None]
                greedy = all(each.top[0][0] == each.token for each in own)
                found[number] = Likelihood(sum(each.logprob for each in own), greedy)
        return found

    def generate(self, wanted: Sequence[Wanted]) -> list[str]:
        texts = [""] * len(wanted)
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, each in enumerate(wanted):
            alike.setdefault((each.max_tokens, tuple(each.stop), each.temperature), []).append(number)
        for (max_tokens, stop, temperature), numbers in alike.items():
            kept = self.room(max_tokens)
            prompts = [list(wanted[n].prompt)[-kept:] or [self.first] for n in numbers]
            most = min(max_tokens, self.longest)
            sampling = Sampling(temperature, seed=0)
            made = continue_prompts(self.engine, prompts, most, sampling, self.tokenizer, stop, self.ends)
            for number, continued in zip(numbers, made, strict=True):
                texts[number] = continued.text
        return texts


class HttpAnswerer(Answerer):
    """A server with OpenAI's completions API, such as `shardwise serve`, that takes token prompts and echoes their logprobs."""

    def __init__(self, url: str, tokenizer: Tokenizer, longest: int, api_key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url} is not the address of a server, such as http://localhost:8000")
        self.tokenizer, self.longest, self._key = tokenizer, longest - 1, api_key.strip()
        if any(character in self._key for character in "\r\n"):
            raise UserError("a key has no line breaks")
        self._parts, self._path = parts, parts.path.rstrip("/").removesuffix("/v1") + "/v1/"
        self._model = self._ask("GET", "models")["data"][0]["id"]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=600)
        headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}".encode()
        try:
            connection.request(method, self._path + path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as e:
            raise UserError(f"{self._parts.geturl()} does not answer: {e}") from None
        finally:
            connection.close()
        if response.status == 401:
            wrong = "does not accept the api_key" if self._key else "wants an API key; give it as api_key"
            raise UserError(f"{self._parts.geturl()} {wrong} ({text[:300].decode(errors='replace')})")
        if response.status != 200:
            raise UserError(f"{self._parts.geturl()} answers {response.status}: {text[:300].decode(errors='replace')}")
        try:
            return json.loads(text)
        except ValueError:
            raise UserError(f"{self._parts.geturl()} does not answer with JSON; is it a server of this kind?") from None

    def _complete(self, body: dict[str, Any]) -> Any:
        return self._ask("POST", "completions", {"model": self._model, **body})["choices"][0]

    def likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        def ask(pair: tuple[Sequence[int], Sequence[int]]) -> Likelihood:
            context, continuation = self.cut(*pair)
            if not continuation:
                return Likelihood(0.0, True)
            body = {"prompt": [*context, *continuation], "max_tokens": 0, "echo": True, "logprobs": 1}
            found = self._complete({**body, "temperature": 0.0})["logprobs"]
            own = found["token_logprobs"][-len(continuation) :]
            tops = found["top_logprobs"][-len(continuation) :]
            greedy = all(each >= max(top.values()) for each, top in zip(own, tops, strict=True))
            return Likelihood(math.fsum(own), greedy)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(ask, pairs))

    def generate(self, wanted: Sequence[Wanted]) -> list[str]:
        def ask(each: Wanted) -> str:
            body = {
                "prompt": list(each.prompt)[-self.room(each.max_tokens) :] or [self.first],
                "max_tokens": min(each.max_tokens, self.longest),
            }
            # A server takes at most four stop strings; the text is cut here in any case.
            body |= {"temperature": each.temperature, "stop": list(each.stop)[:4], "seed": 0}
            return _up_to(self._complete(body)["text"], each.stop)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(ask, wanted))


def _up_to(text: str, stops: Sequence[str]) -> str:
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def engine_answerer(folder: Path, run: Run, longest: int = 0) -> EngineAnswerer:
    """An engine for a checkpoint's folder; the maximum sequence length is `longest`, or the model's positions if that is 0."""
    if run.model.position == "learned" and longest > run.model.max_positions:
        raise UserError(f"a sequence of {longest} tokens exceeds the model's {run.model.max_positions} positions")
    tokenizer = load_tokenizer(folder)
    longest = longest or run.model.max_positions
    run = replace(run, model=replace(run.model, max_positions=max(longest, run.model.max_positions)))
    return EngineAnswerer(make_engine(folder, run, longest), tokenizer, ends_of(folder, tokenizer))
