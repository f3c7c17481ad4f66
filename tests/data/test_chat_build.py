"""Sets of conversations from files to batches: nothing lost, masks where they belong, rows packed whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flushed import flushes_watched

from shardwise.cli.files.data import add_arguments, execute
from shardwise.data import inputs
from shardwise.data.batches import IGNORE_INDEX, Samples
from shardwise.data.build import build
from shardwise.data.chat.job import ChatOptions
from shardwise.data.join import Joiner
from shardwise.data.open import open_data
from shardwise.data.pack import best_fit, pack
from shardwise.data.prompts import Prompts
from shardwise.data.shards import SKIPPED, TokenSet
from shardwise.run import UserError, run_from_dict

END = 256
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def completions(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"prompt": "p" * rng.randint(0, 9) + "=", "completion": "c" * rng.randint(1, 20)} for _ in range(count)]


def make(tmp_path: Path, rows: list[Any], name: str = "set", **options: Any) -> TokenSet:
    path = write(tmp_path / f"{name}.jsonl", rows)
    return TokenSet.open(build([path], tmp_path / name, workers=1, chat=ChatOptions(**options)).folder)


def documents(tokens: TokenSet) -> list[tuple[list[int], list[int]]]:
    starts = [0, *tokens.ends[:-1].tolist()]
    pairs = zip(starts, tokens.ends.tolist(), strict=True)
    return [(tokens.read(a, b).tolist(), tokens.read_mask(a, b).tolist()) for a, b in pairs]


def test_every_row_is_a_document_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of a few rows, by two workers, as by one; lines counted over all of them."""
    monkeypatch.setattr(inputs, "_SMALLEST", 400)
    rows: list[Any] = completions(300)
    bad = {5: "{", 77: '{"a": 1}', 78: "", 150: '{"prompt": "\\ud800", "completion": "x"}', 299: "[1]"}
    for number, line in bad.items():
        rows[number] = line
    path = write(tmp_path / "rows.jsonl", rows)
    summary = build([path], tmp_path / "one", workers=1, shard_tokens=500, chat=ChatOptions())
    assert summary.units > 10
    again = build([path], tmp_path / "two", workers=2, shard_tokens=500, chat=ChatOptions())
    assert summary.index == again.index
    tokens = TokenSet.open(tmp_path / "one")
    good = [row for row in rows if isinstance(row, dict)]
    expected = [
        (
            [*row["prompt"].encode(), *row["completion"].encode(), END],
            [0] * len(row["prompt"]) + [1] * (len(row["completion"]) + 1),
        )
        for row in good
    ]
    assert documents(tokens) == expected
    assert tokens.prompt_lengths.tolist() == [len(row["prompt"]) for row in good]
    lines = [json.loads(line) for line in (tmp_path / "one" / SKIPPED).read_text().splitlines()]
    assert [each["line"] for each in lines] == [6, 78, 151, 300]  # an empty line is no row
    assert tokens.index.skipped == 4 == sum(tokens.index.reasons.values())
    assert tokens.index.learned == sum(sum(mask) for _, mask in expected)


@pytest.mark.parametrize("form", ["chat", "prompts"])
def test_interrupted_it_goes_on(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_SMALLEST", 400)
    rows: list[Any] = [*completions(150), "{", *completions(100, 1), "[]"]
    path = write(tmp_path / "rows.jsonl", rows)
    options: dict[str, Any] = dict(workers=1, shard_tokens=300, chat=ChatOptions(form=form))
    clean = build([path], tmp_path / "clean", **options)
    add = Joiner.add

    def dying(self: Joiner, unit: Any, done: Any) -> None:
        add(self, unit, done)
        if len(self.done) % 5 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Joiner, "add", dying)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            build([path], tmp_path / "set", **options)
    monkeypatch.setattr(Joiner, "add", add)
    summary = build([path], tmp_path / "set", **options)
    assert summary.resumed >= 15
    assert summary.index == clean.index
    assert (tmp_path / "set" / SKIPPED).read_bytes() == (tmp_path / "clean" / SKIPPED).read_bytes()
    one, other = TokenSet.open(tmp_path / "set"), TokenSet.open(tmp_path / "clean")
    assert documents(one) == documents(other)
    if form == "prompts":
        good = [row for row in rows if isinstance(row, dict)]
        assert [one.row(n) for n in range(one.documents)] == good


