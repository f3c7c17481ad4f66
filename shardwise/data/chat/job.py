"""A build of conversations. It finds the form of the rows and the template that renders them. In units of work, rows then become
text with spans, and text becomes tokens with a mask, in batches. A row that cannot be used is written to a separate list with the
reason, and the build goes on with the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardwise.data.chat.messages import BadRow
from shardwise.data.chat.reader import Row, RowReader, place
from shardwise.data.chat.rows import KINDS, Dialog, Example, Form, form_of, read_row
from shardwise.data.chat.spans import Learn, Renderer
from shardwise.data.chat.template import Span, load_template
from shardwise.data.encode import BATCH, Job, Report, UnitResult
from shardwise.data.inputs import Chunk, Input, Unit
from shardwise.data.shards import DTYPES, ENDS, LABELS, LENGTHS, MARGINS, PROMPTS, ROW_ENDS, dtype_for
from shardwise.data.tokenizer import BYTE
from shardwise.run.problems import Problem, UserError

_LOOKED_AT = 1000
"""Rows to search for one with a known form."""


@dataclass(frozen=True)
class ChatOptions:
    """How rows are understood and rendered."""

    form: Form | None = None
    """None: the form of the first row that has one."""
    template: str | Path | None = None
    """A file to use instead of the tokenizer's template."""
    template_name: str = ""
    """The name of the template to use, if the tokenizer has several."""
    learn: Learn = "all"
    max_tokens: int = 0


def chat_job(job: Job, options: ChatOptions, tokenizer: str | Path) -> ChatJob:
    """The job of a set of conversations, made from a general job; `tokenizer` is the path of the job's tokenizer."""
    problems = []
    if options.max_tokens < 0 or options.max_tokens == 1:
        problems.append(Problem(f"{options.max_tokens} must be at least 2, or 0 for no limit", "--max-tokens"))
    path = Path(tokenizer)
    folder = None if str(tokenizer) == BYTE else path if path.is_dir() else path.parent
    try:
        template = load_template(folder, job.tokenizer, options.template, options.template_name, datetime.now())
    except UserError as e:
        problems += e.problems
    form = options.form
    if form is None:
        try:
            form = _first_form(job.inputs)
        except UserError as e:
            problems += e.problems
    if problems or form is None:
        raise UserError(*problems)
    job.tokenizer.template = template.source
    renderer = Renderer(template, sorted(job.tokenizer.added), options.learn)
    return ChatJob(job.inputs, job.field, job.tokenizer, job.folder, form, renderer, options.max_tokens)


def _first_form(inputs: Sequence[Input]) -> Form:
    """The form of the first row that has one."""
    first = None
    for file, row in islice(_rows(inputs), _LOOKED_AT):
        try:
            if row.bad is not None:
                raise row.bad
            return form_of(row.value)
        except BadRow as e:
            first = first or Problem(str(e), where=place(file, row.line))
    raise UserError(first or Problem(f"there is not a single row in {', '.join(file.path for file in inputs)}"))


def _rows(inputs: Sequence[Input]) -> Iterator[tuple[Input, Row]]:
    for number, file in enumerate(inputs):
        groups = [Chunk(number, group, group + 1, 1) for group in range(len(file.row_groups))]
        for chunk in groups if file.kind == "parquet" else [Chunk(number, 0, file.bytes, file.bytes)]:
            for row in RowReader(file, chunk).rows():
                yield file, row


@dataclass(frozen=True)
class ChatJob(Job):
    """What all units share: besides inputs and tokenizer, the form of rows and the renderer."""

    form: Form
    renderer: Renderer
    max_tokens: int = 0
    """Documents are cut off after this many tokens, longer prompts left out; 0: no limit."""

    files: ClassVar = ("tokens", "mask", "ends", "prompts", "labels", "margins", "rows", "row_ends", "skipped")

    @property
    def kind(self) -> str:
        return KINDS[self.form]

    def settings(self) -> dict[str, Any]:
        """Further settings that determine the result of a build."""
        found = {"form": self.form, "template": self.renderer.template.source}
        return found | {"learn": self.renderer.learn, "max_tokens": self.max_tokens}

    def write(self, unit: Unit, out: Mapping[str, IO[bytes]], report: Report) -> UnitResult:
        batches = _Batches(self, out, report)
        for chunk in unit.chunks:
            reader = RowReader(self.inputs[chunk.input], chunk)
            for row in reader.rows():
                batches.add(row, chunk)
            batches.flush()
            batches.done.lines.append(reader.lines)
        return batches.done


@dataclass(slots=True)
class _Text:
    """A dialog as text, before it is tokenised."""

    text: str
    spans: list[Span]
    plain: bool
    """Not rendered by a template, which would have put in the special tokens."""


