"""pip's settings hold for uv too (`install.py`)."""

from __future__ import annotations

import install
import pytest


def test_settings_of_pip_become_options_of_uv() -> None:
    listed = ":env:.find-links='/wheels'\nglobal.cert='/ca.crt'\nglobal.extra-index-url='https://a/simple file:///b/simple'\n"
    known = install.settings(listed + "global.find-links='/other'\n")
    assert known == {"cert": "/ca.crt", "extra-index-url": "https://a/simple file:///b/simple", "find-links": "/wheels"}
    options = install.options(known)
    assert options is not None
    assert options[2:] == [
        "--extra-index-url", "file:///b/simple", "--extra-index-url", "https://a/simple", "--find-links", "/wheels",
    ]  # fmt: skip


def test_what_uv_has_no_word_for_is_left_to_pip() -> None:
    assert install.options({"index-url": "https://a/simple", "only-binary": ":all:"}) is None


@pytest.mark.parametrize("fails", ["config", "uv"])
def test_where_uv_cannot_pip_installs(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Done:
        def __init__(self, command: list[str], **more: object) -> None:
            asked.append(command)
            self.stdout = "global.only-binary=':all:'\n" if fails == "config" else ""
            self.returncode = int(command[1:3] == ["-m", "uv"])

    monkeypatch.setattr(install.subprocess, "run", Done)
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    assert install.main(["numpy"]) == 0
    assert asked[-1][1:3] == ["-m", "pip"]
    assert asked[-1][-1] == "numpy"
    assert any(command[1:3] == ["-m", "uv"] for command in asked) == (fails == "uv")
