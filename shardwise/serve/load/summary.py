"""The load generator's records as the figures of a load (`schedules/serving/figures.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.schedules.serving.figures import Limits, LoadFigures, RequestTimes
from shardwise.serve.load.run import Record


def made_of(records: Sequence[Record]) -> list[RequestTimes]:
    """The latencies of the requests that were answered."""
    start = min((record.answer.sent - record.due for record in records), default=0.0)
    found = []
    for record in records:
        answer = record.answer
        if answer.error or not answer.times:
            continue
        due, (prompt, output) = start + record.due, answer.tokens
        first, last = answer.times[0], answer.times[-1]
        found.append(
            RequestTimes(
                due=record.due,
                late=(answer.sent - due) * 1e3,
                ttft=(first - due) * 1e3,
                tpot=(last - first) / (output - 1) * 1e3 if output > 1 else None,
                e2e=(last - due) * 1e3,
                input_tokens=prompt,
                output_tokens=output,
                gaps=tuple((b - a) * 1e3 for a, b in zip(answer.times, answer.times[1:], strict=False)),
            )
        )
    return found


def summary(records: Sequence[Record], limits: Limits) -> LoadFigures:
    """The figures of all records."""
    started = min((record.answer.sent for record in records), default=0.0)
    seconds = max((record.answer.ended for record in records), default=0.0) - started
    return LoadFigures(tuple(made_of(records)), len(records), seconds, limits, _errors(records))


def _errors(records: Sequence[Record]) -> dict[str, int]:
    """The errors and their counts, the most common first."""
    texts = [r.answer.error or "an answer without a token" for r in records if r.answer.error or not r.answer.times]
    return dict(Counter(texts).most_common(10))
