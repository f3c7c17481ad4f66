"""The server's metrics for Prometheus, in its text format, which is simple enough to write without a library: requests, latencies,
and the engine's statistics."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from shardwise.serve.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Histogram:
    """A histogram: how many values were at most each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """The server's counters and histograms."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        """By path and status."""
        self.prompt_tokens = 0
        self.answer_tokens = 0
        self.first_token = Histogram(SECONDS)
        self.each_token = Histogram(TOKEN_SECONDS)
        self.whole = Histogram(SECONDS)

    def text(self, service: Service) -> str:
        """All metrics in Prometheus's text format."""
        stats = service.stats
        lines: list[str] = []
        for name, meaning, values in (
            ("responses_total", "HTTP responses; 499 where the client went away before.", self._responses()),
            ("prompt_tokens_total", "Tokens of answered prompts.", self.prompt_tokens),
            ("generation_tokens_total", "Tokens of answers, as clients got them.", self.answer_tokens),
            ("requests_unfinished", "Requests that are not answered yet.", service.unfinished),
            ("requests_waiting", "Requests without a token yet.", service.waiting),
            ("sequences_running", "Sequences that hold pages.", stats.running),
            ("sequences_waiting", "Sequences that do not yet.", stats.waiting),
            ("pages_used", "Pages of keys and values in use.", stats.pages_used),
            ("pages", "Pages of keys and values in all.", stats.pages),
            ("preemptions_total", "Sequences that lost their pages to others.", stats.preemptions),
            ("prefix_queries_total", "Tokens looked for in the prefix cache.", stats.prefix_queries),
            ("prefix_hits_total", "Tokens found in the prefix cache.", stats.prefix_hits),
            ("engine_tokens_computed_total", "Tokens that the engine computed.", stats.computed_tokens),
            ("engine_tokens_generated_total", "Tokens that the engine generated.", stats.generated_tokens),
            ("draft_tokens_total", "Guesses that were verified, by place.", _places(stats.drafted_at)),
            (
                "draft_tokens_accepted_total",
                "Guesses that were right, as all before them, by place.",
                _places(stats.accepted_at),
            ),
            ("healthy", "1 while requests are taken.", int(service.healthy)),
        ):
            lines += _lines(name, "counter" if name.endswith("_total") else "gauge", meaning, values)
        lines += _histogram("time_to_first_token_seconds", "From a request to its first token.", self.first_token)
        lines += _histogram(
            "time_per_output_token_seconds", "Between tokens, the mean of each request.", self.each_token
        )
        lines += _histogram("request_seconds", "From a request to its last token.", self.whole)
        return "\n".join(lines) + "\n"

    def _responses(self) -> dict[str, float]:
        return {f'{{path="{path}",status="{status}"}}': count for (path, status), count in self.responses.items()}


class Timing:
    """The times of one request, from its arrival on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._first = self._last = 0.0
        self._count = 0

    def tokens(self, count: int) -> None:
        """Record that tokens have arrived."""
        self._last = time.perf_counter()
        self._count += count
        if not self._first:
            self._first = self._last
            self._metrics.first_token.add(self._first - self._start)

    def end(self, prompt: int, answer: int, choices: int) -> None:
        """Record that the request is answered, with this many choices in parallel."""
        self._metrics.prompt_tokens += prompt
        self._metrics.answer_tokens += answer
        self._metrics.whole.add(time.perf_counter() - self._start)
        after_first = self._count / choices - 1
        if after_first > 0:
            self._metrics.each_token.add((self._last - self._first) / after_first)


def _places(counts: Sequence[int]) -> dict[str, float]:
    return {f'{{position="{place}"}}': count for place, count in enumerate(counts, 1)}


def _lines(name: str, kind: str, meaning: str, values: Mapping[str, float] | float) -> Iterator[str]:
    """A metric with its values by their labels, or one without labels."""
    yield f"# HELP shardwise_{name} {meaning}"
    yield f"# TYPE shardwise_{name} {kind}"
    for labels, value in (values if isinstance(values, Mapping) else {"": values}).items():
        yield f"shardwise_{name}{labels} {value}"


def _histogram(name: str, meaning: str, histogram: Histogram) -> Iterator[str]:
    totals = list(accumulate(histogram.counts))
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    buckets = {f'_bucket{{le="{bound}"}}': total for bound, total in zip(bounds, totals, strict=True)}
    yield from _lines(name, "histogram", meaning, buckets | {"_sum": histogram.sum, "_count": totals[-1]})
