"""Filters and deduplication against what others compute: datatrove, brute force, counting by hand."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from data_prepare import STEPS, documents, write_split

from shardwise.data.prepare.contamination import decontaminate
from shardwise.data.prepare.fates import Fates
from shardwise.data.prepare.filters import top_characters
from shardwise.data.prepare.keyed import Exact, Substring
from shardwise.data.prepare.minhash import MinHash, survivors
from shardwise.data.prepare.prepare import prepare
from shardwise.data.prepare.privacy import privacy
from shardwise.data.prepare.recipe import read_recipe
from shardwise.data.prepare.shuffle import KeyWriter, read_partition
from shardwise.data.prepare.words import Document, Vocabulary, simple_words
from shardwise.run.problems import UserError

GOLDEN = Path(__file__).parent / "datatrove.json"


@pytest.mark.drawn(group="preparation")
def test_every_document_ends_where_datatrove_ends_it(tmp_path: Path) -> None:
    """`benchmarks/data_prepare.py golden` wrote what datatrove does; clusters decide which of several alike stays."""
    golden = json.loads(GOLDEN.read_text())
    write_split(tmp_path / "corpus", golden["count"], golden["seed"])
    lines = ["[[sources]]", 'name = "web"', 'paths = ["corpus"]', *(f'[[steps]]\nkind = "{kind}"' for kind in STEPS)]
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    prepare(read_recipe(tmp_path / "recipe.toml"), tmp_path, tmp_path / "out", workers=1)
    fates = Fates(tmp_path / "out")
    found = [golden["steps"].index(fates[row].step) for row in range(len(fates))]
    assert found == golden["fates"]
    assert min(Counter(found)[number] for number in range(len(golden["steps"]))) > 2  # every step decides


def test_signatures_are_least_hashes_by_hand() -> None:
    minhash = MinHash(3, 4, 2, 7, "sha1")
    words = [word.encode() for word in ["one", "two", "three", "four", "five", "two", "three", "four"]]
    draw = np.random.RandomState(7)
    a = [int(x) for x in draw.randint(1, 2**61 - 1, dtype=np.uint64, size=8)]
    b = [int(x) for x in draw.randint(0, 2**61 - 1, dtype=np.uint64, size=8)]
    shingles = [minhash._hash(b" ".join(words[i : i + 3])) for i in range(6)]
    least = [min((x * p + q) % 2**64 % (2**61 - 1) for x in shingles) for p, q in zip(a, b, strict=True)]
    found = minhash.signature(words)
    assert found is not None
    assert found.ravel().tolist() == least
    assert minhash.signature(words[:2]) is None
    long = [str(number).encode() for number in range(500)]  # several blocks
    several = minhash.signature(long)
    assert several is not None
    halves = [minhash.signature(long[:252]), minhash.signature(long[250:])]
    assert np.array_equal(several, np.minimum(halves[0], halves[1]))  # type: ignore[arg-type]


def test_clusters_are_connected_and_one_of_each_stays() -> None:
    rng = random.Random(1)
    pairs = np.array([sorted(rng.sample(range(0, 900, 3), 2)) for _ in range(200)], np.uint64)
    gone, others = survivors(pairs)
    cluster = {int(each): {int(each)} for each in np.unique(pairs)}
    for a, b in pairs.tolist():
        together = cluster[a] | cluster[b]
        for each in together:
            cluster[each] = together
    stays = {int(each) for each in np.unique(pairs)} - set(gone.tolist())
    assert sorted(gone.tolist()) == gone.tolist()
    assert all(len(cluster[each] & stays) == 1 for each in cluster)
    assert all(other in cluster[each] & stays for each, other in zip(gone.tolist(), others.tolist(), strict=True))


def test_the_most_frequent_run_of_words_by_counting() -> None:
    vocabulary = Vocabulary(simple_words)
    for text in documents(60, seed=9):
        document = Document(text, vocabulary)
        words = [word for chunk in simple_words(text.split()) for word in chunk]
        for n in (2, 3, 4):
            runs = Counter(" ".join(words[at : at + n]) for at in range(len(words) - n + 1))
            want = max(((count, -at, run) for at, (run, count) in enumerate(runs.items())), default=(0, 0, ""))
            assert top_characters(document, n) == want[0] * len(want[2])


def test_repeated_text_is_cut_to_the_word() -> None:
    """Against a search of every run of words in everything before it."""
    rng = random.Random(5)
    words = [f"w{number}" for number in range(12)]
    texts = [
        " ".join(rng.choices(words, k=rng.randint(5, 60))) + "\n" + " ".join(rng.choices(words, k=9)) for _ in range(40)
    ]
    texts += [f"before {texts[3]} after", texts[7], "  ".join(texts[9].split())]
    step = Substring(words=4, least=1)
    vocabulary = Vocabulary(simple_words)
    keys = []
    for number, text in enumerate(texts):
        _, records = step.keys(Document(text, vocabulary), 1)
        records["id"] = number
        keys.append(records)
    verdicts = step.match(np.concatenate(keys))
    seen: set[tuple[str, ...]] = set()
    for number, text in enumerate(texts):
        split = text.split()
        cut = set()
        for at in range(len(split) - 3):
            run = tuple(split[at : at + 4])
            if run in seen:
                cut |= set(range(at, at + 4))
            seen.add(run)
        reason, left = step.apply(text, verdicts[verdicts["id"] == number])
        want = [word for at, word in enumerate(split) if at not in cut]
        assert left.split() == want
        assert bool(reason) == (not want)
    partitions, records = step.keys(Document(texts[0], vocabulary), 7)
    assert set(partitions.tolist()) <= set(range(7))
    assert len(records) == len(texts[0].split()) - 3


def test_exact_keys_fall_into_all_partitions() -> None:
    vocabulary = Vocabulary(simple_words)
    found = [int(Exact().keys(Document(f"text {number}", vocabulary), 8)[0][0]) for number in range(200)]
    assert set(found) == set(range(8))
    assert Exact().keys(Document("a  b", vocabulary), 1)[1] == Exact().keys(Document("a\nb", vocabulary), 1)[1]
    strict = Exact(blanks=True)
    assert strict.keys(Document("a  b", vocabulary), 1)[1] != strict.keys(Document("a\nb", vocabulary), 1)[1]


def test_a_partition_does_not_load_the_index_of_all(tmp_path: Path) -> None:
    """Every partition reads the index of every unit: as whole arrays, that grows with the square of the corpus."""
    shuffle, partitions, units = Exact(), 100_000, 5
    for unit in range(units):
        (tmp_path / str(unit)).mkdir()
        writer = KeyWriter(tmp_path / str(unit), shuffle.dtype, partitions)
        records = np.zeros(3, shuffle.dtype)
        records["id"] = unit
        writer.add(np.array([7, 99_999, 7]), records)
        writer.close()
    folders = [tmp_path / str(unit) for unit in range(units)]
    tracemalloc.start()
    found = read_partition(folders, 7, shuffle.dtype)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["id"].tolist() == [unit for unit in range(units) for _ in range(2)]
    assert len(read_partition(folders, 8, shuffle.dtype)) == 0
    assert most < 8 * partitions / 4


def test_documents_that_hold_a_test_go(tmp_path: Path) -> None:
    question = "What is the name of the river that flows through the old town of the capital, and why?"
    short = "Who wrote the longest book of all books?"
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": question, "answer": short, "number": 3}) + "\n")
    vocabulary = Vocabulary(simple_words)
    rule = decontaminate(paths=[str(path)])
    for text, gone in (
        (f"Some page. {question.upper()} More of it.", True),
        (f"Asked: {short.replace('?', '!')} Nobody knows.", True),
        ("What is the name of the river that flows through the old city, and why?", False),
        ("Who wrote it?", False),
    ):
        assert bool(rule(Document(text, vocabulary))) == gone, text
    only = decontaminate(paths=[str(path)], fields=["question"])
    assert not only(Document(short, vocabulary))
    with pytest.raises(UserError, match="no text in them has 8 words"):
        decontaminate(paths=[str(path)], fields=["number"])


def test_a_test_set_may_have_any_number_of_words(tmp_path: Path) -> None:
    """The table of words grows while the words of one text are looked up."""
    words = [f"{a}{b}{c}" for a in "abcdefghijklm" for b in "nopqrstuvwxyz" for c in "abcdefghijklm"]
    (tmp_path / "test.txt").write_text(" ".join(words))
    rule = decontaminate(paths=[str(tmp_path / "test.txt")])
    others = [word + "s" for word in words]
    assert rule(Document(" ".join(words[100:113]), Vocabulary(simple_words)))
    assert not rule(Document(" ".join(others), Vocabulary(simple_words)))
    assert rule(Document(" ".join(others + words[5:30]), Vocabulary(simple_words)))


def test_personal_data_is_written_over() -> None:
    rule = privacy(kinds=["email", "ip", "phone", "card"])
    text = "Mail a.b+c@sub.host.org or 8.8.4.4 (not 10.0.0.1, 1.2.3.4.5, 300.1.1.1), call +1 415-555-2671, pay 4111 1111 1111 1111."
    document = Document(text, Vocabulary(simple_words))
    assert rule(document) == ""
    want = (
        "Mail email@example.com or 192.0.2.1 (not 10.0.0.1, 1.2.3.4.5, 300.1.1.1), call 555-0100, pay 0000000000000000."
    )
    assert document.text == want
    unchanged = Document("4111 1111 1111 1112 and version 1.2.3", Vocabulary(simple_words))
    rule(unchanged)
    assert unchanged.text == "4111 1111 1111 1112 and version 1.2.3"
