"""Chat templates: a conversation to the text that a model was taught to continue, in Jinja's sandbox.

A template comes with the tokenizer's files and is written by whoever published the model, so it may read what it is given and
nothing else. The environment is that of `transformers`, since templates are written against it. Without one, lines of "role:
content" do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardwise.data.tokenizer import Tokenizer
from shardwise.run import Problem, UserError

FILE = "chat_template.jinja"
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
"""For models that were taught no conversation."""
Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained on; for a prompt it is what stands inside."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template with the special tokens that it may name."""

    def __init__(self, source: str, special: Mapping[str, str] | None = None, where: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._special = dict(special or {})
        try:
            self._template = environment.from_string(source)
        except TemplateError as e:
            raise UserError(Problem(f"is not a chat template that Jinja can read: {e}", where=where)) from None

    def render(self, messages: Sequence[Message], more: Mapping[str, Any] | None = None) -> str:
        """The prompt of a conversation, up to where the assistant goes on. `more` are a template's own switches. Raises
        `UserError` where the template refuses the messages or cannot cope with them."""
        given = {**self._special, "tools": None, "documents": None, "add_generation_prompt": True, **(more or {})}
        try:
            return self._template.render(**{**given, "messages": list(messages)})
        except TemplateError as e:
            raise UserError(f"the chat template refuses these messages: {e.message}") from None
        # A template is a program that someone else wrote, and the messages may be of any form.
        except Exception as e:
            raise UserError(f"the chat template cannot take these messages: {type(e).__name__}: {e}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def load_template(folder: Path, tokenizer: Tokenizer, given: str | Path | None = None) -> ChatTemplate:
    """The template of a checkpoint: the file that was given, or one beside the tokenizer: its own file, or the `chat_template` of
    a JSON file, where a list of several has one called "default"."""
    special = {f"{role}_token": name for role, (name, _) in tokenizer.special_tokens.items()}
    if given is not None:
        return ChatTemplate(_read(Path(given)), special, str(given))
    if (folder / FILE).is_file():
        return ChatTemplate(_read(folder / FILE), special, str(folder / FILE))
    for name in ("tokenizer_config.json", "chat_template.json"):
        source = _from_json(folder / name)
        if source is not None:
            return ChatTemplate(source, special, str(folder / name))
    return ChatTemplate(PLAIN, special)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(Problem(f"cannot be read: {e.strerror}", where=str(path))) from None
    except UnicodeDecodeError:
        raise UserError(Problem("is not UTF-8", where=str(path))) from None


def _from_json(path: Path) -> str | None:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    found = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(found, list):
        named = {each["name"]: each["template"] for each in found if isinstance(each, dict) and len(each) == 2}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None
