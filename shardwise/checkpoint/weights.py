"""Loads the weights of a checkpoint folder into a network, checked against the shapes of its `run.toml`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.adapters import MergedReader, adapter_shapes, base_of
from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.format import RUN_FILE, Progress, unwatched
from shardwise.checkpoint.reader import Reader, compare_shapes, open_checkpoint
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import round_matrix
from shardwise.model.transformer import Transformer
from shardwise.parallel.inference import Peers, build_share
from shardwise.parallel.local_parameter import allocate_buffers
from shardwise.run import ModelConfig, Problem, Run, UserError, read_run
from shardwise.run.parameters import HEAD, find_parameter
from shardwise.run.weights import QUANTIZED, WeightFormat, form_of, is_reduced


def load_model(
    checkpoint: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    exact: Callable[[str], bool] | None = None,
    weights: str = "auto",
) -> tuple[Transformer, Run]:
    """The network of a checkpoint or of a run's newest one, ready to evaluate, and the run that it came from.

    Parameters keep the dtype they are stored in unless one is given; those that `exact` names keep it in any case. The matrices of
    layers are quantized to the format `weights` (`serve.weights`). Memory holds the network plus one block or, when quantizing,
    one matrix.
    """
    from shardwise.checkpoint.huggingface.packed.folder import packed_state, packing_of

    folder = checkpoint_folder(checkpoint)
    run = read_run(folder / RUN_FILE)
    with torch.device("meta"):
        model = Transformer(run.model)
    packing = packing_of(folder)
    if packing is not None:
        kinds = {scheme.form.kind for scheme in packing.schemes}
        if weights != "auto" and kinds != {weights}:
            reason = f"is {weights}, but the weights of {folder} are packed as {', '.join(sorted(kinds))} already; leave it at auto"
            raise UserError(Problem(reason, "serve.weights"))
        state = dict(packed_state(folder, packing, run.model, dtype, device))
        return _put(model, state, device), run
    reader = open_weights(folder, run.model)
    parameters = {name for name, _ in model.named_parameters()}
    form = QUANTIZED.get(weights)
    state = {}
    for name in reader.names:
        # Buffers only influence routing decisions, and keep the dtype they were stored in.
        stored = dtype is None or name not in parameters or (exact is not None and exact(name))
        kept = dtype if dtype is not None and not stored else reader.dtype(name)
        if form is not None and name in parameters and is_reduced(find_parameter(run.model, name)):
            state[name] = _rounded(reader, name, form_of(name, form), kept, device)
            continue
        state[name] = torch.empty(reader.shape(name), dtype=kept, device=device)
        reader.read_into(state[name], name, (0,) * state[name].ndim)
    return _put(model, state, device), run


def _put(model: Transformer, state: dict[str, torch.Tensor], device: torch.device | str) -> Transformer:
    """Assign tensors to a network on the meta device."""
    model.load_state_dict(state, assign=True)
    allocate_buffers(model, device)  # what is not part of a checkpoint
    return model.eval()


def _rounded(
    reader: Reader, name: str, form: WeightFormat, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A matrix, or a stack of them one after the other, quantized to a format as it is read."""
    shape, stacked = reader.shape(name), len(reader.shape(name)) > 2
    matrices = (reader.row(name, n) for n in range(shape[0])) if stacked else map(reader.get, [name])
    packed = [made for matrix in matrices if (made := round_matrix(matrix.to(device), form, dtype)) is not None]
    if not packed:  # the format cannot hold rows of this length
        return reader.get(name).to(device, dtype)
    return nn.Parameter(QuantizedMatrix.joined(packed, stack=True) if stacked else packed[0], requires_grad=False)


def load_share(
    folder: Path, dtype: torch.dtype, device: torch.device, layers: Sequence[range], peers: Peers,
    exact: Callable[[str], bool] | None = None,
) -> Transformer:  # fmt: skip
    """Load this rank's shards of a network that several ranks serve; nothing else is read. `layers` are the layers of each stage;
    parameters that `exact` names keep the dtype they are stored in."""
    from shardwise.checkpoint.huggingface.packed.folder import packing_of

    if packing_of(folder) is not None:
        reason = "holds packed weights, which one device serves; several round whole weights themselves (serve.weights)"
        raise UserError(Problem(reason, where=str(folder)))
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
    """Open the weights of a checkpoint, checked to fit a network; adapters are merged into their base."""
    # Imported here because that package imports this file.
    from shardwise.checkpoint.huggingface.packed.folder import packing_of

    if packing_of(folder) is not None:
        raise UserError(Problem("holds packed weights, which are served and not trained", where=str(folder)))
    reader = open_checkpoint(folder, progress=progress)
    # A folder of weights alone has no run.toml.
    run = read_run(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else None
    if run is not None and run.adapter.used:
        problems = compare_shapes(reader, adapter_shapes(run), reader.names)
        if problems:
            raise UserError(*problems)
        return MergedReader(open_weights(base_of(folder, run), config, progress), reader, run)
    expected, names = state_shapes(config), list(reader.names)
    if begins_anew(config, reader, HEAD):
        expected.pop(HEAD)
        names = [name for name in names if name != HEAD]
    problems = compare_shapes(reader, expected, names)
    if problems:
        if run is not None and run.model != config:
            problems.append(Problem(f"is of another network; copy [model] of {folder / RUN_FILE}", where=str(folder)))
        raise UserError(*problems)
    return reader


def begins_anew(config: ModelConfig, reader: Reader, name: str) -> bool:
    """Whether a parameter is initialized anew instead of read: the score head, if the folder holds a language model."""
    return name == HEAD and config.scores and (HEAD not in reader or reader.shape(HEAD)[0] != 1)


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the network's state, without allocating it."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Transformer(config).state_dict().items()}
