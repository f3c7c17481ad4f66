"""Requests as nobody should send them: each gets an error in OpenAI's form or a plain answer, and nothing of it is left."""

from __future__ import annotations

import http.client
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine, letters
from patience import HANG_SECONDS
from running import Running, exchange, post, read_all, running, until

from shardwise.serve.server.limits import Limits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMITS = Limits(
    body_bytes=100_000, head_bytes=20_000, connections=100, head_seconds=60, body_seconds=60, stalled_seconds=60
)
HASTY = replace(LIMITS, head_seconds=0.3, body_seconds=0.3, stalled_seconds=0.3)
"""For what does not end by itself. A busy machine may well keep a client from sending the rest for so long."""
SMALL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stream",
    "stream_options", "stop", "logprobs", "top_logprobs", "echo", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "user", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "priority", "ignore_eos", "stop_token_ids", "add_special_tokens", "best_of", "suffix", "tools", "tool_choice", "functions",
    "chat_template_kwargs", "metadata", "modalities",
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, -(2**63), 10**30, 1.5, -0.0, 1e308, "", "x", "\x00", "\udc80", "💥" * 10, [], [[]], [None],
    ["x"], [1, "x"], [[1], ["x"]], [-1], [2**40], {}, {"": None}, {"type": {}}, {"role": 1}, [{"role": "user", "content": [{}]}],
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(script=letters, max_tokens=256, vocab=257), limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    with running(FakeEngine(script=letters, max_tokens=256, vocab=257), limits=HASTY) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(server: Running, hasty: Running, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    server.idle()
    hasty.idle()
    assert capfd.readouterr().err == ""


def check(status: int, body: bytes) -> None:
    """An answer, or an error in OpenAI's form that is the client's fault."""
    assert status == 200 or 400 <= status < 500, (status, body)
    if status != 200:
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["type"]
    assert b"Traceback" not in body


def status_of(response: bytes) -> tuple[int, bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), response
    return int(head.split(b" ")[1]), body


class Sender:
    """Sends bodies over a connection that is kept."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_SECONDS)

    def send(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        self._connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = self._connection.getresponse()
        found = response.status, response.read()
        check(*found)
        return found

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def sender(server: Running) -> Iterator[Sender]:
    sender = Sender(server)
    yield sender
    sender.close()


@pytest.mark.parametrize(("path", "most"), [(COMPLETIONS, len(JUNK)), (CHAT, 10)])
def test_every_field_with_every_type(sender: Sender, path: str, most: int, request: pytest.FixtureRequest) -> None:
    """Of the fields that both have, chats are sent some."""
    draw, refused = random.Random(request.config.option.seed), 0
    for name in FIELDS:
        for value in draw.sample(JUNK, most):
            status, _ = sender.send(path, json.dumps({**SMALL[path], name: value}).encode())
            refused += status != 200
    assert refused > len(FIELDS) * most / 2


@pytest.mark.parametrize("path", SMALL)
def test_random_objects(sender: Sender, path: str, request: pytest.FixtureRequest) -> None:
    draw = random.Random(request.config.option.seed)

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth else 4)
        if kind == 4:
            return [value(depth - 1) for _ in range(draw.randrange(4))]
        if kind == 5:
            return {draw.choice(FIELDS): value(depth - 1) for _ in range(draw.randrange(4))}
        return draw.choice(JUNK[:17])

    for _ in range(150):
        fields = {draw.choice(FIELDS): value(3) for _ in range(draw.randrange(1, 5))}
        sender.send(path, json.dumps({**SMALL[path], **fields} if draw.random() < 0.8 else value(3)).encode())


@pytest.mark.parametrize("path", SMALL)
def test_mutated_bytes(sender: Sender, path: str, request: pytest.FixtureRequest) -> None:
    draw = random.Random(request.config.option.seed)
    whole = json.dumps({**SMALL[path], "stop": ["é", "\n"], "logit_bias": {"1": 2}, "seed": 1}).encode()
    for _ in range(200):
        body = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(body))
            match draw.randrange(4):
                case 0:
                    body[at] ^= 1 << draw.randrange(8)
                case 1:
                    del body[at : at + draw.randrange(1, 9)]
                    body = body or bytearray(b"{")
                case 2:
                    body[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 5)))
                case 3:
                    body = body[: at + 1]
        sender.send(path, bytes(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'"x"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xc3"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800", "stop": "x"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e400}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 50_000,
        b'{"a":' * 9_000 + b"1" + b"}" * 9_000,
        '{"prompt": "x"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"{}garbage",
        b"prompt=x",
    ],
    ids=range(20),
)
def test_bodies_that_are_no_request(sender: Sender, body: bytes) -> None:
    assert sender.send(COMPLETIONS, body)[0] == 400


def test_other_types_of_content(sender: Sender) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; boundary=x"):
        assert sender.send(COMPLETIONS, b'{"prompt": "a"}', **{"Content-Type": kind})[0] == 415


def test_pages_of_other_sites(sender: Sender) -> None:
    for origin in ("https://evil.example", "null", "http://[::1", "http://[localhost]", "//", "localhost"):
        assert sender.send(COMPLETIONS, b'{"prompt": "a"}', Origin=origin)[0] == 403
    assert sender.send(COMPLETIONS, b'{"prompt": "a"}', Origin="http://localhost:3000")[0] == 200


@pytest.mark.parametrize("size", [100_001, 399_999, 400_001, 5_000_000])
def test_bodies_that_are_too_long(server: Running, size: int) -> None:
    body = b'{"prompt": "' + b"x" * (size - 14) + b'"}'
    response = exchange(server, post(COMPLETIONS, body))
    if size < 400_000:  # they are read to their end, so that the answer always arrives
        assert response
    if response:
        check(*status_of(response))
        assert status_of(response)[0] == 413
    chunks = b"".join(b"1000\r\n" + b"x" * 0x1000 + b"\r\n" for _ in range(size // 0x1000 + 1)) + b"0\r\n\r\n"
    head = post(COMPLETIONS, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    response = exchange(server, head + chunks)
    assert not response or status_of(response)[0] == 413


def test_a_long_body_is_refused_before_it_is_sent(server: Running) -> None:
    head = post(COMPLETIONS, b"", "Expect: 100-continue").replace(b"Content-Length: 0", b"Content-Length: 200000")
    assert status_of(exchange(server, head))[0] == 413
    head = post(COMPLETIONS, b"").replace(b"Content-Length: 0", b"Content-Length: 99999999999999")
    assert status_of(exchange(server, head))[0] == 413


def test_bodies_that_do_not_end(hasty: Running) -> None:
    for sent in (post(COMPLETIONS, b'{"prompt": "a"}')[:-3], post(COMPLETIONS, b"{}").replace(b": 2", b": 50")):
        status, body = status_of(exchange(hasty, sent))
        assert status == 408
        check(status, body)


def test_heads_that_do_not_end(hasty: Running) -> None:
    status, body = status_of(exchange(hasty, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-"))
    assert status == 408
    check(status, body)
    assert exchange(hasty, b"") == b""
    with hasty.connect() as connection:  # an end of line every now and then is no request either
        connection.sendall(b"\r\n")
        read_all(connection)


def test_heads_that_are_too_long(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with suppress(OSError):
            for number in range(100):
                connection.sendall(b"X-%d: " % number + b"y" * 1000 + b"\r\n")
        response = read_all(connection)
    if response:
        status, body = status_of(response)
        assert status == 431
        check(status, body)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\n\r\n",
        b"GET /\xff\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}xx\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"DELETE /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
        bytes(range(256)) * 40,
    ],
    ids=range(19),
)
def test_what_is_no_http(hasty: Running, sent: bytes) -> None:
    status, body = status_of(exchange(hasty, sent))
    check(status, body)
    assert status != 200


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    first = post(COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stream": True}, close=False)
    second = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    third = post(COMPLETIONS, {"prompt": "b", "max_tokens": 1})
    response = exchange(server, first + second + third)
    assert response.count(b"HTTP/1.1 200") == 3
    assert response.index(b"[DONE]") < response.index(b'"ok"') < response.rindex(b'"text_completion"')


def test_garbage_behind_a_request(hasty: Running, request: pytest.FixtureRequest) -> None:
    draw = random.Random(request.config.option.seed)
    for stream in (False, True):
        for _ in range(20):
            garbage = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 200)))
            asked = {"prompt": "a", "max_tokens": 200, "stream": stream}
            exchange(hasty, post(COMPLETIONS, asked, close=False) + garbage)


def test_clients_that_go_away(server: Running, request: pytest.FixtureRequest) -> None:
    """Before, in the middle of, and after a request, and while it is answered."""
    draw = random.Random(request.config.option.seed)
    server.engine.delay = 0.001
    try:
        for number in range(60):
            asked = {"prompt": "a", "max_tokens": 200, "stream": number % 2 == 0, "n": 1 + number % 3}
            sent = post(COMPLETIONS, asked)
            with server.connect() as connection:
                connection.sendall(sent[: draw.randrange(len(sent) * 3)])
                if draw.random() < 0.5:
                    connection.settimeout(0.02)
                    with suppress(TimeoutError):
                        connection.recv(draw.randrange(1, 2000))
                if draw.random() < 0.5:  # a reset instead of an end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server.idle()
        assert server.engine.aborted > 10
    finally:
        server.engine.delay = 0.0


def test_a_client_that_never_reads() -> None:
    engine = FakeEngine(max_tokens=10**7)
    with running(engine, limits=HASTY) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post(COMPLETIONS, {"prompt": "a", "max_tokens": 10**6, "stream": True, "logprobs": 5}))
        until(lambda: engine.aborted == 1 or (engine.idle and engine.steps > 1))
        server.idle()
        until(lambda: not server.context.service.unfinished)


def test_more_connections_than_there_may_be(server: Running) -> None:
    waiting = [server.connect() for _ in range(LIMITS.connections)]
    try:
        refused = [exchange(server, b"") for _ in range(5)]
        for response in refused:
            head, _, body = response.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "too_many_connections"
    finally:
        for connection in waiting:
            connection.close()
    until(
        lambda: exchange(server, b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1.1 200"
        )
    )


CROWD = """
import socket, sys
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60))
    if len(held) % 2:
        held[-1].sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: a\\r\\nX")
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.mark.large("10,000 connections, which take as long as the rest of the file")
def test_ten_thousand_connections() -> None:
    limits = Limits(connections=9_900, head_seconds=120)
    with running(FakeEngine(script=letters), limits=limits) as server:
        crowd = subprocess.Popen(
            [sys.executable, "-c", CROWD, str(server.port), "10000"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "10000\n"
        until(lambda: exchange(server, b"").startswith(b"HTTP/1.1 503"))
        crowd.communicate()
        health = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        until(lambda: exchange(server, health).startswith(b"HTTP/1.1 200"))
        server.idle()
