"""The load generator: its figures are those of the answers, its client reads whatever way a server sends, failures are counted."""

from __future__ import annotations

import asyncio
import json
import statistics
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, letters
from hypothesis import given
from hypothesis import strategies as st
from running import running

from shardwise.report.load_view import load_page
from shardwise.run import UserError
from shardwise.run.lengths import parse_lengths
from shardwise.schedules.serving.figures import Limits, percentiles
from shardwise.serve.load.client import Address, Answer, Connection
from shardwise.serve.load.run import Load, Progress, Record, run_load, summary

EVENT = b'data: {"choices": [{"text": "a"}], "usage": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"


async def against(parts: list[bytes], ask: Callable[[Address], Awaitable[Answer]]) -> Answer:
    """An answer of a server that sends these bytes, in these parts."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        return await ask(Address.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))


async def ask_once(address: Address) -> Answer:
    connection = await Connection.to(address)
    return await connection.ask(address.request("GET", "/x"), 5.0)


def chunked(body: list[bytes], status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in body) + b"0\r\n\r\n"


def fed(parts: list[bytes]) -> tuple[Connection, Answer]:
    """A connection that got these bytes, in these parts, and the answer."""
    connection = Connection()
    connection._open, connection._transport = True, _Nowhere()  # type: ignore[assignment]

    async def feed() -> Answer:
        asking = asyncio.ensure_future(connection.ask(b"", 5.0))
        await asyncio.sleep(0)
        for part in filter(None, parts):
            connection.data_received(part)
        return await asking

    return connection, asyncio.run(feed())


LINES = {
    "usual": lambda events: events,
    "CRLF": lambda events: events.replace(b"\n", b"\r\n"),
    "no blank": lambda events: events.replace(b"data: ", b"data:"),
    "named": lambda events: events.replace(b"data: ", b": comment\n\nevent: message\ndata: "),
}


@pytest.mark.parametrize("lines", LINES)
@given(st.lists(st.integers(1, 400), max_size=12), st.integers(1, 60))
def test_an_answer_however_it_is_cut(lines: str, cuts: list[int], size: int) -> None:
    whole = LINES[lines](EVENT * 5 + USAGE + DONE)
    body = [whole[at : at + size] for at in range(0, len(whole), size)]  # events across chunks
    sent, at, parts = chunked(body), 0, []
    for cut in cuts:  # chunks across packets
        parts.append(sent[at : at + cut])
        at += cut
    connection, answer = fed([*parts, sent[at:]])
    assert not answer.error
    assert len(answer.times) == 5
    assert answer.tokens == (3, 7)
    assert connection.usable


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_body_up_to_the_end_of_the_connection(version: str) -> None:
    head = f"HTTP/{version} 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n".encode()
    answer = asyncio.run(against([head, EVENT, EVENT[:9], EVENT[9:], USAGE], ask_once))
    assert (answer.error, len(answer.times), answer.tokens) == ("", 2, (3, 7))


@pytest.mark.parametrize(
    ("head", "usable"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_whether_a_connection_is_used_again(head: bytes, usable: bool) -> None:
    connection, answer = fed([head + b"Content-Length: 2\r\n\r\nok"])
    assert not answer.error
    assert (connection.body, connection.usable) == (b"ok", usable)


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize(
    ("choices", "texts"),
    [
        ({"text": "", "logprobs": {"text": 1.5}, "finish_reason": "stop"}, 0),
        ({"text": '"', "logprobs": None, "finish_reason": None}, 1),
        ({"delta": {"role": "assistant", "content": ""}, "logprobs": None}, 0),
        ({"delta": {}, "logprobs": None, "finish_reason": "length"}, 0),
        ({"delta": {"content": None, "reasoning_content": "so"}}, 1),
        ({"delta": {"content": ' "content": '}, "logprobs": {"content": [{"token": "a"}]}}, 1),
        ({"delta": {"content": ""}, "logprobs": {"content": [{"token": ' "content":"a"'}]}}, 0),
    ],
)
def test_only_text_has_a_time(choices: dict[str, Any], texts: int, tight: bool) -> None:
    event = json.dumps({"choices": [{"index": 0, **choices}]}, separators=(",", ":") if tight else None)
    answer = asyncio.run(against([chunked([f"data: {event}\n\n".encode(), DONE])], ask_once))
    assert len(answer.times) == answer.tokens[1] == texts


class _Nowhere:
    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([chunked([EVENT, DONE])], ""),
        ([chunked([EVENT])[:-5]], "connection was lost"),
        ([b""], "connection was lost"),
        ([chunked([b'data: {"error": {"message": "broke"}}\n\n'])], "broke"),
        ([b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy"], "status 429: busy"),
        ([b"HTTP/1.1 429 Too Many\r\n\r\n", b"bu", b"sy"], "status 429: busy"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbus"], "connection was lost"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\nbusy"], "not HTTP"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"], "not HTTP"),
        ([b"HTTP/1.1 OK\r\n\r\n"], "not HTTP"),
        ([chunked([EVENT]).replace(b"\r\n0\r\n", b"\r\nzero\r\n")], "not HTTP"),
        ([chunked([EVENT]).replace(b"\r\n0\r\n", b"\r\n-5\r\n")], "not HTTP"),
        ([chunked([EVENT]).replace(b"\n\n\r\n", b"\n\nmore\r\n")], "not HTTP"),
        ([chunked([b"busy"], "503 No")], "status 503: busy"),
    ],
)
def test_what_goes_wrong_is_said(parts: list[bytes], error: str) -> None:
    answer = asyncio.run(against(parts, ask_once))
    assert error in answer.error
    assert bool(error) == bool(answer.error)


def record(due: float, times: list[float], tokens: int, error: str = "") -> Record:
    usage = {"usage": {"prompt_tokens": 10, "completion_tokens": tokens}}
    answer = Answer(
        100 + due, array("d", [100 + t for t in times]), 100 + (times or [due])[-1], error, json.dumps(usage).encode()
    )
    return Record(due, answer)


def test_figures() -> None:
    records = [record(0, [0.1, 0.2, 0.3], 3), record(1, [1.3, 2.3], 5), record(2, [2.5], 1), record(2, [], 0, "broken")]
    load = summary(records, Limits(ttft=250, tpot=200))
    found = load.as_dict()
    assert (found["requests"], found["failed"], found["errors"]) == (4, 1, {"broken": 1})
    assert found["seconds"] == pytest.approx(2.5)
    assert found["output_tokens_per_s"] == pytest.approx(9 / 2.5)
    assert found["ttft_ms"]["p50"] == pytest.approx(300)
    assert found["tpot_ms"]["mean"] == pytest.approx((100 + 250) / 2)
    assert found["e2e_ms"]["p99"] == pytest.approx(1300 - 800 * 0.02)
    assert found["goodput_share"] == 1 / 4
    assert "<svg" in load_page("http://x", load)
    assert "<svg" not in load_page("http://x", summary(records[3:], Limits()))


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles(values: list[float]) -> None:
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    found = percentiles(values)
    assert [found[f"p{share}"] for share in (50, 90, 99)] == [pytest.approx(hundredths[at]) for at in (49, 89, 98)]


def test_a_load_at_a_rate_and_with_concurrency() -> None:
    engine = FakeEngine(script=letters, max_tokens=512)
    lengths = dict(input=parse_lengths("U(3,30)"), output=parse_lengths("U(2,9)"))
    with running(engine) as server:
        asked = []
        for load in (
            Load(40, rate=2000, **lengths, warmup=2),
            Load(40, concurrency=5, **lengths),
            Load(8, concurrency=2, chat=True),
        ):
            told: list[Progress] = []
            records = asyncio.run(run_load(Address.of(f"{server.url}/v1/"), load, told.append))
            found = summary(records, Limits()).as_dict()
            assert (found["requests"], found["failed"]) == (load.requests, 0)
            asked.append([(request.prompt, request.max_tokens) for request in engine.requests[-load.requests :]])
            server.idle()
        assert sorted(asked[0]) == sorted(asked[1]), "the same is asked, however it is asked"
        assert {len(prompt) for prompt, _ in asked[0]} <= set(range(3, 31))
        assert all(request.ignore_end for request in engine.requests)


@pytest.mark.parametrize(
    ("key", "said"), [("", "give it with --api-key KEY"), ("guess", "not accept the key of --api-key")]
)
def test_a_server_that_wants_a_key_is_said_to_want_one(key: str, said: str) -> None:
    """It was said not to list its models."""
    with running(keys=("secret",)) as server:
        with pytest.raises(UserError, match=rf"{said} \(status 401: .*API key"):
            asyncio.run(run_load(Address.of(server.url, key), Load(1)))
        assert not asyncio.run(run_load(Address.of(server.url, "secret"), Load(1, concurrency=1)))[0].answer.error


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "//"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        Address.of(url)


def test_addresses() -> None:
    assert Address.of("localhost:8000") == Address("localhost", 8000, "/v1", False)
    assert Address.of("https://a.b/api/v1/", "k") == Address("a.b", 443, "/api/v1", True, "k")
    for url, host in (("http://[::1]:8000", b"[::1]:8000"), ("a.b:80", b"a.b:80")):
        assert b"\r\nHost: " + host + b"\r\n" in Address.of(url).request("GET", "/models")
