"""`/v1/completions`: continues prompts, each a string or tokens."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response

from shardwise.data.tokenizer import Tokenizer
from shardwise.serve.request import Logprob
from shardwise.serve.server.answers import Answers, Choice, Delta, Echo, Token, finite
from shardwise.serve.server.ask import TOKENS, Ask, read_ask, read_model
from shardwise.serve.server.context import Context
from shardwise.serve.server.errors import ApiError
from shardwise.serve.server.fields import Fields, kind
from shardwise.serve.server.metrics import Timing
from shardwise.serve.server.stream import EventStream
from shardwise.serve.text import token_text

DEFAULT_TOKENS = 16
"""OpenAI's default."""
LONG = 20_000
"""Prompts of more characters are encoded in a thread, so that the event loop does not block."""
AT_ONCE = 512
"""Tokens whose logprobs one call writes as JSON, during which no other thread runs."""


async def completions(context: Context, fields: Fields, user: str) -> Response | EventStream:
    """Answer a request, or start its stream."""
    timing, model, service = Timing(context.metrics), context.model, context.service
    read_model(fields, model)
    given, special = fields.get("prompt"), fields.flag("add_special_tokens", True)
    max_tokens = fields.whole("max_tokens", DEFAULT_TOKENS, 0, TOKENS)
    echo = fields.flag("echo")
    if not max_tokens and not echo:
        raise fields.wrong("max_tokens", "must be at least 1; an answer of no tokens is only for a prompt to echo")
    logprobs = fields.maybe_whole("logprobs", 0, 20)
    ask = read_ask(fields, model, service.vocab, context.limits, max_tokens, logprobs, user)
    fields.only("best_of", (1, ask.n), "is not supported: answers are not ranked; it may equal n")
    fields.only("suffix", ("",), "is not supported: text is continued, not filled in")
    fields.end()
    if echo:
        ask = replace(ask, sampling=replace(ask.sampling, prompt_logprobs=logprobs))
    prompts = await _prompts(context, fields, given, special, ask.n)

    written = partial(_written, tokenizer=model.tokenizer)

    def fields_of(echo: Echo | None, text: str, tokens: Sequence[Token]) -> str:
        logprobs = [written(tokens)] if tokens else []
        if echo is not None:
            text = echo.text + text
            logprobs = [echo.logprobs, *logprobs] if echo.logprobs else logprobs
        return f'"text": {json.dumps(text)}, "logprobs": {_joined(logprobs)}'

    def event(delta: Delta, start: str, end: str) -> str:
        finish = f'"{delta.finish}"' if delta.finish else "null"
        found = fields_of(delta.echo, delta.text, delta.tokens)
        return f'{start}{delta.choice}, {found}, "finish_reason": {finish}{end}'

    def whole(choice: Choice) -> str:
        return fields_of(choice.echo, choice.text, choice.tokens)

    names = ("cmpl", "text_completion", "text_completion")
    echoed = written if echo else None
    return await respond(context, ask, timing, prompts, names, event, whole, echoed, silent=not max_tokens)


async def respond(
    context: Context,
    ask: Ask,
    timing: Timing,
    prompts: Sequence[Sequence[int]],
    names: tuple[str, str, str],
    event: Callable[[Delta, str, str], str],
    whole: Callable[[Choice], str],
    echo: Callable[[Sequence[Token]], Any] | None = None,
    silent: bool = False,
) -> Response | EventStream:
    """Answer the prompts of a request, or start their stream, for either endpoint. `names`: the beginning of its id, and OpenAI's
    names of an answer and of a part of one. `event` writes new text between the two texts that all events share, `whole` the fields
    of an answer that has ended, and `echo` the logprobs of a prompt."""
    context.service.check(len(prompts))
    name = f"{names[0]}-{uuid.uuid4().hex}"
    requests = await context.requests(ask, name, prompts)
    answers = Answers(context.service, context.model.tokenizer, requests, timing, ask.stops, echo, silent)
    kind = names[2] if ask.stream else names[1]
    head = {"id": name, "object": kind, "created": int(time.time()), "model": context.model.name}
    if ask.stream:
        return EventStream(_events(answers, ask, head, event))
    ended = await answers.whole()

    def body() -> bytes:
        each = (f'{{"index": {n}, {whole(one)}, "finish_reason": "{one.finish}"}}' for n, one in enumerate(ended))
        usage = json.dumps(answers.usage.json())
        return f'{json.dumps(head)[:-1]}, "choices": [{", ".join(each)}], "usage": {usage}}}'.encode()

    long = sum(len(choice.tokens) for choice in ended) > AT_ONCE
    return Response(await asyncio.to_thread(body) if long else body(), media_type="application/json")


