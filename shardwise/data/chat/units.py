"""Units of work for a set of conversations: rows become text with spans, text becomes tokens with a mask, in batches. A row that
cannot be used is written to a separate list with the reason, and the build goes on with the others."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.chat.messages import BadRow
from shardwise.data.chat.reader import Row, RowReader
from shardwise.data.chat.rows import KINDS, Dialog, Example, Form, read_row
from shardwise.data.chat.spans import Renderer
from shardwise.data.chat.template import Span
from shardwise.data.encode import Job, Report, UnitFiles, UnitResult
from shardwise.data.inputs import Chunk, Unit
from shardwise.data.shards import DTYPES, ENDS, LABELS, LENGTHS, MARGINS, PROMPTS, ROW_ENDS, dtype_for

_BATCH = 2**19
"""Characters tokenised in one call."""


@dataclass(frozen=True)
class ChatJob(Job):
    """What all units share: besides inputs and tokenizer, the form of rows and the renderer."""

    form: Form
    renderer: Renderer
    max_tokens: int = 0
    """Documents are cut off after this many tokens, longer prompts left out; 0: no limit."""

    @property
    def kind(self) -> str:
        return KINDS[self.form]

    def settings(self) -> dict[str, Any]:
        """Further settings that determine the result of a build."""
        found = {"form": self.form, "template": self.renderer.template.source}
        return found | {"learn": self.renderer.learn, "max_tokens": self.max_tokens}

    def encode(self, unit: Unit, report: Report) -> UnitResult:
        files = UnitFiles(self.folder, unit.number)
        paths = (
            files.tokens,
            files.mask,
            files.ends,
            files.prompts,
            files.labels,
            files.margins,
            files.rows,
            files.row_ends,
            files.skipped,
        )
        drafts = {path: path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in (*paths, files.record)}
        total, reported = sum(chunk.bytes for chunk in unit.chunks), 0

        def add_progress(consumed: int, tokens: int) -> None:
            nonlocal reported
            consumed = min(consumed, total - reported)  # sizes of row groups are estimates
            reported += consumed
            report(consumed, tokens)

        try:
            with ExitStack() as stack:
                out = {path.suffix[1:]: stack.enter_context(open(drafts[path], "wb")) for path in paths}
                batches = _Batches(self, out, add_progress)
                for chunk in unit.chunks:
                    reader = RowReader(self.inputs[chunk.input], chunk)
                    for row in reader.rows():
                        batches.add(row, chunk)
                    batches.flush()
                    batches.lines.append(reader.lines)
            done = batches.result()
            drafts[files.record].write_text(json.dumps(asdict(done)), encoding="utf-8")
            for path, draft in drafts.items():
                os.replace(draft, path)
        finally:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
        add_progress(total, 0)
        return done


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
        self.tokens = self.documents = self.learned = self.truncated = self.text_bytes = self.row_bytes = 0
        self.margins = 0
        self.reasons: Counter[str] = Counter()
        self.lines: list[int] = []
        self._waiting: list[tuple[Row, Chunk, Example, list[_Text]]] = []
        self._characters = self._consumed = 0

    def result(self) -> UnitResult:
        skipped = sum(self.reasons.values())
        return UnitResult(
            self.tokens, self.documents, skipped, self.text_bytes, self.learned, self.truncated, dict(self.reasons),
            self.lines, self.row_bytes, self.margins,
        )  # fmt: skip

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
        if self._characters >= _BATCH:
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
        self.reasons[bad.reason] += 1
        line = {"input": chunk.input, "chunk": chunk.start, "line": row.line, "reason": str(bad)}
        self.out["skipped"].write(json.dumps(line).encode() + b"\n")

    def flush(self) -> None:
        before = self.tokens
        texts = [text for *_, own in self._waiting for text in own]
        encoded = iter(self.job.tokenizer.encode_spans([t.text for t in texts], [t.spans for t in texts]))
        for row, chunk, example, own in self._waiting:
            found = [next(encoded) for _ in own]
            try:
                self._write(row, example, [self._finished(*each) for each in zip(own, found, strict=True)])
                self.text_bytes += sum(len(text.text.encode("utf-8")) for text in own)
            except BadRow as e:
                self._skip(row, chunk, e)
        self.report(self._consumed, self.tokens - before)
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
            self.row_bytes += len(source)
            self.out["rows"].write(source)
            self.out["row_ends"].write(np.array(self.row_bytes, LENGTHS[ROW_ENDS]).tobytes())
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
            self.truncated += len(whole) > len(ids)
            self._append(ids, mask, prompt, label)
            self.out["margins"].write(np.array(example.margin or 0.0, LENGTHS[MARGINS]).tobytes())
        self.margins += example.margin is not None

    def _append(self, ids: NDArray[Any], mask: NDArray[np.uint8], prompt: int, label: bool) -> None:
        self.out["tokens"].write(ids.tobytes())
        self.out["mask"].write(mask.tobytes())
        self.tokens += len(ids)
        self.documents += 1
        self.learned += int(mask.sum())
        self.out["ends"].write(np.array(self.tokens, ENDS).tobytes())
        self.out["prompts"].write(np.array(prompt, LENGTHS[PROMPTS]).tobytes())
        self.out["labels"].write(np.array(label, LENGTHS[LABELS]).tobytes())
