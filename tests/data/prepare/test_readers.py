"""Every kind of file, whole and broken: what can be read is read, and what cannot has a fate with a reason."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.build import build
from shardwise.data.prepare.fates import Fates
from shardwise.data.prepare.files import find_files, units_of
from shardwise.data.prepare.prepare import prepare
from shardwise.data.prepare.privacy import _EMAIL, EMAIL, privacy
from shardwise.data.prepare.readers import Row, read
from shardwise.data.prepare.recipe import Recipe, Source, read_recipe
from shardwise.data.prepare.warc import _unchunked as unchunked
from shardwise.data.prepare.words import Document, Vocabulary, simple_words
from shardwise.run.problems import UserError

TEXTS = [f"Document {number}: ä ö ü and {'more ' * number}" for number in range(40)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def rows_of(path: Path, longest: int = 2**20) -> list[Row]:
    recipe = Recipe((Source("a", (str(path),)),))
    files = find_files(recipe)
    return [
        row
        for unit in units_of(files)
        for chunk in unit.chunks
        for row in read(files[chunk.input], chunk, "text", longest)
    ]


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_lines(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    data = PACKERS[suffix](LINES)
    path.write_bytes(data)
    found = rows_of(path)
    assert [row.text for row in found] == TEXTS
    for row, line in zip(found, LINES.splitlines(keepends=True), strict=True):
        assert LINES[row.place :].startswith(line)
    if suffix:
        path.write_bytes(data[: len(data) // 2])
        found = rows_of(path)
        assert [row.text for row in found[:-1]] == TEXTS[: len(found) - 1]
        assert "broken from here on" in found[-1].wrong or "not JSON" in found[-1].wrong


def test_a_broken_gzip_file_keeps_what_was_before(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": f"{number} " * 50}).encode() + b"\n" for number in range(2000))
    data = bytearray(gzip.compress(lines))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(bytes(data))
    found = rows_of(path)
    assert len(found) > 100
    assert "the gzip file is broken from here on" in found[-1].wrong
    assert [row.text for row in found[:100]] == [f"{number} " * 50 for number in range(100)]


def test_lines_that_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [
        b'{"text": "a"',
        b'{"text": "\xff"}',
        b"[1]",
        b'{"txt": "a"}',
        b'{"text": 3}',
        b'{"text": "\\ud800"}',
        b'{"text": ""}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "first"}\n' + b"\n".join(bad) + b'\n\n{"text": "last"}')
    found = rows_of(path)
    said = [row.wrong for row in found]
    assert [said[0], said[-1], said[-2]] == ["", "", ""]
    assert found[2].detail == " at byte 44"
    parts = ("not JSON", "not UTF-8 text", "a list", 'no field "text"', "a number", "surrogate")
    for part, wrong in zip(parts, said[1:7], strict=True):
        assert part in wrong
    assert found[-1].text == "last"


@pytest.mark.parametrize("text", ["", "\r\n"])
def test_a_file_of_a_byte_order_mark_alone_is_empty(tmp_path: Path, text: str) -> None:
    """As editors save an empty file."""
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text("\ufeff" + text, encoding="utf-8", newline="")
    assert rows_of(path) == []
    other.write_bytes(LINES)
    assert build([path, other], tmp_path / "out", workers=1).index.documents == len(TEXTS)


def test_a_line_too_long_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = json.dumps({"text": "x" * 5_000_000}).encode()
    path.write_bytes(b'{"text": "before"}\n' + long + b'\n{"text": "after"}\n')
    found = rows_of(path, longest=1000)
    assert [row.text for row in found] == ["before", "", "after"]
    assert found[1].wrong == "longer than 1000 bytes (longest)"
    assert found[1].size == len(long) + 1
    assert found[2].place == path.stat().st_size - len(b'{"text": "after"}\n')


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = [f"{number} {'word ' * (number % 90)}" for number in range(4000)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert len(units_of(find_files(Recipe((Source("a", (str(path),)),))))) > 2
    assert [row.text for row in rows_of(path)] == texts


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": [*TEXTS, None]}), path, row_group_size=16)
    found = rows_of(path)
    assert [row.text for row in found[:-1]] == TEXTS
    assert "null" in found[-1].wrong
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(bytes(data))
    broken = rows_of(path)
    assert any("broken from here on" in row.wrong for row in broken)
    assert [row.text for row in broken if not row.wrong][-8:] == TEXTS[-8:]


def record(
    kind: str, body: bytes, form: str = "application/http; msgtype=response", url: str = "http://a.example/"
) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nContent-Type: {form}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


def http(payload: bytes, form: str = "text/html", more: str = "", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {form}\r\n{more}\r\n".encode() + payload


ARCHIVE = [
    record("warcinfo", b"software: x", "application/warc-fields"),
    record("response", http(b"<p>one</p>"), url="http://a.example/1"),
    record("request", b"GET / HTTP/1.1\r\n\r\n"),
    record("response", http("<p>zwölf</p>".encode("latin-1"), "text/html; charset=iso-8859-1")),
    record("response", http(gzip.compress(b"<p>packed</p>"), more="Content-Encoding: gzip\r\n")),
    record("response", http(b"5\r\n<p>ch\r\n7\r\nunk</p>\r\n0\r\n\r\n", more="Transfer-Encoding: chunked\r\n")),
    record("response", http(b"gone", status="404 Not Found")),
    record("response", http(b"\x89PNG", "image/png")),
    record("conversion", "plain text ü".encode(), "text/plain"),
    record("response", http(b"<p>\xff\xfe</p>")),
]


def test_web_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(map(gzip.compress, ARCHIVE)))  # a gzip member for each record, as crawlers write them
    found = rows_of(path)
    pages = ["<p>one</p>", "<p>zwölf</p>", "<p>packed</p>", "<p>chunk</p>", "plain text ü"]
    assert [row.text for row in found if not row.wrong] == pages
    assert found[0].meta == {"form": "html", "url": "http://a.example/1"}
    assert found[4].meta["form"] == "text"
    assert found[-1].wrong == "not UTF-8 text"
    whole = b"".join(ARCHIVE)
    assert all(whole[row.place :].startswith(b"WARC/1.0") for row in found)


@pytest.mark.parametrize("charset", ["undefined", "punycode", "idna", "unicode_escape", "none", "hex"])
def test_a_charset_that_is_none_is_read_as_utf_8(tmp_path: Path, charset: str) -> None:
    """Python has codecs by some of these names: one refuses every text, others would change it."""
    path = tmp_path / "a.warc"
    form = f"text/html; charset={charset}"
    pages = ["<p>zwölf-\\n</p>", "<p>next</p>"]
    wrong = record("response", http(b"<p>\xff</p>", form))
    path.write_bytes(wrong.join(record("response", http(page.encode(), form)) for page in pages))
    found = rows_of(path)
    assert [row.text for row in found if not row.wrong] == pages
    assert [row.wrong for row in found if row.wrong] == ["neither UTF-8 nor what it declares"]


@pytest.mark.parametrize("size", [b"-6", b"+5", b"0x5", b"1_0", b"f" * 17])
def test_a_body_that_only_looks_like_chunks_is_kept(size: bytes) -> None:
    """Not the size of a chunk: with -6 each chunk would begin where the one before it did, without end."""
    read_past = iter(range(100))

    class Body(bytes):
        def find(self, *args: Any) -> int:
            assert next(read_past, None) is not None, "it does not end"
            return super().find(*args)

    body = Body(size + b"\r\nand more text\r\n0\r\n\r\n")
    assert unchunked(body) == body


ADDRESSES = st.text("ab1é@@..-_'+/ =\n中(", max_size=40)


@given(ADDRESSES)
def test_addresses_are_found_as_in_the_whole_text(text: str) -> None:
    document = Document(text, Vocabulary(simple_words))
    privacy(kinds=["email"])(document)
    assert document.text == _EMAIL.sub(EMAIL, text)


def test_a_long_run_without_an_address_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes time that grows with the square of a run such as base64."""
    searched: list[str] = []

    class Spy:
        def sub(self, by: str, text: str) -> str:
            searched.append(text)
            return _EMAIL.sub(by, text)

    monkeypatch.setattr("shardwise.data.prepare.privacy._EMAIL", Spy())
    document = Document("a@b.example " + "ab+/" * 1000, Vocabulary(simple_words))
    privacy(kinds=["email"])(document)
    assert document.text == EMAIL + " " + "ab+/" * 1000
    assert searched == ["a@b.example"]


