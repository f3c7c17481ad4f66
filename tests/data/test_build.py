"""A build gives the same set for any number of workers and however often it was interrupted, from every kind
of input."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from patience import HANG_SECONDS

from shardwise.data import build as building
from shardwise.data import documents, encode, inputs
from shardwise.data.build import build
from shardwise.data.encode import Job
from shardwise.data.shards import TokenSet
from shardwise.data.tokenizer import ByteTokenizer, JsonTokenizer
from shardwise.run import UserError

MANY = [f"document {i}: " + "word " * (i % 37) + "ünïcödé " * (i % 3) for i in range(300)]


def documents_of(folder: Path) -> list[str]:
    tokens = TokenSet.open(folder)
    tokenizer = tokens.tokenizer()
    starts = [0, *tokens.ends.tolist()]
    flat = [tokens.read(a, b) for a, b in itertools.pairwise(starts)]
    assert all(d[-1] == tokenizer.end for d in flat)
    return [tokenizer.decode(d.tolist()) for d in flat]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_SMALLEST", 1000)


def test_every_kind_of_input(tmp_path: Path, write_jsonl: Callable[..., Path], texts: list[str]) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("b.txt", "sub/a.md", ".hidden/x.txt", "picture.png"):
        (folder / name).write_bytes(f"text of {name}".encode())
    (folder / "c.rst.gz").write_bytes(gzip.compress("zipped ä".encode()))
    write_jsonl("in/d.jsonl", texts)
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(write_jsonl("e", ["from gz 1", "from gz 2"]).read_bytes()))
    table = pa.table({"id": [1, 2, 3], "text": ["row 1", "", "row 3"]})
    pq.write_table(table, folder / "f.parquet", row_group_size=2)
    named = tmp_path / "named.log"
    named.write_text("\ufeffany file that is named", encoding="utf-8")
    summary = build([folder, named], tmp_path / "out", workers=1)
    assert documents_of(tmp_path / "out") == [
        "text of b.txt", "zipped ä", *texts, "from gz 1", "from gz 2", "row 1", "row 3", "text of sub/a.md",
        "any file that is named",
    ]  # fmt: skip
    assert summary.index.skipped == 1
    assert summary.index.text_bytes == summary.index.tokens - summary.index.documents
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "documents.bin", "index.json", "plan.json", "shardwise_tokenizer.json", "tokens-00000.bin",
    ]  # fmt: skip


def test_a_tokenizer_file(
    tmp_path: Path,
    tokenizer_file: Path,
    json_tokenizer: JsonTokenizer,
    texts: list[str],
    write_jsonl: Callable[..., Path],
) -> None:
    path = write_jsonl("in.jsonl", texts, field="body")
    build([path], tmp_path / "out", tokenizer=tokenizer_file, field="body", workers=1)
    tokens = TokenSet.open(tmp_path / "out")
    expected = [t for text in texts for t in [*json_tokenizer.encode(text), json_tokenizer.end]]
    assert tokens.read(0, tokens.tokens).tolist() == expected
    assert tokens.tokenizer().digest == json_tokenizer.digest


def test_large_vocabularies_take_32_bits(tmp_path: Path, trained: bytes, write_jsonl: Callable[..., Path]) -> None:
    content = json.loads(trained)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70_000, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    path = write_jsonl("in.jsonl", ["a<far>b"])
    build([path], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", end="<far>", workers=1)
    tokens = TokenSet.open(tmp_path / "out")
    assert tokens.index.dtype == "uint32"
    assert tokens.read(0, 4).tolist()[1::2] == [70_000, 70_000]


@pytest.mark.usefixtures("small_units")
def test_any_number_of_workers(tmp_path: Path, tokenizer_file: Path, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl("in.jsonl", MANY)
    text = tmp_path / "long.txt"
    text.write_text("a line of text, ä\n" * 400, encoding="utf-8")
    results = []
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        summary = build([path, text], out, tokenizer=tokenizer_file, workers=workers, shard_tokens=1000)
        assert summary.units > 10
        results.append(contents(out))
    assert results[0] == results[1]
    assert len(results[0]) > 8
    assert documents_of(tmp_path / "out2") == [*MANY, "a line of text, ä\n" * 400]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("ending", ["\n", ""])
def test_cuts_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, ending: str,
                           write_jsonl: Callable[..., Path], texts: list[str]) -> None:  # fmt: skip
    """However small the chunks, the documents are those of the files; a long text is cut, and none of it is
    lost."""
    monkeypatch.setattr(inputs, "_SMALLEST", size)
    monkeypatch.setattr(inputs, "_UNITS", 10**9)
    monkeypatch.setattr(documents, "TEXT_PART", max(size, 4))
    path = write_jsonl("in.jsonl", ["ä\n", "b", "", "ccc"])
    path.write_bytes(b"\n" + path.read_bytes().rstrip(b"\n") + ending.encode())
    odd = [
        "no line end at all äöü 😀😀😀😀 " * 3 + ending,
        "\n\n\nlines\n" + ending,
        "x" * 30 + ending,
        texts[5],
    ]
    for i, text in enumerate(odd):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
    build([path, *(tmp_path / f"{i}.txt" for i in range(4))], tmp_path / "out", workers=1)
    assert documents_of(tmp_path / "out") == ["ä\n", "b", "ccc", *odd]
    assert TokenSet.open(tmp_path / "out").index.skipped == 1


class Stop(Exception):
    pass


def stop_after(units: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the build break off before a unit; gives the list of units that were begun."""
    begun: list[int] = []
    encode = Job.encode

    def stopping(self: Job, unit: Any, report: Any) -> Any:
        if len(begun) == units:
            raise Stop
        begun.append(unit.number)
        return encode(self, unit, report)

    monkeypatch.setattr(Job, "encode", stopping)
    return begun