async def _events(
    answers: Answers, ask: Ask, head: dict[str, Any], event: Callable[[Delta, str, str], str]
) -> AsyncGenerator[bytes]:
    # Most of an event is the same each time; only the parts that differ are encoded as JSON.
    usage = ', "usage": null' if ask.include_usage else ""
    start, end = f'data: {json.dumps(head)[:-1]}{usage}, "choices": [{{"index": ', "}]}\n\n"
    async with aclosing(answers.read()) as deltas:
        async for delta in deltas:
            yield event(delta, start, end).encode()
    if ask.include_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': answers.usage.json()})}\n\n".encode()


async def _prompts(context: Context, fields: Fields, given: Any, special: bool, n: int) -> list[list[int]]:
    """The tokens of each prompt."""
    if given is None:
        given = ""
    several = [given] if isinstance(given, str) else given
    if isinstance(several, list) and several and all(type(token) is int for token in several):
        several = [several]
    wrong = "must be a string, an array of strings, an array of tokens, or an array of such arrays"
    if not isinstance(several, list) or not several:
        raise fields.wrong("prompt", f"{wrong}, not {'empty' if several == [] else kind(given)}", "invalid_type")
    if len(several) * n > context.limits.choices:
        raise fields.wrong(
            "prompt", f"has {len(several)} texts, each {n} times; at most {context.limits.choices} are taken"
        )
    prompts = []
    for prompt in several:
        if isinstance(prompt, str):
            prompts.append(await encode(context, prompt, special))
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            if prompt and not 0 <= min(prompt) <= max(prompt) < context.service.vocab:
                raise fields.wrong("prompt", f"has tokens that this model does not (0 to {context.service.vocab - 1})")
            prompts.append(prompt or [context.model.first])
        else:
            raise fields.wrong("prompt", wrong, "invalid_type")
    return prompts


async def encode(context: Context, text: str, special: bool) -> list[int]:
    """The tokens of a text, at least one; `special` includes those that the tokenizer puts around it."""
    tokenizer = context.model.tokenizer
    function = tokenizer.encode_prompt if special else tokenizer.encode
    found = await asyncio.to_thread(function, text) if len(text) > LONG else function(text)
    if found and max(found) >= context.service.vocab:
        raise ApiError(400, f"the prompt has a token that this model does not ({max(found)})", "prompt")
    return found or [context.model.first]


def _written(tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, str]:
    """The lists of logprobs as JSON, without their brackets."""
    parts = [_logprobs(tokens[at : at + AT_ONCE], tokenizer) for at in range(0, len(tokens), AT_ONCE)]
    return {name: ", ".join(json.dumps(part[name])[1:-1] for part in parts) for name in parts[0]}


def _joined(written: Sequence[Mapping[str, str]]) -> str:
    """The lists of an echo followed by those of an answer; null if there are none."""
    if not written:
        return "null"
    return "{" + ", ".join(f'"{name}": [{", ".join(each[name] for each in written)}]' for name in written[0]) + "}"


def _logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokens": [token_text(tokenizer, each.token) for each in tokens],
        "token_logprobs": [each.logprob and finite(each.logprob.logprob) for each in tokens],
        "top_logprobs": [each.logprob and _likeliest(each.logprob, tokenizer) for each in tokens],
        "text_offset": [each.start for each in tokens],
    }


def _likeliest(logprob: Logprob, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens and the sampled one. If two have the same text, the likelier is kept."""
    found = {token_text(tokenizer, token): finite(value) for token, value in reversed(logprob.top)}
    return {**found, token_text(tokenizer, logprob.token): finite(logprob.logprob)}
