"""Folders of safetensors: what is written loads with the library and comes back the same; what is broken or
foreign is refused in a sentence; and a checkpoint is found and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.checkpoint import reader as reader_module
from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.weights import load_model
from shardwise.checkpoint.writer import Entry, write_weights
from shardwise.measure.counts.memory import Storages, unique_bytes
from shardwise.model import Transformer, initialize
from shardwise.run import Run, UserError, run_from_dict, to_toml

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def entry(name: str, tensor: Tensor, chunks: int = 1) -> Entry:
    def cut() -> Iterator[Tensor]:
        yield from tensor.chunk(chunks) if tensor.ndim else [tensor]

    return Entry(name, tensor.dtype, tuple(tensor.shape), cut)


shapes = st.lists(st.integers(0, 5), max_size=3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=8), st.integers(1, 400), st.integers(1, 4))
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[torch.dtype, list[int]]],
    file_bytes: int,
    chunks: int,
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{n}.weight": torch.randint(0, 100, shape, generator=generator).to(dtype)
        for n, (dtype, shape) in enumerate(kinds)
    }
    written: list[int] = []
    entries = [entry(name, t, chunks) for name, t in tensors.items()]
    total = write_weights(folder, entries, file_bytes, progress=written.append)
    assert total == sum(written) == sum(t.numel() * t.dtype.itemsize for t in tensors.values())

    by_library: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        by_library |= load_file(file)
    reader = open_checkpoint(folder)
    assert sorted(reader.names) == sorted(tensors) == sorted(by_library)
    for name, tensor in tensors.items():
        assert (reader.shape(name), reader.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        for found in (reader.get(name), by_library[name]):
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
        for index in range(tensor.shape[0] if tensor.ndim else 0):
            assert torch.equal(reader.row(name, index), tensor[index])


def test_every_tensor_is_aligned_and_every_shard_within_its_size(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.zeros(3, dtype=torch.uint8),
        "half": torch.zeros(5).half(),
        "float": torch.zeros(7),
    }
    write_weights(tmp_path, [entry(name, t) for name, t in tensors.items()])
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0

    (tmp_path / "model.safetensors").unlink()
    write_weights(tmp_path, [entry(str(n), torch.ones(10)) for n in range(7)], file_bytes=100)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert len(open_checkpoint(tmp_path).names) == 7


def test_chunks_that_do_not_fill_the_tensor(tmp_path: Path) -> None:
    short = Entry("a", torch.float32, (4,), lambda: iter([torch.ones(3)]))
    with pytest.raises(RuntimeError, match="12 bytes were given for a tensor of 16"):
        write_weights(tmp_path, [short])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_loaded(name: str, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(UserError, match="never loaded") as caught:
        open_checkpoint(tmp_path)
    assert name in str(caught.value)
    assert "safe_serialization" in str(caught.value)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin"])
def test_an_index_cannot_leave_its_folder(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match="same folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 7, 40, 300, -1])
def test_truncated_files(keep: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="not a complete safetensors file") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.problems[0].where == str(file)


def test_broken_shards_are_reported_all_at_once(tmp_path: Path) -> None:
    write_weights(tmp_path, [entry(str(n), torch.ones(10)) for n in range(3)], file_bytes=40)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError) as caught:
        open_checkpoint(tmp_path)
    assert [Path(problem.where).name[:11] for problem in caught.value.problems] == [
        "model-00001",
        "model-00003",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "JSON object"),
        ("{}", "name the file of each tensor"),
        ('{"weight_map": {"b": "x.safetensors"}}', "not in their files: b"),
    ],
)
def test_broken_indexes(text: str, sentence: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        open_checkpoint(tmp_path)


def checkpoint(folder: Path, step: int = 0) -> Run:
    run = run_from_dict({"model": {"layers": 1, "hidden": 16, "heads": 2, "experts": 2, "experts_per_token": 1}})
    model = Transformer(run.model)
    initialize(model, run.model, seed=step)
    folder.mkdir(parents=True)
    write_weights(folder, [entry(name, t) for name, t in model.state_dict().items()])
    (folder / "run.toml").write_text(to_toml(run))
    return run


def test_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    for step in (5, 9, 100):
        checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}", step)
    (tmp_path / "checkpoints" / "step-00000200").mkdir()
    (tmp_path / "checkpoints" / "step-00000300.partial").mkdir()
    newest = tmp_path / "checkpoints" / "step-00000100"
    assert checkpoint_folder(tmp_path) == checkpoint_folder(newest) == newest
    model, run = load_model(tmp_path)
    assert run.model == model.config
    assert torch.equal(model.state_dict()["embed.weight"], open_checkpoint(newest).get("embed.weight"))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_loading_takes_the_network_and_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    run = checkpoint(tmp_path / "c")
    block = 1024  # less than any matrix of it
    monkeypatch.setattr(reader_module, "BLOCK", block)
    with Storages() as storages:
        model, _ = load_model(tmp_path / "c", dtype)
    want = Transformer(run.model)
    initialize(want, run.model, seed=0)
    parameters = dict(want.named_parameters())
    assert all(torch.equal(p, parameters[name].to(p.dtype)) for name, p in model.named_parameters())
    matrix = run.model.expert_ffn * run.model.hidden * 4
    assert storages.peak <= unique_bytes((*model.parameters(), *model.buffers())) + max(block, matrix)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name, sentence in (
        ("begun", "without a complete checkpoint"),
        ("file", "is a file"),
        ("none", "no such"),
    ):
        with pytest.raises(UserError, match=sentence):
            checkpoint_folder(tmp_path / name)
    with pytest.raises(UserError, match="neither a checkpoint"):
        checkpoint_folder(tmp_path)


def test_weights_that_do_not_fit_the_run(tmp_path: Path) -> None:
    checkpoint(tmp_path / "c")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    tensors["extra"] = torch.ones(1)
    tensors["norm.weight"] = torch.ones(17)
    del tensors["head.weight"]
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load_model(tmp_path / "c")
    text = str(caught.value)
    assert "missing: head.weight" in text
    assert "does not have: extra" in text
    assert "norm.weight is [17] and should be [16]" in text