@pytest.mark.usefixtures("small_units")
def test_resumed_anywhere_it_is_the_same(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl("in.jsonl", MANY)
    units = build([path], tmp_path / "whole", workers=1, shard_tokens=5000).units
    out = tmp_path / "out"
    done: list[int] = []
    while True:
        with pytest.MonkeyPatch.context() as patch:
            begun = stop_after(3, patch)
            try:
                summary = build([path], out, workers=1, shard_tokens=5000)
            except Stop:
                with pytest.raises(UserError, match="half"):
                    TokenSet.open(out)
                done += begun
                continue
        break
    assert done + begun == list(range(units))  # nothing was done twice
    assert summary.resumed == len(done)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small_units")
def test_a_damaged_part_is_done_again(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl("in.jsonl", MANY)
    build([path], tmp_path / "whole", workers=1)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(6, patch)
        with pytest.raises(Stop):
            build([path], tmp_path / "out", workers=1)
    work = tmp_path / "out" / "work"
    (work / "000001.tokens").write_bytes(b"12")
    (work / "000002.ends").unlink()
    (work / "000003.json").write_text("{")
    summary = build([path], tmp_path / "out", workers=1)
    assert summary.resumed == 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_built_again_nothing_is_done(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl("in.jsonl", MANY)
    first = build([path], tmp_path / "out", workers=1)
    before = (tmp_path / "out" / "index.json").stat().st_mtime_ns
    again = build([path], tmp_path / "out", workers=1)
    assert (first.already, again.already) == (False, True)
    assert again.index == first.index
    assert (tmp_path / "out" / "index.json").stat().st_mtime_ns == before


def test_another_plan_is_refused_and_told(
    tmp_path: Path, tokenizer_file: Path, write_jsonl: Callable[..., Path]
) -> None:
    path, other = write_jsonl("in.jsonl", MANY), write_jsonl("other.jsonl", MANY[:5])
    out = tmp_path / "out"
    build([path], out, workers=1)
    for change, sentence in (
        ({"shard_tokens": 10}, "--shard-tokens was 536870912 and is 10"),
        ({"field": "id"}, "--field was text and is id"),
        ({"tokenizer": tokenizer_file}, r"tokenizer was byte \(257 tokens.*and is json"),
    ):
        with pytest.raises(UserError, match=sentence):
            build([path], out, workers=1, **change)
    with pytest.raises(UserError, match=r"other\.jsonl was not there"):
        build([path, other], out, workers=1)
    with pytest.raises(UserError, match=r"in\.jsonl is gone"):
        build([other], out, workers=1)
    os.utime(path, ns=(0, 0))
    with pytest.raises(UserError, match=r"in\.jsonl has changed.*--restart"):
        build([path], out, workers=1)
    assert documents_of(out) == MANY
    build([other], out, workers=1, restart=True)
    assert documents_of(out) == MANY[:5]


def test_other_files_are_left_alone(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl("in.jsonl", MANY[:2])
    precious = tmp_path / "out" / "precious"
    precious.parent.mkdir()
    precious.write_text("data")
    for restart in (False, True):
        with pytest.raises(UserError, match="holds other files"):
            build([path], precious.parent, workers=1, restart=restart)
    assert [p.name for p in precious.parent.iterdir()] == ["precious"]
    with pytest.raises(UserError, match="cannot be created"):
        build([path], precious, workers=1)


KILLED = """
import os, signal, sys
from shardwise.data import inputs
from shardwise.data.build import build, Joiner
inputs._SMALLEST = 1000
if __name__ == "__main__":
    add = Joiner.add
    def dying(self, unit, done):
        add(self, unit, done)
        if len(self.done) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    Joiner.add = dying
    build([sys.argv[1]], sys.argv[2], workers=2, shard_tokens=1000)
"""


@pytest.mark.usefixtures("small_units")
def test_killed_it_goes_on_and_leaves_no_workers(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl("in.jsonl", MANY)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    # Workers hold the pipe too, so this waits until they have left.
    result = subprocess.run([sys.executable, script, path, tmp_path / "out"], capture_output=True, timeout=HANG_SECONDS)
    assert result.returncode == -signal.SIGKILL, result.stderr
    build([path], tmp_path / "whole", workers=1, shard_tokens=1000)
    summary = build([path], tmp_path / "out", workers=1, shard_tokens=1000)
    assert summary.resumed >= 5
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


class Deadly(ByteTokenizer):
    """A tokenizer whose process dies."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        os._exit(9)


@pytest.mark.usefixtures("small_units")
def test_a_dead_worker_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_jsonl: Callable[..., Path]
) -> None:
    monkeypatch.setattr(building, "load_tokenizer", lambda *_: Deadly())
    with pytest.raises(UserError, match="a worker process died"):
        build([write_jsonl("in.jsonl", MANY)], tmp_path / "out", workers=2)


def test_two_builds_in_one_folder(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    from shardwise.data.plan import locked

    with locked(tmp_path / "out"), pytest.raises(UserError, match="another build is working"):
        build([write_jsonl("in.jsonl", MANY)], tmp_path / "out", workers=1)


def test_a_full_disk_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_jsonl: Callable[..., Path]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Job, "encode", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        build([write_jsonl("in.jsonl", MANY)], tmp_path / "out", workers=1)


def test_the_library_keeps_its_own_threads_afterwards(tmp_path: Path, write_jsonl: Callable[..., Path],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path = write_jsonl("in.jsonl", MANY)
    for i, value in enumerate((None, "true")):
        if value is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
        build([path], tmp_path / f"out{i}", workers=1)
        assert os.environ.get("TOKENIZERS_PARALLELISM") == value


def test_what_a_unit_holds_does_not_grow_with_its_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed file is one unit, however many documents it has: their ends are written with their tokens."""
    monkeypatch.setattr(encode, "BATCH", 1000)
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"text": "0123456789"}\n' * 1000))
    (unit,) = inputs.split_into_units(found := inputs.find_inputs([source], "text"))
    written: dict[str, io.BytesIO] = {name: io.BytesIO() for name in Job.files}
    seen: list[tuple[int, int]] = []

    def report(consumed: int, tokens: int) -> None:
        seen.append((written["tokens"].tell() // 2, written["ends"].tell() // 8))

    done = Job(found, "text", ByteTokenizer(), tmp_path).write(unit, written, report)
    assert seen == [(1100 * n, 100 * n) for n in range(1, 11)]
    assert done.documents == 1000
    assert np.frombuffer(written["ends"].getvalue(), "<u8").tolist() == list(range(11, 11001, 11))
