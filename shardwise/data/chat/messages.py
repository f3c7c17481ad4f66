"""Messages in the form that templates expect: a role, a text, and tool calls whose arguments are objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ASSISTANT = "assistant"
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The role behind each speaker name in ShareGPT exports and data sets of that form."""


class BadRow(Exception):
    """A row that cannot be used. Rows with the same mistake share a `reason`; `about` has the details of this row."""

    def __init__(self, reason: str, about: str = "") -> None:
        super().__init__(f"{reason}: {about}" if about else reason)
        self.reason = reason


def tidy_messages(given: Any, name: str) -> list[dict[str, Any]]:
    """Normalise messages of OpenAI's or ShareGPT's form; `name` is the row's field that holds them."""
    if isinstance(given, str):
        given = parsed(given)
    if not isinstance(given, list) or not given:
        raise BadRow(f'"{name}" is not a list of messages')
    return [_tidy(each, f"message {number} of {name}") for number, each in enumerate(given, 1)]


def _tidy(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise BadRow("a message is not an object", where)
    # Parquet has every field in every row; a null field counts as absent.
    message = {str(name): value for name, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        return _from_sharegpt(message, where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRow("a message has no role", where)
    content = _text(message.get("content"), where)
    if "tool_calls" in message:
        message["tool_calls"] = tidy_calls(message["tool_calls"])
    if content is None and not message.get("tool_calls"):
        raise BadRow("a message has no content", where)
    # Templates concatenate contents, which must be strings, not null.
    return {**message, "role": role, "content": content or ""}


def _from_sharegpt(message: dict[str, Any], where: str) -> dict[str, Any]:
    speaker, value = message["from"], message.get("value", message.get("content"))
    role = SHAREGPT.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f'nobody is known by "from" = {json.dumps(speaker)[:40]}', where)
    if not isinstance(value, str):
        raise BadRow("a message has no value", where)
    found: dict[str, Any] = {"role": role, "content": value}
    if speaker == "function_call":
        call = parsed(value)
        if not isinstance(call, dict) or "name" not in call:
            raise BadRow("a function call is not a JSON object with a name", where)
        found = {"role": role, "content": "", "tool_calls": tidy_calls([{"type": "function", "function": call}])}
    return found | ({"weight": message["weight"]} if "weight" in message else {})


def _text(content: Any, where: str) -> str | None:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow("a message's content is neither a text nor a list of parts", where)
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise BadRow("a message has a part that is not text", f"{where} has {json.dumps(kind, default=str)[:40]}")
        texts.append(text)
    return "".join(texts)


def tidy_calls(calls: Any) -> Any:
    """Tool calls with their arguments as objects: OpenAI writes arguments as a JSON string, templates expect an object."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return calls
    return [_tidy_call(call) for call in calls]


def _tidy_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    found = {name: value for name, value in call.items() if value is not None}
    inner = found.get("function")
    if isinstance(inner, Mapping):
        return found | {"function": _with_objects(inner)}
    return _with_objects(found)


def _with_objects(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments")
    found = parsed(arguments) if isinstance(arguments, str) else None
    return {**call, "arguments": found} if isinstance(found, dict) else dict(call)


def common_prefix(one: str, other: str) -> str:
    """The common prefix of two texts, by bisection: the texts are long, and comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


def parsed(text: str) -> Any:
    """A text parsed as JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