def test_broken_web_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(ARCHIVE[1] + b"rubbish\r\nmore rubbish\r\n" + ARCHIVE[3] + ARCHIVE[1][:-20])
    found = rows_of(path)
    assert [row.wrong for row in found] == ["", "not a WARC record", "", "a WARC record cut short"]
    assert found[1].place == len(ARCHIVE[1])
    assert [row.wrong for row in rows_of(path, longest=12)][:3] == [
        "longer than 12 bytes (longest)",
        "not a WARC record",
        "longer than 12 bytes (longest)",
    ]


def test_bad_input_is_skipped_and_told_or_stops(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES + b'{"text": "\xff"}\nnot json\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES)[:-20])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[sources]]\nname = "web"\npaths = ["a.jsonl", "b.jsonl.gz"]\n')
    found = prepare(read_recipe(recipe), tmp_path, tmp_path / "out", workers=1)
    fates = Fates(tmp_path / "out")
    told = [fates[row] for row in fates.where("read")]
    assert len(told) == found["steps"][0]["removed"] >= 3
    assert {fate.id.rpartition(":")[0] for fate in told} == {"a.jsonl", "b.jsonl.gz"}
    assert found["kept"] == found["documents"] - len(told) >= 40
    recipe.write_text('bad = "stop"\n' + recipe.read_text())
    with pytest.raises(UserError, match=r'a\.jsonl:\d+: not UTF-8 text at byte \d+; bad = "skip"'):
        prepare(read_recipe(recipe), tmp_path, tmp_path / "stopped", workers=1)


