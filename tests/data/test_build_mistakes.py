"""What is wrong with the inputs is told with file and line, all of it at once, and before work starts where
it can be."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.data import inputs
from shardwise.data.build import build
from shardwise.data.encode import Job
from shardwise.data.shards import TokenSet
from shardwise.run import UserError

GOOD = json.dumps({"text": "fine"}).encode()


def problem(path: Path, out: Path, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        build([path], out, **{"workers": 1, **options})  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"text": "cut', "is not valid JSON: Unterminated string"),
        (b'{"text": NULL}', "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b'{"body": "x", "id": 1}', 'has no field "text"; it has body, id'),
        (b"{}", "no fields at all"),
        (b'{"text": 5}', 'field "text" is a number, not text'),
        (b'{"text": null}', 'field "text" is null, not text'),
        (b'{"text": ["a"]}', 'field "text" is a list, not text'),
        (b"[1, 2]", "is not a JSON object with fields, but a list"),
        (b'"text"', "is not a JSON object with fields, but a text"),
        (b'{"text": "\xff"}', "is not UTF-8 text"),
        (b'{"text": "\\ud83d!"}', r"half of a surrogate pair (character 1)"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_bad_line(tmp_path: Path, line: bytes, sentence: str, zipped: bool, tokenizer_file: Path) -> None:
    content = b"\n".join([GOOD, b"", GOOD, line, GOOD]) + b"\n"
    path = tmp_path / ("in.jsonl.gz" if zipped else "in.jsonl")
    path.write_bytes(gzip.compress(content) if zipped else content)
    for i, tokenizer in enumerate(("byte", tokenizer_file)):
        text = problem(path, tmp_path / f"out{i}", tokenizer=tokenizer)
        assert sentence in text
        assert f"{path}:4: " in text
        assert len(text.splitlines()) == 1


def test_lines_are_counted_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_SMALLEST", 100)
    lines = [GOOD] * 50
    lines[33] = b"{"
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert f"{path}:34: is not valid JSON" in problem(path, tmp_path / "out")
    # What was finished stays, and a mended file is another plan.
    assert len(list((tmp_path / "out" / "work").glob("*.json"))) > 3
    path.write_bytes(b"\n".join([GOOD] * 50))
    assert "has changed" in problem(path, tmp_path / "out")
    build([path], tmp_path / "out", workers=1, restart=True)
    assert TokenSet.open(tmp_path / "out").documents == 50


def test_several_at_once_and_not_too_many(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"{", b"7", GOOD, b"{}"]))
    text = problem(path, tmp_path / "out")
    assert [line.split(":")[1] for line in text.splitlines()] == ["2", "3", "5"]
    path.write_bytes(b"{\n" * 1000)
    assert len(problem(path, tmp_path / "out", restart=True).splitlines()) == 10


def test_mistakes_from_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_SMALLEST", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([b"{", *[GOOD] * 20]))
    assert problem(path, tmp_path / "out", workers=2).startswith(f"{path}:1: is not valid JSON")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"first\nsecond\nthi\xe4rd\n")
    assert problem(path, tmp_path / "out") == f"{path}:3: is not UTF-8 text"
    path.write_bytes(b"\xff\xfe")  # one line whose end is held back, since a character may begin there
    assert problem(path, tmp_path / "out", restart=True) == f"{path}:1: is not UTF-8 text"


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = os.fsencode(tmp_path / "in") + b"/caf\xe9.txt"
    try:
        Path(os.fsdecode(path)).write_bytes(b"hello")
    except OSError:
        pytest.skip("the file system takes no such names")
    want = f"{tmp_path}/in/caf\ufffd.txt: has a name that is not UTF-8; rename it"
    assert problem(tmp_path / "in", tmp_path / "out") == want


def test_broken_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b"some text that is long enough to be cut\n" * 50)
    for i, content in enumerate((whole[:-12], b"not gzip at all", whole[:40] + b"????" + whole[44:])):
        path = tmp_path / f"{i}.txt.gz"
        path.write_bytes(content)
        assert "is not a complete gzip file" in problem(path, tmp_path / f"out{i}")


def test_parquet_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), path)
    assert 'has no column "text"; it has body, id' in problem(path, tmp_path / "out")
    assert 'column "id" holds int64, not text' in problem(path, tmp_path / "out", field="id")
    pq.write_table(pa.table({"text": ["a", "b", "c", None]}), path, row_group_size=2)
    assert problem(path, tmp_path / "out") == f'{path}: row group 1, row 2: column "text" is null, not text'
    path.write_bytes(b"PAR1 or not")
    assert "is not a Parquet file" in problem(path, tmp_path / "out")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install '.[parquet]' in a checkout" in problem(path, tmp_path / "out")


def test_all_that_is_known_beforehand(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "a.txt").write_text("a")
    names = [tmp_path / n for n in ("none.txt", "empty", "x.json", "a.txt", "a.txt")]
    with pytest.raises(UserError) as caught:
        build(names, tmp_path / "out", tokenizer=tmp_path / "no.json", workers=-1, shard_tokens=0)
    text = str(caught.value)
    for sentence in ("no such file or folder", "holds no file to read", ".jsonl if each line", "named twice",
                     "no such tokenizer", "--workers: -1", "--shard-tokens: 0"):  # fmt: skip
        assert text.count(sentence) == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="name at least one"):
        build([], tmp_path / "out")


def test_a_file_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_jsonl: Callable[..., Path]
) -> None:
    path = write_jsonl("in.jsonl", ["a", "b"])
    encode = Job.encode

    def disturbed(self: Job, unit: Any, report: Any) -> Any:
        os.utime(path, ns=(1, 1))
        return encode(self, unit, report)

    monkeypatch.setattr(Job, "encode", disturbed)
    assert "changed while the set was built" in problem(path, tmp_path / "out")
    with pytest.raises(UserError, match="half"):
        TokenSet.open(tmp_path / "out")


def test_nothing_but_empty_documents(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl("in.jsonl", ["", "  \n"])
    assert "every document is empty" in problem(path, tmp_path / "out")
    with pytest.raises(UserError, match="half"):
        TokenSet.open(tmp_path / "out")