@pytest.mark.parametrize("chat", [None, ChatOptions()], ids=["text", "chat"])
def test_a_power_failure_leaves_no_empty_file(chat: ChatOptions | None, tmp_path: Path, tokenizer_file: Path) -> None:
    rows = [{"text": f"text {n}", "prompt": f"question {n}", "completion": f"answer {n}"} for n in range(20)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with flushes_watched() as unflushed:
        build([source], tmp_path / "out", tokenizer=tokenizer_file, workers=1, chat=chat)
        assert unflushed(tmp_path / "out") == []


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * n}]}
        for n in range(1, 40)
    ]
    rows.append({"messages": [{"role": "user", "content": "q"}]})
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=7)
    build([tmp_path / "rows.parquet"], tmp_path / "set", workers=1, chat=ChatOptions())
    build([write(tmp_path / "rows.jsonl", rows)], tmp_path / "other", workers=1, chat=ChatOptions())
    one, other = TokenSet.open(tmp_path / "set"), TokenSet.open(tmp_path / "other")
    assert one.fingerprint == other.fingerprint
    assert json.loads((tmp_path / "set" / SKIPPED).read_text())["line"] == 40


def test_nothing_usable_is_a_mistake(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "q"}]}])
    with pytest.raises(UserError, match=r"not a single usable row(.|\n)*a.jsonl:1: has no message of the assistant"):
        build([path], tmp_path / "set", workers=1, chat=ChatOptions())
    with pytest.raises(UserError, match="none of the fields"):
        build([write(tmp_path / "b.jsonl", [{"text": "x"}])], tmp_path / "b", chat=ChatOptions())
    text = tmp_path / "c.txt"
    text.write_text("x")
    with pytest.raises(UserError, match="is a text"):
        build([text], tmp_path / "c", chat=ChatOptions())


def test_another_plan_is_refused(tmp_path: Path) -> None:
    make(tmp_path, completions(3))
    with pytest.raises(UserError, match="--learn was all and is last"):
        make(tmp_path, completions(3), learn="last")


