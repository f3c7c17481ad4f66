"""All mistakes of a recipe are told at once, each with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.data.prepare.files import find_files
from shardwise.data.prepare.recipe import read_recipe
from shardwise.run.problems import UserError

WRONG = """
wrods = "simple"
bad = "maybe"
longest = 0
[[sources]]
name = "we b"
paths = []
weight = -1
[[sources]]
paths = "x"
[[steps]]
kind = "gopher_qualty"
[[steps]]
kind = "gopher_quality"
fewest = 3
most_words = "many"
[[steps]]
kind = "language"
[tokenizer]
train = "a lot"
"""


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(WRONG)
    with pytest.raises(UserError) as raised:
        read_recipe(path)
    said = str(raised.value)
    for part in (
        "wrods: is not known; did you mean words?",
        'bad: "maybe" is not known',
        "longest: 0 must be at least 1",
        'sources[0].name: "we b" must be of letters',
        "sources[0].paths: names no file",
        "sources[0].weight: -1",
        'sources[1].paths: "x" is not a list',
        'steps[0].kind: "gopher_qualty" is not known; did you mean gopher_quality',
        "steps[1].fewest: gopher_quality has no such setting; did you mean fewest_words",
        'steps[1].most_words: "many" is not a whole number',
        "steps[2].keep: language needs it",
        'tokenizer.train: "a lot" is not a whole number',
    ):
        assert part in said, part
    assert all(problem.where == str(path) for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[[", "is not TOML"), ("", "sources: is missing"), ("sources = 3", "list of tables"),
     ("data = 3", r"data: is not known; there are words, bad, longest, sources, steps, tokenizer$"),
     ("source = 3", r"source: is not known; did you mean sources\?$"),
     ('[[steps]]\nkind = "minhsh"', r"is not known; did you mean minhash\?$"), ("[[steps]]", r"kind: is missing; there are "),
    ],
)  # fmt: skip
def test_what_is_no_recipe(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_recipe(path)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("bands = 0", "bands: 0 must be between 1 and 4,096"),
        ("rows = 5000", "rows: 5000 must be between"),
        ("seed = -1", "seed: -1 must be between 0 and"),
        ('hash = "md5"', 'hash: "md5" is not known: xxhash or sha1'),
    ],
)
def test_settings_that_no_comparison_can_take(tmp_path: Path, setting: str, said: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'[[sources]]\nname = "web"\npaths = ["*.jsonl"]\n[[steps]]\nkind = "minhash"\n{setting}\n')
    with pytest.raises(UserError, match=said):
        read_recipe(path)


def test_lists_hold_what_their_settings_take(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[[sources]]\nname = "web"\npaths = [1]\n[[steps]]\nkind = "gopher_repetition"\ntop = [1]\n')
    with pytest.raises(UserError) as raised:
        read_recipe(path)
    assert "sources[0].paths: [1] is not a list of texts" in str(raised.value)
    assert "steps[0].top: [1] is not a list of pairs of numbers" in str(raised.value)


def test_more_steps_than_a_document_has_bits_for(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[[sources]]\nname = "web"\npaths = ["*.jsonl"]\n' + '[[steps]]\nkind = "privacy"\n' * 33)
    with pytest.raises(UserError, match="steps: are 33; a recipe has at most 32"):
        read_recipe(path)


def test_files_that_are_not_there_or_unknown(tmp_path: Path) -> None:
    (tmp_path / "x.pdf").write_bytes(b"")
    path = tmp_path / "recipe.toml"
    path.write_text('[[sources]]\nname = "a"\npaths = ["none.jsonl", "x.pdf", "*.jsonl.gz"]\n')
    with pytest.raises(UserError) as raised:
        find_files(read_recipe(path))
    assert len(raised.value.problems) == 3
    assert "of no known kind" in str(raised.value)
