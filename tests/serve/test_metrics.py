"""Figures for Prometheus: its text format, and numbers that add up."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from fake_engine import FakeEngine, letters
from patience import HANG_SECONDS
from running import Running, exchange, post, running

from shardwise.serve.request import Stats
from shardwise.serve.server.metrics import Metrics
from shardwise.serve.service import Service

LINE = re.compile(r"(shardwise_[a-z_]+)(\{[a-z]+=\"[^\"]*\"(?:,[a-z]+=\"[^\"]*\")*\})? (-?[0-9.e+-]+)")


@pytest.fixture
def server() -> Iterator[Running]:
    with running(FakeEngine(script=letters)) as server:
        yield server


def figures(server: Running) -> dict[str, float]:
    """Every figure by its name and labels; each is announced with its type before."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=HANG_SECONDS) as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    found, types = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            types[name] = kind
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            base = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert types.get(match[1]) in ("counter", "gauge") or types[base] == "histogram"
            found[match[1] + (match[2] or "")] = float(match[3])
    return found


def test_guesses_are_counted_by_their_place() -> None:
    stats = Stats(drafted_at=(9, 8), accepted_at=(6, 2))
    service = SimpleNamespace(stats=stats, unfinished=0, waiting=0, healthy=True)
    text = Metrics().text(cast(Service, service))
    assert 'shardwise_draft_tokens_total{position="2"} 8\n' in text
    assert 'shardwise_draft_tokens_accepted_total{position="1"} 6\n' in text


def test_figures_add_up(server: Running) -> None:
    for tokens in (1, 5, 9):
        exchange(server, post("/v1/completions", {"prompt": "abc", "max_tokens": tokens, "stream": tokens == 5}))
    exchange(server, post("/v1/completions", {"prompt": 3}))
    exchange(server, post("/some/path", {}))
    server.idle()
    found = figures(server)
    assert found['shardwise_responses_total{path="/v1/completions",status="200"}'] == 3
    assert found['shardwise_responses_total{path="/v1/completions",status="400"}'] == 1
    assert found['shardwise_responses_total{path="other",status="404"}'] == 1
    assert found["shardwise_prompt_tokens_total"] == 9
    assert found["shardwise_generation_tokens_total"] == 15
    assert found["shardwise_engine_tokens_generated_total"] == 15
    assert (
        found["shardwise_pages_used"]
        == found["shardwise_sequences_running"]
        == found["shardwise_requests_waiting"]
        == 0
    )
    assert found["shardwise_pages"] == server.engine.pages
    assert found["shardwise_healthy"] == 1
    for name, count in (("time_to_first_token", 3), ("time_per_output_token", 2), ("request", 3)):
        buckets = [value for key, value in found.items() if key.startswith(f"shardwise_{name}_seconds_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f"shardwise_{name}_seconds_count"] == count
        assert found[f"shardwise_{name}_seconds_sum"] >= 0


def test_the_time_of_a_token_is_that_of_one_choice(server: Running) -> None:
    """Three answers of one token each, side by side: none has a second one to wait for."""
    exchange(server, post("/v1/completions", {"prompt": "abc", "max_tokens": 1, "n": 3}))
    server.idle()
    assert figures(server)["shardwise_time_per_output_token_seconds_count"] == 0
