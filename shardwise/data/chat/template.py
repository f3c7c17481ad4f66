"""Chat templates: render a conversation as the text that a model was trained to continue, in Jinja's sandbox.

A template comes with the tokenizer's files and is written by whoever published the model, so it may read its arguments and nothing
else. The environment matches that of `transformers`, since templates are written for it. Without a template, each message is a
line of "role: content". Serving renders prompts; building data sets renders whole conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardwise.data.chat.files import choose_template, read_text
from shardwise.data.tokenizer import Tokenizer
from shardwise.run import Problem, UserError

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models that were not trained on conversations."""
Message = Mapping[str, Any]
Span = tuple[int, int]
"""The start and end of a piece of text, in characters."""

_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_START, _STOP = "\ufdd0", "\ufdd1"  # Unicode noncharacters, reserved for a program's internal use


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the text a model is trained on; in a prompt it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, stop = (nodes.Output([nodes.Name(f"generation_{edge}", "load")]) for edge in ("start", "stop"))
        return nodes.Scope([start, *body, stop]).set_lineno(line)


class _Mark:
    """A character that a template writes where a block begins or ends, and how often it was written."""

    def __init__(self, letter: str) -> None:
        self.letter, self.written = letter, 0

    def __str__(self) -> str:
        self.written += 1
        return self.letter


class ChatTemplate:
    """One template with the special tokens that it may use. `today` fixes its current time, so that a data set has one date."""

    def __init__(
        self, source: str, special: Mapping[str, str] | None = None, where: str = "", today: datetime | None = None
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: (today or datetime.now()).strftime(form)
        self.source = source
        self.has_blocks = bool(_BLOCK.search(source))
        """Whether the template itself marks the text to train on."""
        self._special = dict(special or {})
        self._made_of = source, self._special, where, today
        try:
            self._template = environment.from_string(source)
        except TemplateError as e:
            raise UserError(Problem(f"is not a chat template that Jinja can read: {e}", where=where)) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, self._made_of

    def render(self, messages: Sequence[Message], more: Mapping[str, Any] | None = None, prompt: bool = True) -> str:
        """The text of a conversation; as a `prompt`, it ends where the assistant's answer begins. `more` are further template
        variables. Raises `UserError` if the template refuses the messages or fails on them."""
        given = {**self._special, "tools": None, "documents": None, "add_generation_prompt": prompt, **(more or {})}
        try:
            return self._template.render(**{**given, "messages": list(messages)})
        except TemplateError as e:
            raise UserError(f"the chat template refuses these messages: {e.message}") from None
        # A template is a program that someone else wrote, and the messages may be of any form.
        except Exception as e:
            raise UserError(f"the chat template cannot take these messages: {type(e).__name__}: {e}") from None

    def render_blocks(
        self, messages: Sequence[Message], more: Mapping[str, Any] | None = None
    ) -> tuple[str, list[Span]]:
        """The text of a whole conversation, and the spans of its generation blocks."""
        start, stop = _Mark(_START), _Mark(_STOP)
        marks = {"generation_start": start, "generation_stop": stop}
        marked = self.render(messages, {**(more or {}), **marks}, prompt=False)
        if (marked.count(_START), marked.count(_STOP)) != (start.written, stop.written):
            raise UserError("the messages hold U+FDD0 or U+FDD1, which are no characters of a text")
        pieces, spans, begun, length = [], [], 0, 0
        for piece in re.split(f"([{_START}{_STOP}])", marked):
            if piece == _START:
                begun = length
            elif piece == _STOP:
                spans.append((begun, length))
            else:
                pieces.append(piece)
                length += len(piece)
        return "".join(pieces), spans


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own `tojson` escapes HTML, which models have not seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def load_template(
    folder: Path | None,
    tokenizer: Tokenizer,
    given: str | Path | None = None,
    name: str = "",
    today: datetime | None = None,
) -> ChatTemplate:
    """The template of a checkpoint or tokenizer: the given file, or the one beside the tokenizer, by `name` if there are
    several. Raw bytes have no folder and no template."""
    special = {f"{role}_token": token for role, (token, _) in tokenizer.special_tokens.items()}
    if given is not None:
        return ChatTemplate(read_text(Path(given)), special, str(given), today)
    if folder is None and name:
        message = "raw bytes have no chat template; --tokenizer names the folder that holds it"
        raise UserError(Problem(message, "--template-name"))
    source, where = (choose_template(folder, name) if folder else None) or (PLAIN, "")
    return ChatTemplate(source, special, where, today)
