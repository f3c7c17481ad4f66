"""`/v1/chat/completions`: the next message of a conversation; the model's chat template makes the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from shardwise.data.chat.messages import tidy_calls
from shardwise.data.tokenizer import Tokenizer
from shardwise.run import UserError
from shardwise.serve.server.answers import Choice, Delta, Token, finite
from shardwise.serve.server.ask import TOKENS, read_ask, read_model, wrong_missing
from shardwise.serve.server.completions import encode, respond
from shardwise.serve.server.context import Context
from shardwise.serve.server.errors import ApiError
from shardwise.serve.server.fields import Fields, kind
from shardwise.serve.server.metrics import Timing
from shardwise.serve.server.stream import EventStream
from shardwise.serve.text import token_text

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NO_TOOLS = "is not supported: calls of tools are not read from the answer"
PASSED_ON = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""Further fields of a message that are passed on to the template."""


async def chat_completions(context: Context, fields: Fields, user: str) -> Response | EventStream:
    """Answer a request, or start its stream."""
    timing, model, service = Timing(context.metrics), context.model, context.service
    read_model(fields, model)
    messages = _messages(fields)
    switches = fields.inner("chat_template_kwargs")
    more: dict[str, Any] = fields.get("chat_template_kwargs") if switches else {}
    ask = read_ask(fields, model, service.vocab, context.limits, _max_tokens(fields), _logprobs_wanted(fields), user)
    _refuse(fields)
    fields.end()
    try:
        text = model.template.render(messages, more)
        text.encode()  # arguments of calls are JSON in a string, with escapes of their own
    except UserError as e:
        raise ApiError(400, str(e), "messages", "invalid_value") from None
    except UnicodeEncodeError:
        raise ApiError(400, "'messages' has half a surrogate pair", "messages", "invalid_utf8") from None
    # The template has put the special tokens where they belong.
    prompt = await encode(context, text, special=False)
    begun: set[int] = set()

    def event(delta: Delta, start: str, end: str) -> str:
        found = ""
        if delta.choice not in begun:
            begun.add(delta.choice)
            role = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'
            found = f"{start}{delta.choice}, {role}{end}"
        if delta.text or delta.tokens:
            text = json.dumps(delta.text)
            logprobs = json.dumps(_logprobs(delta.tokens, model.tokenizer)) if delta.tokens else "null"
            what = f'"delta": {{"content": {text}}}, "logprobs": {logprobs}, "finish_reason": null'
            found += f"{start}{delta.choice}, {what}{end}"
        if delta.finish:
            what = f'"delta": {{}}, "logprobs": null, "finish_reason": "{delta.finish}"'
            found += f"{start}{delta.choice}, {what}{end}"
        return found

    def whole(choice: Choice) -> str:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = None if ask.sampling.logprobs is None else _logprobs(choice.tokens, model.tokenizer)
        return f'"message": {json.dumps(message)}, "logprobs": {json.dumps(logprobs)}'

    names = ("chatcmpl", "chat.completion", "chat.completion.chunk")
    return await respond(context, ask, timing, [prompt], names, event, whole)


def _max_tokens(fields: Fields) -> int | None:
    old, new = fields.maybe_whole("max_tokens", 1, TOKENS), fields.maybe_whole("max_completion_tokens", 1, TOKENS)
    if old is not None and new is not None and old != new:
        raise fields.wrong("max_tokens", "is the older name of 'max_completion_tokens', which says otherwise")
    return old if new is None else new


def _logprobs_wanted(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.maybe_whole("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise fields.wrong("top_logprobs", "is only for a request with logprobs = true")
    return (top or 0) if wanted else None


def _refuse(fields: Fields) -> None:
    """Refuse fields that would change the answer in a way that is not supported."""
    for name in ("tools", "functions"):
        fields.only(name, ([],), NO_TOOLS)
    fields.only("tool_choice", ("none", "auto"), NO_TOOLS)
    fields.only("function_call", ("none", "auto"), NO_TOOLS)
    fields.only("modalities", (["text"],), "is not supported: answers are text")
    for name in ("audio", "web_search_options"):
        fields.only(name, (), "is not supported")
    fields.ignore("parallel_tool_calls")


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.get("messages")
    if given is None:
        raise wrong_missing(fields, "messages")
    if not isinstance(given, list) or not given:
        what = "an empty array" if given == [] else kind(given)
        raise fields.wrong("messages", f"must be an array of messages, not {what}", "invalid_type")
    return [_message(Fields(each, f"messages[{number}]")) for number, each in enumerate(given)]


def _message(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {"role": fields.one_of("role", "", ROLES)}
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(_part(Fields(part, "messages.content")) for part in content)
    passed_on = {name: value for name in PASSED_ON if (value := fields.get(name)) is not None}
    if "tool_calls" in passed_on:
        passed_on["tool_calls"] = tidy_calls(passed_on["tool_calls"])
    if content is None and "tool_calls" not in passed_on:
        raise wrong_missing(fields, "content")
    if content is not None and not isinstance(content, str):
        raise fields.wrong("content", f"must be a string or an array of parts, not {kind(content)}", "invalid_type")
    fields.ignore("refusal", "audio", "annotations", "function_call")
    fields.end()
    return {**found, "content": content, **passed_on}


def _part(fields: Fields) -> str:
    if fields.get("type") not in ("text", "input_text", "refusal"):
        raise fields.wrong("type", "must be 'text': this model reads nothing else", "unsupported_value")
    text = fields.get("text") if fields.get("type") != "refusal" else fields.get("refusal")
    if not isinstance(text, str):
        raise fields.wrong("text", f"must be a string, not {kind(text)}", "invalid_type")
    return text


def _logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    content = []
    for each in tokens:
        assert each.logprob is not None, "only the first token of a prompt has none"
        top = [_one(token, value, tokenizer) for token, value in each.logprob.top]
        content.append({**_one(each.token, each.logprob.logprob, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _one(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.piece(token) or tokenizer.name(token).encode()
    return {"token": token_text(tokenizer, token), "logprob": finite(logprob), "bytes": list(piece)}
