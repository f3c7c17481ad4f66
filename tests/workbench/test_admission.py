"""Who is let in, and that no request ends the server."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator

import pytest
from patience import HANG_SECONDS
from served import Served, served


@pytest.fixture(scope="module")
def bench() -> Iterator[Served]:
    with served("workbench", "--model.preset=llama3-8b", "--cluster.chip=h100", "--layout.shard=8") as page:
        yield page


def test_only_the_printed_address_is_let_in(bench: Served) -> None:
    page = f"/?token={bench.token}"
    body, kind = json.dumps({"changes": {}}).encode(), {"Content-Type": "application/json"}
    ok = kind | {"X-Shardwise-Token": bench.token}
    status, text, headers = bench.request("GET", page)
    assert status == 200
    assert b"data-key" in text
    assert len(text) < 1_000_000
    assert "nonce-" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert bench.request("POST", "/api/plan", body, ok)[0] == 200
    assert bench.request("POST", "/api/plan", body, ok | {"Origin": f"http://127.0.0.1:{bench.port}"})[0] == 200
    refused = [
        ("GET", "/", None, {}),
        ("GET", "/?token=", None, {}),
        ("GET", f"/?token={bench.token[:-1]}", None, {}),
        ("GET", f"/?token={bench.token}x", None, {}),
        ("GET", "/?token=%ff%fe%c3%a9", None, {}),
        ("GET", page, None, {"Host": "evil.example"}),
        ("GET", page, None, {"Host": f"evil.example:{bench.port}"}),
        ("GET", page, None, {"Host": "127.0.0.1"}),
        ("GET", page, None, {"Origin": "http://evil.example"}),
        ("GET", page, None, {"Origin": "null"}),
        ("POST", "/api/plan", body, kind),
        ("POST", "/api/plan", body, kind | {"X-Shardwise-Token": "x"}),
        ("POST", "/api/plan", body, ok | {"Origin": "http://localhost"}),
    ]
    for method, path, content, given in refused:
        status, text, _ = bench.request(method, path, content, given)
        assert status == 403, (method, path, given, status)
        assert bench.token.encode() not in text
    for path in (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/workbench.js",
        "//etc/passwd",
        "/api/plan/",
        "/api",
    ):
        assert bench.request("GET", f"{path}?token={bench.token}")[0] in (404, 405), path
    others = [
        ("GET", "/api/plan", None, ok, 405),
        ("POST", "/api/plan", body, {"X-Shardwise-Token": bench.token, "Content-Type": "text/plain"}, 415),
        ("POST", "/api/plan", b"{", ok, 400),
        ("POST", "/api/plan", b"[" * 60_000, ok, 400),
        ("POST", "/api/plan", b"x" * 70_000, ok, 413),
    ]
    for method, path, content, given, expected in others:
        assert bench.request(method, path, content, given)[0] == expected, (path, expected)


def test_it_listens_on_this_machine_alone(bench: Served) -> None:
    with open("/proc/net/tcp") as file:
        lines = [line.split() for line in file][1:]
    mine = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{bench.port:04X}")]
    assert mine == [f"0100007F:{bench.port:04X}"]


def fuzzed(bench: Served, source: random.Random) -> bytes:
    """A request that is broken somewhere."""
    value = source.choice(
        ["1", "-1", "1e309", "NaN", "9" * 400, "\u0000", "[[]]", "auto", "true", "[1,2]", "{}", "\ud800"]
    )
    key = source.choice(
        ["layout.tensor", "train.seq_len", "layout.stages", "model.layers", "cluster.chip", "layout.auto", "x.y"]
    )
    body = source.choice([
        json.dumps({"changes": {key: value}}).encode(),
        json.dumps({"changes": {key: source.choice([None, [], 1e300, -5, True])}}).encode(),
        b"[" * source.randint(1, 3000),
        bytes(source.randrange(256) for _ in range(source.randint(0, 80))),
        b'{"changes":{"layout.tensor":1e999}}',
    ])  # fmt: skip
    token = source.choice([bench.token, bench.token, bench.token, "no"])
    path = source.choice(["/api/plan", "/api/plan", "/api/run.toml", "/", "/%00", "/api/\u00ff", "/../x", "*"])
    length = source.choice([str(len(body)), str(len(body)), "-1", "99999999999999999999", "x", "0"])
    lines = [
        f"{source.choice(['POST', 'POST', 'GET', 'BREW', ''])} {path} HTTP/{source.choice(['1.1', '1.1', '1.0', '9'])}",
        f"Host: 127.0.0.1:{bench.port}",
        f"X-Shardwise-Token: {token}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        source.choice(["X: y", "X" * 9000 + ": y", "Transfer-Encoding: chunked", "Host: evil", ": :"]),
    ]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


def survives(bench: Served, count: int, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", bench.port), timeout=HANG_SECONDS) as connection:
            try:
                connection.sendall(fuzzed(bench, source))
                connection.shutdown(socket.SHUT_WR)
                first = connection.recv(64)
            except ConnectionError:
                continue
            assert not first or first.startswith(b"HTTP/1.1 "), first
            assert not first.startswith(b"HTTP/1.1 500"), first
    assert bench.process.poll() is None
    assert bench.ask("/api/plan", {"changes": {}})["plan"]["step_seconds"] > 0


def test_broken_requests_leave_it_answering(bench: Served, pytestconfig: pytest.Config) -> None:
    survives(bench, 300, pytestconfig.option.seed)


@pytest.mark.large("ten thousand broken requests, as promised; the small tier sends three hundred of the same")
def test_ten_thousand_broken_requests_leave_it_answering(bench: Served) -> None:
    survives(bench, 10_000, 1)
