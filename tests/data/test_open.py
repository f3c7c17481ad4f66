"""The data of a run: held-out windows, validation sets, mixtures, and everything that does not fit
together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import open_data
from shardwise.data.build import build
from shardwise.data.chat.job import ChatOptions
from shardwise.data.open import open_prompts
from shardwise.data.order import BLOCK
from shardwise.data.shards import TokenSet
from shardwise.data.tokenizer import load_tokenizer
from shardwise.plan.plan import assumed, plan
from shardwise.run import Run, UserError, read_run, run_from_dict
from shardwise.run.vocabulary import vocabulary_of


def run_of(data: dict[str, object], vocab: int = 3000, **train: object) -> Run:
    return run_from_dict({"model": {"vocab": vocab}, "data": data, "train": {"seq_len": 10, **train}})


@pytest.fixture
def hundred(write_set: Callable[..., TokenSet]) -> TokenSet:
    """100 windows of 10 tokens, each of which tells where it stands."""
    return write_set("hundred", [list(range(1001))])


def first_tokens(samples: object) -> list[int]:
    return samples.take(np.arange(samples.count)).tokens[:, 0].tolist()  # type: ignore[attr-defined]


def test_the_end_is_held_out(hundred: TokenSet) -> None:
    data = open_data(run_of({"sets": [str(hundred.folder)], "holdout": 0.1}))
    assert sorted(first_tokens(data.train)) == list(range(0, 900, 10))
    assert first_tokens(data.train) != list(range(0, 900, 10))
    assert first_tokens(data.validation) == list(range(900, 1000, 10))
    assert data.tokenizer.vocab == 257


def test_at_least_one_window_is_held_out(hundred: TokenSet) -> None:
    data = open_data(run_of({"sets": [str(hundred.folder)], "holdout": 1e-6}))
    assert (data.train.count, data.validation.count) == (99, 1)


def test_no_holdout_and_no_evaluation(hundred: TokenSet) -> None:
    run = run_of({"sets": [str(hundred.folder)], "holdout": 0.0}, eval_every=0)
    data = open_data(run)
    assert (data.train.count, data.validation.count) == (100, 0)
    with pytest.raises(UserError, match=r"data\.holdout: is 0"):
        open_data(run_of({"sets": [str(hundred.folder)], "holdout": 0.0}))


def test_a_holdout_with_nothing_to_learn(tmp_path: Path) -> None:
    """The last conversation, which is held out, has its answer beyond the sequence: there is no loss to compute."""
    rows = [{"prompt": "q", "completion": "a"}] * 20 + [{"prompt": "q" * 300, "completion": "a"}]
    (tmp_path / "h.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build([tmp_path / "h.jsonl"], tmp_path / "h", chat=ChatOptions(), workers=1)
    sets = {"sets": [str(tmp_path / "h")]}
    with pytest.raises(UserError, match=r"data\.holdout: 0\.01 holds out no document with anything to learn"):
        open_data(run_of({**sets, "holdout": 0.01}, seq_len=64))
    assert open_data(run_of({**sets, "holdout": 0.1}, seq_len=64)).validation.count == 1
    assert open_data(run_of({**sets, "holdout": 0.01}, seq_len=64, eval_every=0)).validation.count == 0


def test_a_validation_set(hundred: TokenSet, write_set: Callable[..., TokenSet]) -> None:
    other = write_set("other", [list(range(2000, 2041))])
    data = open_data(run_of({"sets": [str(hundred.folder)], "validation": [str(other.folder)]}))
    assert data.train.count == 100
    assert first_tokens(data.validation) == [2000, 2010, 2020, 2030]


def test_seed_weights_and_documents_reach_the_samples(hundred: TokenSet, write_set: Callable[..., TokenSet]) -> None:
    other = write_set("other", [list(range(2000, 2041))])
    sets = {"sets": [str(hundred.folder), str(other.folder)]}
    plain = open_data(run_of(sets)).train.take(np.arange(50))
    assert plain.documents is None
    assert not np.array_equal(open_data(run_of(sets, seed=1)).train.take(np.arange(50)).tokens, plain.tokens)
    weighted = open_data(run_of({**sets, "weights": [0.0, 1.0]})).train
    assert weighted.take(np.arange(50)).tokens.min() >= 2000
    apart = open_data(run_of({**sets, "separate_documents": True}))
    assert apart.train.take([0]).documents is not None
    assert apart.validation.take([0]).positions is not None


@pytest.mark.drawn(group="whole runs")
def test_weights_reach_the_prompts(tmp_path: Path) -> None:
    for name in "ab":
        rows = (json.dumps({"prompt": f"{name} question {number}"}) + "\n" for number in range(100))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        build([tmp_path / f"{name}.jsonl"], tmp_path / name, chat=ChatOptions(), workers=1)
    (tmp_path / "r.py").write_text("def one(**given): return 1.0\n")
    sets = [str(tmp_path / name) for name in "ab"]
    objective = dict(kind="grpo", rewards=[f"{tmp_path}/r.py:one"], completion_tokens=16, group=4)

    def drawn(weights: list[float]) -> list[str]:
        said = dict(data=dict(sets=sets, weights=weights), objective=objective, train=dict(seq_len=64, global_batch=8))
        found = open_prompts(run_from_dict({"model": {"vocab": 257}, **said})).train.take(np.arange(BLOCK))
        return [prompt.row["prompt"] for prompt in found]

    found = drawn([3.0, 1.0])
    assert Counter(prompt[0] for prompt in found) == {"a": BLOCK * 3 // 4, "b": BLOCK // 4}
    times = Counter(prompt for prompt in found if prompt[0] == "a")
    assert len(times) == 99  # one of a hundred is held out
    assert max(times.values()) - min(times.values()) == 1  # whole epochs, and the beginning of one
    assert {prompt[0] for prompt in drawn([1.0, 0.0])} == {"a"}
    assert Counter(prompt[0] for prompt in drawn([])[:198]) == {"a": 99, "b": 99}


def test_fingerprint_follows_the_sets(hundred: TokenSet, write_set: Callable[..., TokenSet]) -> None:
    other = write_set("other", [list(range(2000, 2041))])
    one, two = str(hundred.folder), str(other.folder)
    chosen = [
        {"sets": [one]}, {"sets": [two]}, {"sets": [one, two]}, {"sets": [two, one]},
        {"sets": [one], "validation": [two]},
    ]  # fmt: skip
    prints = [open_data(run_of(c)).fingerprint for c in chosen]
    assert len(set(prints)) == len(prints)
    assert open_data(run_of({"sets": [one]}, seed=5)).fingerprint == prints[0]


def test_everything_wrong_at_once(hundred: TokenSet, tmp_path: Path, tokenizer_file: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_data(run_of({"sets": [str(tmp_path / "no"), str(tmp_path)], "validation": [str(tmp_path / "neither")]}))
    text = str(caught.value)
    assert text.count("data.sets") == 2
    assert text.count("data.validation") == 1

    source = tmp_path / "a.txt"
    source.write_text("some text " * 20)
    build([source], tmp_path / "tiny", tokenizer=tokenizer_file, workers=1)
    with pytest.raises(UserError) as caught:
        open_data(run_of({"sets": [str(hundred.folder), str(tmp_path / "tiny")]}, vocab=257, seq_len=500))
    text = str(caught.value)
    assert "was made with another tokenizer (json, 4" in text
    assert "model.vocab: 257 is too small for the data's tokenizer; set model.vocab = " in text
    assert "too few for one sequence of train.seq_len = 500 and one to hold out" in text


def test_the_vocabulary_is_the_data_s_unless_the_run_sets_it(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 200)
    build([tmp_path / "a.txt"], tmp_path / "set", tokenizer=tokenizer_file, workers=1)
    size = load_tokenizer(tokenizer_file).vocab
    (tmp_path / "run.toml").write_text(f'[data]\nsets = ["{tmp_path / "set"}"]\n[train]\nseq_len = 32\n')
    run = read_run(tmp_path / "run.toml")
    assert run.model.vocab == size != 257
    open_data(run)
    # A preset has its own, and so has a run that says it; one that is too small is still told.
    assert read_run(tmp_path / "run.toml", ["model.preset=gpt2-124m"]).model.vocab == 50257
    assert read_run(tmp_path / "run.toml", ["model.vocab=1024"]).model.vocab == 1024
    with pytest.raises(
        UserError, match=f"257 is too small for the data's tokenizer; set model.vocab = {size}, or more"
    ):
        open_data(read_run(tmp_path / "run.toml", ["model.vocab=257"]))
    # Where the data is not, as on a laptop that plans, the default is assumed, and the plan says so.
    assert not assumed(run)
    elsewhere = read_run(tmp_path / "run.toml", [f"data.sets={tmp_path / 'elsewhere'}"])
    assert elsewhere.model.vocab == 257
    (note,) = assumed(elsewhere)
    assert note.endswith("not here to say the size of its tokenizer: planned with model.vocab = 257, the default")
    assert note in plan(elsewhere).notes
    assert not assumed(read_run(tmp_path / "run.toml", ["data.sets=[]"]))  # the built-in corpus is of bytes


@pytest.mark.parametrize("index", ["", "[]", '{"tokenizer": 1}', '{"tokenizer": {"vocab": "x"}}', "[" * 100_000])
def test_a_set_that_cannot_be_read_is_left_to_whoever_opens_it(tmp_path: Path, index: str) -> None:
    (tmp_path / "index.json").write_text(index)
    assert vocabulary_of([str(tmp_path)]) is None


def test_without_sets_the_builtin_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = open_data(Run())
    assert data.train.count > 1000
    assert data.validation.count > 50
    assert len(data.tokenizer.decode(data.train.take([0]).tokens[0])) > 200
    assert data.fingerprint == open_data(Run()).fingerprint
