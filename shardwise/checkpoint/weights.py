"""The weights of a checkpoint folder as a network: checked against the shapes of its `run.toml`, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.format import RUN_FILE, Progress, some, unwatched
from shardwise.checkpoint.reader import Reader, open_checkpoint
from shardwise.model.transformer import Transformer
from shardwise.parallel.inference import Peers, build_share
from shardwise.run import ModelConfig, Problem, Run, UserError, read_run


def load_model(
    checkpoint: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    exact: Callable[[str], bool] | None = None,
) -> tuple[Transformer, Run]:
    """The network of a checkpoint or of a run's newest one, ready to evaluate, and the run that it came from.

    Parameters keep the dtype they are stored in unless one is given; those that `exact` names keep it in any case. Memory holds the
    network and one block more.
    """
    folder = checkpoint_folder(checkpoint)
    run = read_run(folder / RUN_FILE)
    reader = open_weights(folder, run.model)
    with torch.device("meta"):
        model = Transformer(run.model)
    parameters = {name for name, _ in model.named_parameters()}
    state = {}
    for name in reader.names:
        # Buffers steer rather than compute, and are kept as exact as they were stored.
        stored = dtype is None or name not in parameters or (exact is not None and exact(name))
        kept = dtype if dtype is not None and not stored else reader.dtype(name)
        state[name] = torch.empty(reader.shape(name), dtype=kept, device=device)
        reader.read_into(state[name], name, (0,) * state[name].ndim)
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # not part of a checkpoint
                setattr(module, name, torch.zeros_like(buffer, device=device))
    return model.eval(), run


def load_share(
    folder: Path, dtype: torch.dtype, device: torch.device, layers: Sequence[range], peers: Peers,
    exact: Callable[[str], bool] | None = None,
) -> Transformer:  # fmt: skip
    """What this rank holds of the network of a checkpoint that several ranks serve; nothing else is read. `layers` are those of
    each stage; parameters that `exact` names keep the dtype they are stored in."""
    config = read_run(folder / RUN_FILE).model
    reader = open_weights(folder, config)
    with torch.device("meta"):
        parameters = {name for name, _ in Transformer(config).named_parameters()}

    def read(name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        stored = name not in parameters or (exact is not None and exact(name))
        values = torch.empty(size, dtype=reader.dtype(name) if stored else dtype, device=device)
        reader.read_into(values, name, offset)
        return values

    return build_share(config, dtype, layers, peers, device, read)


def open_weights(folder: Path, config: ModelConfig, progress: Progress = unwatched) -> Reader:
    """The weights of a checkpoint, which fit a network."""
    reader = open_checkpoint(folder, progress=progress)
    problems = compare_shapes(reader, state_shapes(config), reader.names)
    if problems:
        raise UserError(*problems)
    return reader


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the network's state, without allocating it."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Transformer(config).state_dict().items()}


def compare_shapes(reader: Reader, expected: dict[str, tuple[int, ...]], names: Iterable[str]) -> list[Problem]:
    """What is wrong with a folder's tensors `names`: each should be in `expected`, and be of that shape."""
    where, names = str(reader.folder), list(names)
    problems = []
    if missing := [name for name in expected if name not in reader]:
        problems.append(Problem(f"tensors are missing: {some(missing)}", where=where))
    if unexpected := [name for name in names if name not in expected]:
        problems.append(Problem(f"holds tensors that this network does not have: {some(unexpected)}", where=where))
    wrong = [
        f"{name} is {list(reader.shape(name))} and should be {list(expected[name])}"
        for name in names
        if name in expected and reader.shape(name) != expected[name]
    ]
    if wrong:
        problems.append(Problem(f"shapes do not fit the network: {some(wrong)}", where=where))
    return problems
