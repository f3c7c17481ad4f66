"""API keys as they arrive in a header, whose letters have no encoding of their own."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import pytest
from patience import HANG_SECONDS
from running import running


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_key_that_is_not_ascii(encoding: str) -> None:
    with running(keys=("schlüssel",)) as server:
        found = {}
        for key in ("schlüssel", "schlussel", "schlüsse"):
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=HANG_SECONDS)
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}".encode(encoding)})
            found[key] = connection.getresponse().status
            connection.close()
    assert found == {"schlüssel": 200, "schlussel": 401, "schlüsse": 401}
