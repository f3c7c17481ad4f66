"""A rank's file of a checkpoint: what is staged is what any safetensors reader finds, and memory is used again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shardwise.checkpoint import writer
from shardwise.checkpoint.format import LocalShard, checksum, read_header
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.state import Staging


def shards() -> list[LocalShard]:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn((), dtype=torch.float64, generator=generator),
        torch.randn(50, 7, generator=generator),
        torch.randn(6, 5, generator=generator).bfloat16().T,  # not contiguous
        torch.arange(9, dtype=torch.uint8),
    ]
    return [LocalShard(f"tensor {n}", (60, 7) if n == 1 else tuple(t.shape), (4, 0) if n == 1 else (0,) * t.ndim, t)
            for n, t in enumerate(tensors)]  # fmt: skip


def test_a_file_written_in_many_blocks_is_what_was_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BLOCK", 13)
    monkeypatch.setattr(writer, "FLUSH", 40)
    monkeypatch.setattr(writer, "AHEAD", 80)
    written, told = shards(), list[int]()
    writer.write_shards(tmp_path, 3, written, Staging().copy(written), told.append)
    (path,) = tmp_path.iterdir()
    assert max(told) == 13  # every block is told of, so that a slow disk is not taken for a hang
    assert sum(told) >= path.stat().st_size
    assert path.name == "rank-00003.safetensors"
    with safe_open(path, framework="pt") as f:  # as another program would
        assert set(f.keys()) == {shard.name for shard in written}
        assert all(torch.equal(f.get_tensor(shard.name), shard.values) for shard in written)
        boxes = json.loads(f.metadata()["shards"])
    assert boxes["tensor 1"]["shape"] == [60, 7]
    assert boxes["tensor 1"]["offset"] == [4, 0]
    data = path.read_bytes()
    for shard, found in zip(written, read_header(path, sharded=True), strict=True):
        assert (found.name, found.shape, found.offset) == (shard.name, shard.shape, shard.offset)
        assert found.begin % found.dtype.itemsize == 0
        assert found.crc == checksum(data[found.begin : found.begin + found.bytes])
    read: list[int] = []
    whole = Reader(tmp_path, {"tensor 3": [read_header(path, sharded=True)[-1]]}, read.append)
    assert torch.equal(whole.get("tensor 3"), written[3].values)
    assert sum(read) == written[3].values.nbytes


def test_a_file_is_not_written_over_another(tmp_path: Path) -> None:
    written = shards()
    staged = Staging().copy(written)
    writer.write_shards(tmp_path, 0, written, staged)
    with pytest.raises(FileExistsError):
        writer.write_shards(tmp_path, 0, written, staged)


def test_the_same_memory_serves_every_checkpoint() -> None:
    staging, written = Staging(), shards()
    first = staging.copy(written).data_ptr()
    written[1].values.fill_(1.0)
    second = staging.copy(written)
    assert second.data_ptr() == first
    assert torch.equal(second[8 : 8 + 1400].view(torch.float32), torch.ones(350))
