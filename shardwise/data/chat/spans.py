"""The text of a dialog, and the spans of it that are the assistant's.

A template with `{% generation %}` blocks marks them itself. For any other template, an answer is the text that the template adds
to the prompt: the conversation is rendered up to each answer, as a prompt, and again with the answer, and both must be prefixes of
the whole text. So a span begins where generation would, and ends with the token that ends the turn; white space after that token
belongs to the template. Some templates close a text with one more token, which is absent when the conversation goes on: it is not
learned, unless the turn has no end token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from shardwise.data.chat.messages import ASSISTANT, BadRow, common_prefix
from shardwise.data.chat.rows import Dialog
from shardwise.data.chat.template import ChatTemplate, Span
from shardwise.run.problems import UserError

Learn = Literal["all", "last"]
"""Which of the assistant's messages are learned."""


class Renderer:
    """Renders dialogs with a template; `ends` are the names of tokens that may end a turn."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str], learn: Learn = "all") -> None:
        self.template, self.ends, self.learn = template, tuple(ends), learn

    def prompt(self, dialog: Dialog) -> str:
        """The text of a dialog up to the answer."""
        return self._render(dialog.messages, dialog.tools, True) if dialog.messages else dialog.prompt

    def whole(self, dialog: Dialog) -> tuple[str, list[Span]]:
        """The text of a dialog and the spans to learn, none of them empty."""
        if not dialog.messages:
            start = len(dialog.prompt)
            return dialog.prompt + dialog.completion, [(start, start + len(dialog.completion))]
        answers = [n for n, message in enumerate(dialog.messages) if message["role"] == ASSISTANT]
        wanted = [n for n in answers if n >= dialog.first and dialog.messages[n].get("weight", 1) != 0]
        if not wanted:
            raise BadRow("has no message of the assistant to learn")
        if self.learn == "last":
            wanted = wanted[-1:]
        if self.template.has_blocks:
            return self._by_blocks(dialog, answers, wanted)
        text = self._render(dialog.messages, dialog.tools, False)
        return text, [self._answer(dialog, number, text) for number in wanted]

    def _render(self, messages: Sequence[dict[str, Any]], tools: Any, prompt: bool) -> str:
        try:
            return self.template.render(messages, {"tools": tools}, prompt)
        except UserError as e:
            raise BadRow(str(e)) from None

    def _by_blocks(self, dialog: Dialog, answers: list[int], wanted: list[int]) -> tuple[str, list[Span]]:
        try:
            text, blocks = self.template.render_blocks(dialog.messages, {"tools": dialog.tools})
        except UserError as e:
            raise BadRow(str(e)) from None
        if wanted != answers:
            if len(blocks) != len(answers):
                reason = "the template's generation blocks are not one for each answer, so some cannot be left out"
                raise BadRow(reason, f"{len(blocks)} blocks, {len(answers)} answers")
            blocks = [blocks[answers.index(number)] for number in wanted]
        return text, [(start, stop) for start, stop in blocks if start < stop]

    def _answer(self, dialog: Dialog, number: int, text: str) -> Span:
        """The span of one answer in the text of the whole dialog."""
        messages, tools = dialog.messages, dialog.tools
        before = self._render(messages[:number], tools, True)
        last = number + 1 == len(messages)
        after = text if last else self._render(messages[: number + 1], tools, False)
        if not (after.startswith(before) and text.startswith(before)):
            wrong = after if not after.startswith(before) else text
            self._refuse(
                number, "what the template writes before an answer is not what it asks for it with", before, wrong
            )
        start = len(before)
        # The text after the answer shows where the turn ends, as opposed to the whole text.
        longer = self._with_another(messages, tools, text) if last else text
        if longer.startswith(after):
            return start, self._end_of_turn(after, start, len(after))
        shared = len(common_prefix(after, longer))
        stop = self._last_end(after, start, shared)
        if last:
            closes = stop and after[stop:].strip() in self.ends
            return start, stop if closes else self._end_of_turn(after, start, len(after))
        stop = stop or shared
        if stop <= start or not text.endswith(after[stop:]):
            self._refuse(number, "the template writes an answer otherwise when the conversation goes on", after, longer)
        return start, stop

    def _with_another(self, messages: Sequence[dict[str, Any]], tools: Any, text: str) -> str:
        """The text with one more user message; the text itself if the template refuses it."""
        try:
            return self.template.render([*messages, {"role": "user", "content": "?"}], {"tools": tools}, False)
        except UserError:
            return text

    def _end_of_turn(self, text: str, start: int, stop: int) -> int:
        """The end of a turn, without white space after the token that ends it."""
        said = text[start:stop].rstrip()
        return start + len(said) if said.endswith(self.ends) else stop

    def _last_end(self, text: str, start: int, stop: int) -> int:
        """The end of the last token between `start` and `stop` that may end a turn; 0 if there is none."""
        found = [(at, at + len(name)) for name in self.ends if (at := text.rfind(name, start, stop)) >= 0]
        return max((stop for _, stop in found), default=0)

    def _refuse(self, number: int, reason: str, one: str, other: str) -> None:
        at = len(common_prefix(one, other))
        seen = f"{one[at : at + 24]!r} and {other[at : at + 24]!r} after {one[max(0, at - 24) : at]!r}"
        hint = "" if self.learn == "last" else "; --learn last leaves earlier answers out"
        raise BadRow(f"{reason}{hint}", f"message {number + 1}, {seen}")
