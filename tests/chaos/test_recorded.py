"""A campaign that is stopped goes on where its file ends."""

from __future__ import annotations

from pathlib import Path

from recorded import Recorded


def test_a_file_has_the_last_word_on_every_case_of_its_seed(tmp_path: Path) -> None:
    out = tmp_path / "done.jsonl"
    first = Recorded(out, seed=1)
    first.add(("grpo", "dapo", 3), "wrong: µ")
    first.add(("adapters", "lora", 4), "")
    Recorded(out, seed=2).add(("adapters", "dora", 5), "")
    first.add(("grpo", "dapo", 3), "")
    assert Recorded(out, seed=1).said == first.said == {("grpo", "dapo", 3): "", ("adapters", "lora", 4): ""}


def test_a_line_that_a_kill_cut_short_is_compared_again_and_harms_no_other(tmp_path: Path) -> None:
    out = tmp_path / "done.jsonl"
    file = Recorded(out, seed=1)
    file.add(("a", 1), "")
    length = out.stat().st_size
    file.add(("a", 2), "")
    out.write_bytes(out.read_bytes()[: length + 9])
    resumed = Recorded(out, seed=1)
    assert set(resumed.said) == {("a", 1)}
    resumed.add(("a", 3), "")
    assert set(Recorded(out, seed=1).said) == {("a", 1), ("a", 3)}


def test_nothing_is_written_where_no_file_is_asked_for() -> None:
    nowhere = Recorded(None, seed=1)
    nowhere.add(("a", 1), "")
    assert nowhere.said == {("a", 1): ""}
