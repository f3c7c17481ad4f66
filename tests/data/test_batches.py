"""A sample number means the same window in any batch; epochs visit everything once; documents are kept apart
when asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from shardwise.data.batches import IGNORE_INDEX, Batch, Samples, Windows, windows_in
from shardwise.data.pack import _fitting
from shardwise.data.shards import TokenSet

LENGTH = 4
RNG = np.random.default_rng(0)
# Documents of 1 to 12 tokens, in which no two tokens are alike, so that a token tells where it stands.
CUTS = np.unique(RNG.integers(1, 240, 60))
LONG = [d.tolist() for d in np.split(np.arange(241), CUTS)]
SHORT = [[1000 + i for i in range(29)]]


@pytest.fixture
def long(write_set: Callable[..., TokenSet]) -> TokenSet:
    return write_set("long", LONG, shard_tokens=50)


@pytest.fixture
def short(write_set: Callable[..., TokenSet]) -> TokenSet:
    return write_set("short", SHORT, shard_tokens=10)


def whole(tokens: TokenSet) -> Windows:
    return Windows(tokens, 0, windows_in(tokens.tokens, LENGTH))


def same(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, n), getattr(other, n)) for n in ("tokens", "targets", "positions", "documents")]
    return all((a is None and b is None) or np.array_equal(a, b) for a, b in pairs)


def test_windows_need_their_last_target() -> None:
    assert [windows_in(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_a_window(long: TokenSet) -> None:
    batch = Samples([whole(long)], LENGTH, shuffled=False).take([0, 3])
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert batch.targets.tolist() == [[1, 2, 3, 4], [13, 14, 15, 16]]
    assert batch.tokens.dtype == batch.targets.dtype == np.int64
    assert batch.positions is None
    assert batch.documents is None
    assert batch.loss_tokens == 8


@pytest.mark.parametrize("weights", [(), (0.7, 0.3)])
@pytest.mark.parametrize("separate", [False, True])
def test_any_composition_gives_the_same_samples(
    long: TokenSet, short: TokenSet, weights: tuple[float, ...], separate: bool
) -> None:
    samples = Samples([whole(long), whole(short)], LENGTH, seed=3, weights=weights, separate_documents=separate)
    numbers = np.array([5, 0, 200, 5, 40_000, 10**12])
    together = samples.take(numbers)
    for row, number in enumerate(numbers):
        alone = samples([number])
        for name in ("tokens", "targets", "positions", "documents"):
            if getattr(alone, name) is not None:
                assert np.array_equal(getattr(together, name)[row], getattr(alone, name)[0])
    again = Samples([whole(long), whole(short)], LENGTH, seed=3, weights=weights, separate_documents=separate)
    assert same(again.take(numbers), together)


def test_an_epoch_visits_every_window_once(long: TokenSet, short: TokenSet) -> None:
    samples = Samples([whole(long), whole(short)], LENGTH, seed=1)
    assert samples.count == 60 + 7
    starts = sorted([*range(0, 240, 4), *range(1000, 1028, 4)])
    epochs = [samples.take(np.arange(67) + 67 * e).tokens[:, 0] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == starts
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    assert not np.array_equal(epochs[0], np.array(starts))
    other = Samples([whole(long), whole(short)], LENGTH, seed=2).take(np.arange(67)).tokens[:, 0]
    assert not np.array_equal(other, epochs[0])


def test_weights_share_out_samples(long: TokenSet, short: TokenSet) -> None:
    samples = Samples([whole(long), whole(short)], LENGTH, seed=1, weights=(0.25, 0.75))
    first = samples.take(np.arange(2**14)).tokens[:, 0]
    assert np.count_nonzero(first >= 1000) == 2**14 * 3 // 4
    # Within a set, windows are as even as its own epochs make them.
    for low, high, windows in ((0, 1000, 60), (1000, 2000, 7)):
        counts = Counter(first[(first >= low) & (first < high)].tolist())
        assert len(counts) == windows
        assert max(counts.values()) - min(counts.values()) <= 1


def test_in_order_by_turns(long: TokenSet, short: TokenSet) -> None:
    samples = Samples([whole(short), whole(long)], LENGTH, shuffled=False)
    first = samples.take(np.arange(samples.count + 2)).tokens[:, 0].tolist()
    assert first[:6] == [1000, 0, 1004, 4, 1008, 8]
    assert first[12:17] == [1024, 24, 28, 32, 36]
    assert first[66:] == [236, 1000, 0]
    assert len(set(first)) == samples.count


def test_documents_apart(long: TokenSet) -> None:
    """Against the plain definition, token by token."""
    owner = np.repeat(np.arange(len(LONG)), [len(d) for d in LONG])
    samples = Samples([whole(long)], LENGTH, shuffled=False, separate_documents=True)
    batch = samples.take(np.arange(60))
    assert batch.positions is not None
    assert batch.documents is not None
    assert batch.documents.dtype == np.int32
    ignored = 0
    for row in range(60):
        for column in range(LENGTH):
            at = row * LENGTH + column
            assert batch.tokens[row, column] == at
            assert batch.documents[row, column] == owner[at] - owner[row * LENGTH]
            begin = max(row * LENGTH, int(np.flatnonzero(owner == owner[at])[0]))
            assert batch.positions[row, column] == at - begin
            crossing = owner[at] != owner[at + 1]
            ignored += crossing
            assert batch.targets[row, column] == (IGNORE_INDEX if crossing else at + 1)
    assert batch.loss_tokens == 240 - ignored
    assert ignored > 40


@pytest.mark.parametrize("length", range(1, 34))
def test_a_pair_fits_in_its_row(length: int) -> None:
    sizes = np.stack(np.meshgrid(np.arange(40), np.arange(40)), axis=-1).reshape(-1, 2)
    kept = _fitting(sizes, length)
    assert (kept.sum(axis=1) == np.minimum(sizes.sum(axis=1), length)).all()
    assert ((kept >= 0) & (kept <= sizes)).all()


def test_a_part_of_a_set(long: TokenSet) -> None:
    samples = Samples([Windows(long, 50, 10)], LENGTH)
    assert samples.count == 10
    assert sorted(samples.take(np.arange(10)).tokens[:, 0].tolist()) == list(range(200, 240, 4))


def test_no_samples(long: TokenSet) -> None:
    assert Samples([whole(long)], LENGTH).take([]).tokens.shape == (0, LENGTH)
    with pytest.raises(IndexError):
        Samples([whole(long)], LENGTH).take([-1])
    with pytest.raises(IndexError):
        Samples([Windows(long, 0, 0)], LENGTH, shuffled=False).take([0])
