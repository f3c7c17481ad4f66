"""A rank's part of a checkpoint: what is staged is what is written, however large, and memory is used again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.model.saved_files import read_table
from shardwise.parallel.local_parameter import Box
from shardwise.train.saves import part
from shardwise.train.saves.contents import Kept
from shardwise.train.saves.staging import Staging


def pieces() -> list[Kept]:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(50, 7, generator=generator),
        torch.randn((), dtype=torch.float64, generator=generator),
        torch.randn(6, 5, generator=generator).bfloat16().T,  # not contiguous
        torch.arange(9, dtype=torch.uint8),
    ]
    return [Kept(f"tensor {n}", tuple(t.shape), Box((0,) * t.ndim, tuple(t.shape)), t) for n, t in enumerate(tensors)]


def test_a_part_written_in_many_blocks_is_what_was_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "BLOCK", 13)
    monkeypatch.setattr(part, "FLUSH", 40)
    kept = pieces()
    part.write_part(tmp_path, 3, kept, Staging().copy(kept))
    data = (tmp_path / "rank-00003.bin").read_bytes()
    table = read_table(tmp_path / "rank-00003.json", {"rank-00003.bin": (len(data), None)})
    for piece, entry in zip(kept, table, strict=True):
        raw = torch.frombuffer(bytearray(data[entry.begin : entry.begin + entry.bytes]), dtype=piece.values.dtype)
        assert torch.equal(raw.view(piece.values.shape), piece.values)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank-00003.bin", "rank-00003.json"]


def test_a_part_is_not_written_over_another(tmp_path: Path) -> None:
    kept = pieces()
    staged = Staging().copy(kept)
    part.write_part(tmp_path, 0, kept, staged)
    with pytest.raises(FileExistsError):
        part.write_part(tmp_path, 0, kept, staged)


def test_the_same_memory_serves_every_save() -> None:
    staging, kept = Staging(), pieces()
    first = staging.copy(kept).data_ptr()
    kept[0].values.fill_(1.0)
    second = staging.copy(kept)
    assert second.data_ptr() == first
    assert torch.equal(second[: kept[0].values.nbytes].view(torch.float32), torch.ones(350))