class _Batches:
    """Collects rows, tokenises them in batches and writes the results."""

    def __init__(self, job: ChatJob, out: Mapping[str, IO[bytes]], report: Report) -> None:
        self.job, self.out, self.report = job, out, report
        self.dtype = DTYPES[dtype_for(job.tokenizer.vocab)]
        self.special = np.array(sorted({*job.tokenizer.added.values(), job.tokenizer.end}))
        self.done = UnitResult()
        self._waiting: list[tuple[Row, Chunk, Example, list[_Text]]] = []
        self._characters = self._consumed = 0

    def add(self, row: Row, chunk: Chunk) -> None:
        self._consumed += row.consumed
        try:
            if row.bad is not None:
                raise row.bad
            example = read_row(row.value, self.job.form)
            texts = [self._text(dialog) for dialog in example.dialogs]
        except BadRow as e:
            self._skip(row, chunk, e)
            return
        self._waiting.append((row, chunk, example, texts))
        self._characters += sum(len(text.text) for text in texts)
        if self._characters >= BATCH:
            self.flush()

    def _text(self, dialog: Dialog) -> _Text:
        if self.job.form == "prompts":
            text, spans = self.job.renderer.prompt(dialog), list[Span]()
        else:
            text, spans = self.job.renderer.whole(dialog)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise BadRow("holds half of a surrogate pair, which is not text", f"character {e.start + 1}") from None
        return _Text(text, spans, not dialog.messages)

    def _skip(self, row: Row, chunk: Chunk, bad: BadRow) -> None:
        self.done.skipped += 1
        self.done.reasons[bad.reason] = self.done.reasons.get(bad.reason, 0) + 1
        line = {"input": chunk.input, "chunk": chunk.start, "line": row.line, "reason": str(bad)}
        self.out["skipped"].write(json.dumps(line).encode() + b"\n")

    def flush(self) -> None:
        before = self.done.tokens
        texts = [text for *_, own in self._waiting for text in own]
        encoded = iter(self.job.tokenizer.encode_spans([t.text for t in texts], [t.spans for t in texts]))
        for row, chunk, example, own in self._waiting:
            found = [next(encoded) for _ in own]
            try:
                self._write(row, example, [self._finished(*each) for each in zip(own, found, strict=True)])
                self.done.text_bytes += sum(len(text.text.encode("utf-8")) for text in own)
            except BadRow as e:
                self._skip(row, chunk, e)
        self.report(self._consumed, self.done.tokens - before)
        self._waiting, self._characters, self._consumed = [], 0, 0

    def _finished(
        self, text: _Text, encoded: tuple[NDArray[Any], NDArray[np.uint8]]
    ) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Put the tokenizer's prefix before plain texts, and the end token after an answer that does not end with a special
        token."""
        tokenizer = self.job.tokenizer
        ids, mask = encoded[0].astype(self.dtype), encoded[1]
        if text.plain and tokenizer.prefix:
            ids = np.concatenate((np.array(tokenizer.prefix, self.dtype), ids))
            mask = np.concatenate((np.zeros(len(tokenizer.prefix), np.uint8), mask))
        ends_here = bool(text.spans) and text.spans[-1][1] == len(text.text)
        if ends_here and len(ids) and ids[-1] not in self.special:
            ids = np.append(ids, np.array(tokenizer.end, self.dtype))
            mask = np.append(mask, np.uint8(1))
        mask[:1] = 0  # no token before it could predict it
        return ids, mask

    def _write(self, row: Row, example: Example, found: list[tuple[NDArray[Any], NDArray[np.uint8]]]) -> None:
        most = self.job.max_tokens
        if self.job.form == "prompts":
            ids, mask = found[0]
            if not len(ids):
                raise BadRow("is empty as tokens")
            if most and len(ids) > most:
                raise BadRow(f"has more than {most} tokens")
            source = json.dumps(row.value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"
            self.done.row_bytes += len(source)
            self.out["rows"].write(source)
            self.out["row_ends"].write(np.array(self.done.row_bytes, LENGTHS[ROW_ENDS]).tobytes())
            self._append(ids, mask, len(ids), True)
            return
        cut = [(ids[:most], mask[:most]) if most else (ids, mask) for ids, mask in found]
        if not all(mask.any() for _, mask in cut):
            longer = any(mask.any() for _, mask in found)
            raise BadRow(f"has nothing to learn within {most} tokens" if longer else "has no token to learn")
        prompt = min(int(mask.argmax()) for _, mask in cut)
        if len(cut) == 2:
            one, other = cut[0][0][:prompt], cut[1][0][:prompt]
            if not np.array_equal(one, other):
                prompt = int((one != other).argmax())
        for (ids, mask), (whole, _), label in zip(cut, found, example.labels, strict=True):
            self.done.truncated += len(whole) > len(ids)
            self._append(ids, mask, prompt, label)
            self.out["margins"].write(np.array(example.margin or 0.0, LENGTHS[MARGINS]).tobytes())
        self.done.margins += example.margin is not None

    def _append(self, ids: NDArray[Any], mask: NDArray[np.uint8], prompt: int, label: bool) -> None:
        self.out["tokens"].write(ids.tobytes())
        self.out["mask"].write(mask.tobytes())
        self.done.tokens += len(ids)
        self.done.documents += 1
        self.done.learned += int(mask.sum())
        self.out["ends"].write(np.array(self.done.tokens, ENDS).tobytes())
        self.out["prompts"].write(np.array(prompt, LENGTHS[PROMPTS]).tobytes())
        self.out["labels"].write(np.array(label, LENGTHS[LABELS]).tobytes())
