"""Where things are kept that can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.files import cache_folder


def test_caches_lie_where_the_user_wants_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("things") == tmp_path / "shardwise" / "things"
    for nothing in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert cache_folder("things") == Path.home() / ".cache" / "shardwise" / "things"


def test_a_user_without_a_home_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder("things").is_absolute()