def test_a_template_goes_with_the_set(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(TEMPLATE)
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    tokens = make(tmp_path, rows, template=template)
    assert tokens.tokenizer().template == template.read_text()
    ((ids, mask),) = documents(tokens)
    assert bytes(ids[:-1]) == b"<user>q<assistant>a"
    assert mask == [0] * 18 + [1, 1]


def test_raw_bytes_take_no_template_of_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    assert make(tmp_path, rows).tokenizer().template not in ("", TEMPLATE)
    with pytest.raises(UserError, match="--template-name: raw bytes have no chat template"):
        make(tmp_path, rows, "named", template_name="default")


def test_limits_at_build(tmp_path: Path) -> None:
    rows = [
        {"prompt": "pp", "completion": "c" * 10},
        {"prompt": "p" * 8, "completion": "c"},
        {"prompt": "p", "completion": "c"},
    ]
    tokens = make(tmp_path, rows, max_tokens=6)
    assert documents(tokens) == [([112, 112, 99, 99, 99, 99], [0, 0, 1, 1, 1, 1]), ([112, 99, END], [0, 1, 1])]
    assert (tokens.index.truncated, tokens.index.reasons) == (1, {"has nothing to learn within 6 tokens": 1})


def test_best_fit_is_best_fit_decreasing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        length = int(rng.integers(1, 30))
        sizes = rng.integers(1, length + 1, rng.integers(0, 50))
        items, ends = best_fit(sizes, length)
        assert sorted(items.tolist()) == list(range(len(sizes)))
        room = [length - int(sizes[own].sum()) for own in np.split(items, ends[:-1])] if len(ends) else []
        simple: list[int] = []
        for size in sorted(sizes.tolist(), reverse=True):
            fits = [(left, n) for n, left in enumerate(simple) if left >= size]
            if fits:
                simple[min(fits)[1]] -= size
            else:
                simple.append(length - size)
        assert sorted(room) == sorted(simple)
        assert min(room, default=0) >= 0


def test_rows_hold_whole_documents(tmp_path: Path) -> None:
    tokens = make(tmp_path, completions(200))
    length = 24
    samples = Samples([pack(tokens, length)], length, shuffled=False)
    whole = sorted(documents(tokens))
    found = []
    batch = samples.take(np.arange(samples.count))
    assert batch.documents is not None
    assert batch.positions is not None
    for row in range(samples.count):
        for number in range(batch.documents[row].max() + 1):
            own = batch.documents[row] == number
            learned = batch.targets[row][own] != IGNORE_INDEX
            if not learned.any():
                continue
            assert batch.positions[row][own].tolist() == list(range(own.sum()))
            ids, targets = batch.tokens[row][own], batch.targets[row][own]
            followed = np.where(learned, targets, np.append(ids[1:], -1))
            found.append(([*ids[:1].tolist(), *followed.tolist()], [0, *learned.astype(int).tolist()]))
    cut = sorted((ids[: length + 1], mask[: length + 1]) for ids, mask in whole)
    assert sorted(found) == cut
    used = sum(len(ids) - 1 for ids, _ in cut)
    assert used / (samples.count * length) > 0.9


def test_pairs_stay_in_one_row(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [
        {"prompt": "p" * rng.randint(1, 5), "chosen": "c" * rng.randint(1, 30), "rejected": "r" * rng.randint(1, 30)}
        for _ in range(50)
    ]
    tokens = make(tmp_path, rows)
    assert (tokens.index.kind, tokens.index.paired, tokens.documents) == ("preference", True, 100)
    assert tokens.labels.tolist() == [1, 0] * 50
    assert tokens.prompt_lengths.tolist() == [len(row["prompt"]) for row in rows for _ in range(2)]
    length = 40
    packs = pack(tokens, length)
    assert (packs.documents[::2] + 1).tolist() == packs.documents[1::2].tolist()
    assert (packs.ends % 2 == 0).all()
    batch = Samples([packs], length).take(np.arange(packs.count))
    assert batch.labels is not None
    assert batch.documents is not None
    for row in range(packs.count):
        for number in range(batch.documents[row].max()):
            own = batch.documents[row] == number
            letter = ord("c") if number % 2 == 0 else ord("r")
            assert set(batch.targets[row][own].tolist()) - {IGNORE_INDEX, END} == {letter}
            assert (batch.labels[row][own] == (number + 1) % 2).all()


def test_labels_and_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c", "label": bool(n % 3)} for n in range(9)]
    tokens = make(tmp_path, rows, "labels")
    assert (tokens.index.kind, tokens.index.paired) == ("preference", False)
    assert tokens.labels.tolist() == [int(row["label"]) for row in rows]
    asked = [{"prompt": f"question {n}", "answer": n, "more": {"x": ["ü"]}} for n in range(7)]
    prompts = Prompts([make(tmp_path, asked, "prompts")], [np.arange(7)], seed=5)
    found = prompts.take(np.arange(14))
    for epoch in (found[:7], found[7:]):
        assert sorted(each.row["answer"] for each in epoch) == list(range(7))
        assert all(bytes(each.tokens.tolist()).decode() == each.row["prompt"] for each in epoch)
    assert found[3].row == asked[found[3].row["answer"]]
    assert prompts.take([9])[0].row == found[9].row


def test_order_is_a_function_of_the_seed_and_the_index(tmp_path: Path) -> None:
    tokens = make(tmp_path, completions(100))
    run = run_from_dict(
        {"data": {"sets": [str(tokens.folder)]}, "train": {"seq_len": 32, "seed": 7, "global_batch": 4}}
    )
    assert run.data.separate_documents
    data, other = open_data(run), open_data(run)
    whole = data.train.take(np.arange(2 * data.train.count))
    for index in (0, 3, data.train.count + 2):
        assert (other.train.take([index]).tokens == whole.tokens[index]).all()
    assert data.validation.count >= 1
    held = {tuple(row) for row in data.validation.take(np.arange(data.validation.count)).tokens.tolist()}
    assert not held & {tuple(row) for row in whole.tokens.tolist()}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    def run(*arguments: object) -> int:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return execute(parser.parse_args([str(a) for a in arguments]))

    path = write(tmp_path / "a.jsonl", [*completions(5), "{"])
    assert run("build", "--chat", path, "--out", tmp_path / "set", "--workers", 1, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["conversations"], found["kind"], found["skipped"]) == (5, "chat", 1)
    assert found["skipped_rows"][0]["line"] == 6
    assert found["tokens_learned"] < found["tokens"]
    assert run("show", tmp_path / "set") == 0
    text = capsys.readouterr().out
    assert "conversations    5" in text
    assert f"{path}:6: is not valid JSON" in text
    with pytest.raises(UserError, match="--chat too"):
        run("build", path, "--out", tmp_path / "other", "--learn", "last")
    from shardwise.cli.files.conversations import runs

    tokens = TokenSet.open(tmp_path / "set")
    pieces = runs(tokens.tokenizer(), *documents(tokens)[0])
    assert [learned for learned, _ in pieces] == [False, True]
    assert pieces[1][1].endswith("c<|endoftext|>")
