"""A verb that serves a page, as its user starts it, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from patience import HANG_SECONDS


@dataclass
class Served:
    """A running page."""

    address: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        port = urlsplit(self.address).port
        assert port is not None
        return port

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.address).query)["token"][0]

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """A request with just these headers: status, body and headers of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def ask(self, path: str, content: Any) -> Any:
        """The JSON that a question of the page is answered with."""
        headers = {"Content-Type": "application/json", "X-Shardwise-Token": self.token}
        status, body, _ = self.request("POST", path, json.dumps(content).encode(), headers)
        assert status == 200, (status, body)
        return json.loads(body)


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """The page of `shardwise ARGUMENTS`, until the end of the block."""
    command = [sys.executable, "-m", "shardwise", *arguments, "--no-open"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, line
        yield Served(line[line.index("http://") :].strip(), process)
    finally:
        process.terminate()
        assert process.wait(HANG_SECONDS) == 0