def test_a_broken_parquet_file_has_a_fate(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 cut short")
    (tmp_path / "b.jsonl").write_bytes(LINES)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[sources]]\nname = "web"\npaths = ["a.parquet", "b.jsonl"]\n')
    found = prepare(read_recipe(recipe), tmp_path, tmp_path / "out", workers=1)
    assert (found["kept"], found["documents"]) == (40, 41)
    fates = Fates(tmp_path / "out")
    (fate,) = (fates[row] for row in fates.where("read"))
    assert fate.id == "a.parquet:0"
    assert fate.reason.startswith("the row group is broken from here on: ")
    recipe.write_text('bad = "stop"\n' + recipe.read_text())
    with pytest.raises(UserError, match=r"a\.parquet: is not a Parquet file"):
        prepare(read_recipe(recipe), tmp_path, tmp_path / "stopped", workers=1)


def test_input_of_no_text_or_length_does_not_stop_the_others(tmp_path: Path) -> None:
    """Half of a surrogate pair in a text and in a url, a broken bzip2 file, and lengths that are no numbers or too large."""
    rows = [{"text": "one"}, {"text": "bad \ud800"}, {"text": "two", "url": "http://\ud800", "id": "\ud800"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed = bytearray(bz2.compress(LINES))
    packed[len(packed) // 2] ^= 255
    (tmp_path / "b.jsonl.bz2").write_bytes(packed)
    good = record("conversion", b"three", "text/plain")
    odd = [good.replace(b"Content-Length: 5", b"Content-Length: " + each) for each in ("²".encode(), b"9" * 5000)]
    (tmp_path / "c.warc").write_bytes(odd[0] + good + odd[1])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[sources]]\nname = "web"\npaths = ["a.jsonl", "b.jsonl.bz2", "c.warc"]\n')
    found = prepare(read_recipe(recipe), tmp_path, tmp_path / "out", workers=1)
    lines = (tmp_path / "out/documents").glob("*.jsonl")
    texts = [json.loads(line) for path in sorted(lines) for line in path.read_text("utf-8").splitlines()]
    assert [row["text"] for row in texts] == ["one", "two", "three"]
    assert "url" not in texts[1]
    reasons = {reason: each["documents"] for reason, each in found["steps"][0]["reasons"].items()}
    assert reasons.pop("half of a surrogate pair, which is not text") == 1
    assert reasons.pop("a WARC record without a length") == 2
    assert any(reason.startswith("the bzip2 file is broken from here on") for reason in reasons)


def test_an_error_of_the_disk_is_not_a_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)

    def fails(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("shardwise.data.prepare.readers.open_stream", fails)
    with pytest.raises(OSError, match="Input/output error"):
        rows_of(tmp_path / "a.jsonl")


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = os.fsencode(tmp_path / "in") + b"/caf\xe9.txt"
    try:
        Path(os.fsdecode(path)).write_bytes(b"hello")
    except OSError:
        pytest.skip("the file system takes no such names")
    with pytest.raises(UserError, match=r"caf\ufffd\.txt: has a name that is not UTF-8; rename it"):
        find_files(Recipe((Source("a", (str(tmp_path / "in"),)),)))


@pytest.mark.drawn(group="preparation")
def test_reasons_do_not_grow_with_what_is_wrong(tmp_path: Path) -> None:
    """Every line breaks at another byte, more of them than a reason's number has bits for."""
    count = 2**16 + 10
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", 1) as file:
        file.write(b"".join(b'{"text": "\xff"}\n' if n % 2 else b'{"text": %d' % n + b"\n" for n in range(2 * count)))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[sources]]\nname = "web"\npaths = ["a.jsonl.gz"]\n')
    found = prepare(read_recipe(recipe), tmp_path, tmp_path / "out", workers=1)
    reasons = found["steps"][0]["reasons"]
    assert {reason: each["documents"] for reason, each in reasons.items()} == {
        "not UTF-8 text": count,
        "not JSON": count,
    }


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.data.prepare import spill

    (tmp_path / "a.jsonl").write_bytes(LINES)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[sources]]\nname = "web"\npaths = ["a.jsonl"]\n[[steps]]\nkind = "exact"\n')
    real = spill.DocumentFile.write

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spill.DocumentFile, "write", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device; finished work is kept"):
        prepare(read_recipe(recipe), tmp_path, tmp_path / "out", workers=1)
    monkeypatch.setattr(spill.DocumentFile, "write", real)
    assert prepare(read_recipe(recipe), tmp_path, tmp_path / "out", workers=1)["kept"] == 40
