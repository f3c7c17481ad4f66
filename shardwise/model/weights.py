"""A checkpoint folder: `run.toml`, whose [model] describes the network, and the weights under the network's
names: whole tensors as a conversion leaves them, or the pieces that the ranks of a training run saved.

A run folder holds such folders as `checkpoints/step-00000100`; here one is found, checked against the network
it says it is, and loaded. How the weights lie in files is the business of `weight_files` and `weight_writer`, and of
`saved_files` and `saved_reader`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from shardwise.model.saved_files import MANIFEST
from shardwise.model.saved_reader import SavedReader
from shardwise.model.transformer import Transformer
from shardwise.model.weight_files import WeightReader, some
from shardwise.model.weight_writer import Entry, write_weights
from shardwise.run import ModelConfig, Problem, Run, UserError, read_run

__all__ = [
    "Entry",
    "WeightReader",
    "checkpoint_folder",
    "compare_shapes",
    "is_checkpoint",
    "load_model",
    "open_checkpoint",
    "state_shapes",
    "write_weights",
]

RUN_FILE = "run.toml"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds weights and the run that they belong to."""
    weights = ("model.safetensors", "model.safetensors.index.json", MANIFEST)
    return (folder / RUN_FILE).is_file() and any((folder / file).is_file() for file in weights)


def checkpoint_folder(path: str | Path) -> Path:
    """The path itself when it is a checkpoint, or the newest complete checkpoint of a run folder."""
    path = Path(path)
    if is_checkpoint(path):
        return path
    steps = {
        int(folder.name.removeprefix("step-")): folder
        for folder in path.glob("checkpoints/step-*")
        if folder.name.removeprefix("step-").isdecimal() and is_checkpoint(folder)
    }
    if steps:
        return steps[max(steps)]
    if not path.exists():
        reason = "there is no such folder"
    elif not path.is_dir():
        reason = "is a file; a checkpoint is a folder with run.toml and manifest.json or model.safetensors"
    elif (path / "config.json").is_file():
        reason = "is a Hugging Face folder; `shardwise convert from-hf` makes a checkpoint of it"
    elif (path / "checkpoints").is_dir():
        reason = "is a run folder without a complete checkpoint yet"
    else:
        reason = "is neither a checkpoint (run.toml, manifest.json or model.safetensors) nor a run folder with checkpoints/step-*"
    raise UserError(Problem(reason, where=str(path)))


def load_model(
    checkpoint: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[Transformer, Run]:
    """The network of a checkpoint or of a run's newest one, ready to evaluate, and the run that it came from.

    Parameters keep the dtype they are stored in unless one is given. Memory holds the network and one more
    tensor.
    """
    folder = checkpoint_folder(checkpoint)
    run = read_run(folder / RUN_FILE)
    reader = open_checkpoint(folder)
    problems = compare_shapes(reader, state_shapes(run.model), reader.names)
    if problems:
        raise UserError(*problems)
    with torch.device("meta"):
        model = Transformer(run.model)
    parameters = {name for name, _ in model.named_parameters()}
    state = {}
    for name in reader.names:
        # Buffers steer rather than compute, and are kept as exact as they were stored.
        state[name] = reader.get(name).to(device, dtype if name in parameters else None)
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # not part of a checkpoint
                setattr(module, name, torch.zeros_like(buffer, device=device))
    return model.eval(), run


def open_checkpoint(folder: Path) -> WeightReader | SavedReader:
    """The weights of a checkpoint, to be read a tensor at a time."""
    return SavedReader(folder) if (folder / MANIFEST).exists() else WeightReader(folder)


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the network's state, without allocating it."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Transformer(config).state_dict().items()}


def compare_shapes(
    reader: WeightReader | SavedReader, expected: dict[str, tuple[int, ...]], names: Iterable[str]
) -> list[Problem]:
    """What is wrong with a folder's tensors `names`: each should be in `expected`, and be of that shape."""
    where, names = str(reader.folder), list(names)
    problems = []
    missing = [name for name in expected if name not in reader]
    if missing:
        problems.append(Problem(f"tensors are missing: {some(missing)}", where=where))
    unexpected = [name for name in names if name not in expected]
    if unexpected:
        problems.append(Problem(f"holds tensors that this network does not have: {some(unexpected)}", where=where))
    wrong = [
        f"{name} is {list(reader.shape(name))} and should be {list(expected[name])}"
        for name in names
        if name in expected and reader.shape(name) != expected[name]
    ]
    if wrong:
        problems.append(Problem(f"shapes do not fit the network: {some(wrong)}", where=where))
    return problems
