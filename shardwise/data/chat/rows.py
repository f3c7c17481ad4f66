"""Reads rows of published data sets as training examples: one dialog, or a pair to choose between.

It understands `messages` (OpenAI), `conversations` (ShareGPT), `instruction`, `input` and `output` (Alpaca), `prompt` and
`completion`, `chosen` and `rejected` with or without a `prompt` and a `margin`, `prompt`, `completion` and `label`, and a `prompt`
with any fields that a reward needs. A row's fields decide its form. As in TRL, texts that are not messages are used as plain text,
without a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, get_args

from shardwise.data.chat.messages import ASSISTANT, BadRow, common_prefix, parsed, tidy_messages

Form = Literal["chat", "pairs", "labels", "prompts"]
"""What a row is: a dialog to learn; a better and a worse dialog; a dialog with a label; or a prompt to answer."""
FORMS: tuple[Form, ...] = get_args(Form)
KINDS: dict[Form, str] = {"chat": "chat", "pairs": "preference", "labels": "preference", "prompts": "prompts"}
"""The `kind` of a data set of such rows in its index."""
_LARGEST_MARGIN = 3e38
"""Margins are stored as float32."""


@dataclass(frozen=True)
class Dialog:
    """A dialog to learn: messages, of which those from index `first` on may be learned; or, without messages, a prompt and a
    completion as plain text."""

    messages: tuple[dict[str, Any], ...] = ()
    first: int = 0
    tools: Any = None
    prompt: str = ""
    completion: str = ""


@dataclass(frozen=True)
class Example:
    """A parsed row: its dialogs, one or a pair with the better first, and whether each is wanted."""

    dialogs: tuple[Dialog, ...]
    labels: tuple[bool, ...] = (True,)
    margin: float | None = None
    """For a pair, by how much the better dialog is better, if the row says so."""


def form_of(row: Mapping[str, Any]) -> Form:
    """The form of a row, from its fields."""
    there = {name for name, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= there:
        return "pairs"
    if {"completion", "label"} <= there:
        return "labels"
    whole = ({"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"})
    if any(fields <= there for fields in whole):
        return "chat"
    if "prompt" in there:
        return "prompts"
    raise BadRow(
        "has none of the fields of a conversation (messages; conversations; instruction and output; prompt and completion; chosen "
        "and rejected; prompt)",
        f"it has {', '.join(map(str, list(row)[:8]))}" if row else "it has none at all",
    )


def read_row(row: Any, form: Form) -> Example:
    """The training example in a row of that form."""
    if not isinstance(row, Mapping):
        raise BadRow("is not a JSON object with fields")
    if form == "pairs":
        return _pair(row)
    if form == "labels":
        label = row.get("label")
        if not isinstance(label, bool) and label not in (0, 1):
            raise BadRow('"label" is neither true nor false')
        return Example((_dialog(row),), (bool(label),))
    if form == "prompts":
        return Example((_prompt(row),))
    return Example((_dialog(row),))


def _dialog(row: Mapping[str, Any]) -> Dialog:
    if row.get("messages") is not None:
        return _spoken(tidy_messages(row["messages"], "messages"), row)
    if row.get("conversations") is not None:
        system = [{"role": "system", "content": row["system"]}] if _said(row.get("system")) else []
        return _spoken(system + tidy_messages(row["conversations"], "conversations"), row)
    if row.get("instruction") is not None:
        return _spoken(_alpaca(row), row)
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or completion is None:
        raise BadRow(f'has no "{"prompt" if prompt is None else "completion"}"')
    return _joined(prompt, completion, "completion", row)


def _joined(prompt: Any, completion: Any, name: str, row: Mapping[str, Any]) -> Dialog:
    """A prompt and its completion, each a text or messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRow(f'"{name}" is empty')
        return Dialog(prompt=prompt, completion=completion)
    asked = _turns(prompt, "prompt", "user")
    return _spoken(asked + _turns(completion, name, ASSISTANT), row, len(asked))


def _turns(given: Any, name: str, role: str) -> list[dict[str, Any]]:
    """The messages of a field; a text is one message of this role."""
    return [{"role": role, "content": given}] if isinstance(given, str) else tidy_messages(given, name)


def _spoken(messages: list[dict[str, Any]], row: Mapping[str, Any], first: int = 0) -> Dialog:
    tools = row.get("tools")
    tools = parsed(tools) if isinstance(tools, str) else tools
    return Dialog(tuple(messages), first, tools or None)


def _said(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts = {name: row.get(name) or "" for name in ("instruction", "input", "output", "system")}
    wrong = [name for name, text in texts.items() if not isinstance(text, str)]
    if wrong:
        raise BadRow(f'"{wrong[0]}" is not a text')
    if not texts["output"]:
        raise BadRow('"output" is empty')
    asked = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    turns = [(asked, texts["output"])]
    history = row.get("history") or []
    for turn in reversed(history) if isinstance(history, list) else [None]:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(each, str) for each in turn):
            raise BadRow('"history" is not a list of questions with their answers')
        turns.insert(0, (turn[0], turn[1]))
    found = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    for question, answer in turns:
        found += [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
    return found


def _pair(row: Mapping[str, Any]) -> Example:
    prompt = row.get("prompt")
    both: dict[str, Any] = {name: row.get(name) for name in ("chosen", "rejected")}
    for name, answer in both.items():
        if not isinstance(answer, str | list) or not answer:
            raise BadRow(f'"{name}" is neither a text nor messages')
    if both["chosen"] == both["rejected"]:
        raise BadRow('"chosen" and "rejected" are the same')
    labels, margin = (True, False), _margin(row.get("margin"))
    if all(isinstance(answer, str) for answer in both.values()):
        if prompt is None:
            prompt = _shared_text(both["chosen"], both["rejected"])
            both = {name: answer[len(prompt) :] for name, answer in both.items()}
        dialogs = tuple(_joined(prompt, answer, name, row) for name, answer in both.items())
        return Example(dialogs, labels, margin)
    better, worse = (_turns(answer, name, ASSISTANT) for name, answer in both.items())
    # Messages that do not begin with the assistant are the whole conversation, and already contain the prompt.
    if prompt is not None and better[0]["role"] == worse[0]["role"] == ASSISTANT:
        asked = _turns(prompt, "prompt", "user")
        better, worse = asked + better, asked + worse
    first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(better, worse, strict=False)))
    if first == min(len(better), len(worse)):
        raise BadRow("of the two dialogs one is the beginning of the other")
    return Example((_spoken(better, row, first), _spoken(worse, row, first)), labels, margin)


def _margin(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_MARGIN:
        raise BadRow('"margin" is not a finite number')
    return float(value)


def _shared_text(one: str, other: str) -> str:
    """The common prefix of two texts, cut at a word boundary."""
    shared = common_prefix(one, other)
    return shared[: max(shared.rfind(" "), shared.rfind("\n") + 1, 0)]


def _prompt(row: Mapping[str, Any]) -> Dialog:
    prompt = row.get("prompt")
    if prompt is None:  # Parquet gives every column to every row
        prompt = row.get("messages")
    if isinstance(prompt, str) and prompt:
        return Dialog(prompt=prompt)
    if prompt is None or prompt == "":
        raise BadRow('has no "prompt"')
    return _spoken(tidy_messages(prompt, "prompt"), row)
