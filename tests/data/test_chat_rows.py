"""Rows of every published form, understood or skipped with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.data.chat.messages import BadRow
from shardwise.data.chat.rows import Dialog, form_of, read_row

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
B = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "form", "dialogs"),
    [
        ({"messages": [U, A]}, "chat", [Dialog((U, A))]),
        ({"messages": [U, A], "tools": '[{"name": "f"}]'}, "chat", [Dialog((U, A), 0, [{"name": "f"}])]),
        ({"messages": '[{"role": "user", "content": "q"}]'}, "chat", [Dialog((U,))]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}], "name": None}, A]},
            "chat",
            [Dialog((U, A))],
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            "chat",
            [Dialog(({"role": "system", "content": "s"}, U, A))],
        ),
        ({"instruction": "q", "input": "", "output": "a"}, "chat", [Dialog((U, A))]),
        (
            {"instruction": "x", "input": "y", "output": "a", "history": [["q", "a"]]},
            "chat",
            [Dialog((U, A, {"role": "user", "content": "x\n\ny"}, A))],
        ),
        ({"prompt": "q", "completion": "a"}, "chat", [Dialog(prompt="q", completion="a")]),
        ({"prompt": [U], "completion": [A]}, "chat", [Dialog((U, A), 1)]),
        ({"prompt": "q", "completion": [A]}, "chat", [Dialog((U, A), 1)]),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "pairs", [Dialog(prompt="q", completion=c) for c in "ab"]),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: yes", "rejected": "\n\nHuman: q\n\nAssistant: yep"},
            "pairs",
            [Dialog(prompt="\n\nHuman: q\n\nAssistant:", completion=c) for c in (" yes", " yep")],
        ),
        ({"prompt": [U], "chosen": [A], "rejected": [B]}, "pairs", [Dialog((U, A), 1), Dialog((U, B), 1)]),
        ({"prompt": "q", "chosen": [U, A], "rejected": [U, B]}, "pairs", [Dialog((U, A), 1), Dialog((U, B), 1)]),
        (
            {"chosen": [U, A, U, A], "rejected": [U, A, U, B]},
            "pairs",
            [Dialog((U, A, U, A), 3), Dialog((U, A, U, B), 3)],
        ),
        ({"prompt": "q", "completion": "a", "label": False}, "labels", [Dialog(prompt="q", completion="a")]),
        ({"prompt": "q", "answer": 4}, "prompts", [Dialog(prompt="q")]),
        ({"prompt": [U], "answer": 4}, "prompts", [Dialog((U,))]),
    ],
)
def test_forms(row: dict[str, Any], form: str, dialogs: list[Dialog]) -> None:
    assert form_of(row) == form
    found = read_row(row, form)  # type: ignore[arg-type]
    assert list(found.dialogs) == dialogs
    assert found.labels == {"pairs": (True, False), "labels": (False,)}.get(form, (True,))


def test_a_function_call_of_sharegpt() -> None:
    said = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": "{\\"x\\": 1}"}'},
    ]
    (dialog,) = read_row({"conversations": said}, "chat").dialogs
    assert dialog.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize(
    ("row", "form", "reason"),
    [
        ({"messages": []}, "chat", "not a list of messages"),
        ({"messages": ["hi"]}, "chat", "not an object"),
        ({"messages": [{"content": "hi"}]}, "chat", "no role"),
        ({"messages": [{"role": "user"}]}, "chat", "no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "chat", "neither a text nor"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "chat", "not text"),
        ({"conversations": [{"from": "cat", "value": "miau"}]}, "chat", "nobody is known"),
        ({"instruction": "q", "output": ""}, "chat", "is empty"),
        ({"instruction": ["q"], "output": "a"}, "chat", "not a text"),
        ({"prompt": "q"}, "chat", 'has no "completion"'),
        ({"prompt": "q", "completion": ""}, "chat", "is empty"),
        ({"chosen": "a", "rejected": "a"}, "pairs", "the same"),
        ({"chosen": "a"}, "pairs", '"rejected" is neither'),
        ({"chosen": [U, A], "rejected": [U]}, "pairs", "beginning of the other"),
        ({"prompt": "q", "completion": "a", "label": "good"}, "labels", "neither true nor false"),
        ({"prompt": ""}, "prompts", 'has no "prompt"'),
        ({"prompt": None}, "prompts", 'has no "prompt"'),
        ({"instruction": "q", "output": "a", "history": 5}, "chat", '"history" is not a list'),
        ({"instruction": "q", "output": "a", "history": {"q": "a"}}, "chat", '"history" is not a list'),
        *(
            (
                {"prompt": "q", "chosen": "a", "rejected": "b", "margin": margin},
                "pairs",
                '"margin" is not a finite number',
            )
            for margin in (1e39, -1e39, 10**400, float("inf"), float("nan"), True, "1")
        ),
        ([1], "chat", "not a JSON object"),
    ],
)
def test_reasons(row: Any, form: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        read_row(row, form)


def test_a_prompt_of_null_is_no_prompt() -> None:
    assert read_row({"prompt": None, "messages": [U]}, "prompts").dialogs == (Dialog((U,)),)


@pytest.mark.parametrize("margin", [0, -2.5, 3e38])
def test_margins(margin: float) -> None:
    assert read_row({"prompt": "q", "chosen": "a", "rejected": "b", "margin": margin}, "pairs").margin == margin


def test_a_row_of_no_form() -> None:
    with pytest.raises(BadRow, match="it has text"):
        form_of({"text": "hi"})
