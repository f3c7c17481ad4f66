"""Lengths of requests: every way to say them, the same for the same seed, and a sentence for what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.run import UserError
from shardwise.run.lengths import parse_lengths


def test_a_number() -> None:
    lengths = parse_lengths("128")
    assert lengths.draw(3, seed=1) == [128] * 3
    assert (lengths.low, lengths.high, lengths.mean, str(lengths)) == (128, 128, 128, "128")


def test_evenly_between_two() -> None:
    lengths = parse_lengths(" U(3, 5) ")
    drawn = lengths.draw(3000, seed=1)
    assert {length: round(drawn.count(length), -3) for length in set(drawn)} == {3: 1000, 4: 1000, 5: 1000}
    assert drawn == lengths.draw(3000, seed=1) != lengths.draw(3000, seed=2)
    assert drawn[:10] == lengths.draw(10, seed=1)
    assert lengths.mean == 4


def test_a_file_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("5\n\n7\n 9 \n")
    lengths = parse_lengths(str(tmp_path / "lengths"))
    assert lengths.draw(5, seed=3) == [5, 7, 9, 5, 7]
    assert (lengths.low, lengths.high, lengths.mean) == (5, 9, 7)


@pytest.mark.parametrize("text", ["", "0", "-3", "U(0,5)", "U(5,3)", "U(1)", "N(1,2)", "9" * 30, "1.5", "absent.txt"])
def test_nonsense(text: str) -> None:
    with pytest.raises(UserError, match=r"--input"):
        parse_lengths(text, "--input")


@pytest.mark.parametrize("content", [b"", b"1\nx\n", b"\xff", b"0\n"])
def test_a_file_of_nonsense(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lengths").write_bytes(content)
    with pytest.raises(UserError, match="lengths"):
        parse_lengths(str(tmp_path / "lengths"))


@pytest.mark.parametrize("text", ["9" * 5000, f"U(1,{'9' * 5000})"])
def test_a_number_with_thousands_of_digits_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="too long for a number of tokens"):
        parse_lengths(text)
