"""Sets up a build of conversations: finds the form of the rows and the template that renders them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from shardwise.data.chat.messages import BadRow
from shardwise.data.chat.reader import Row, RowReader, place
from shardwise.data.chat.rows import Form, form_of
from shardwise.data.chat.spans import Learn, Renderer
from shardwise.data.chat.template import load_template
from shardwise.data.chat.units import ChatJob
from shardwise.data.encode import Job
from shardwise.data.inputs import Chunk, Input
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
    folder = path if path.is_dir() else path.parent
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
