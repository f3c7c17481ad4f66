"""Quantizes a checkpoint: calibrates, packs, evaluates, and writes a Hugging Face folder that is also a checkpoint of ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.format import RUN_FILE
from shardwise.checkpoint.huggingface.config import config_from_model
from shardwise.checkpoint.huggingface.convert import check_free, new_folder, write_companions, write_entries
from shardwise.checkpoint.huggingface.packed.folder import packed_entries
from shardwise.checkpoint.weights import load_model, open_weights
from shardwise.checkpoint.writer import FILE_BYTES
from shardwise.model.device import choose_device
from shardwise.model.quantized.model import layer_matrices
from shardwise.quantize.layers import Settings, quantize_layers
from shardwise.quantize.texts import open_texts, perplexity, spread, tensors_of
from shardwise.run import UserError, read_run
from shardwise.run.weights import WeightFormat

TOGETHER = 4
"""Calibration sequences that pass through a layer at a time."""


@dataclass(frozen=True)
class Quantized:
    """The result of a quantization."""

    bytes_before: int
    bytes_after: int
    perplexity_before: float
    perplexity_after: float
    notes: tuple[str, ...] = ()

    @property
    def change(self) -> float:
        """The relative change of the perplexity."""
        return self.perplexity_after / self.perplexity_before - 1


def quantize_checkpoint(
    checkpoint: Path,
    out: Path,
    settings: Settings,
    given: Path | None = None,
    sequences: int = 128,
    evaluated: int = 64,
    device: str = "auto",
    overrides: list[str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Quantized:
    """Quantize a checkpoint into `out`, calibrated on `sequences` sequences and evaluated on `evaluated`."""
    check_free(out)
    folder = checkpoint_folder(checkpoint)
    run = read_run(folder / RUN_FILE, overrides or [])
    reader = open_weights(folder, run.model)
    before = sum(torch.Size(reader.shape(n)).numel() * reader.dtype(n).itemsize for n in reader.names)
    dtypes = {name: reader.dtype(name) for name in reader.names}
    notes: tuple[str, ...] = ()
    try:
        _, values = config_from_model(run.model, str(folder / RUN_FILE))
    except UserError:
        values = {"architectures": [], "model_type": "shardwise"}
        notes = ("no Hugging Face architecture computes what this network does, so only shardwise reads the folder",)
    texts = open_texts(folder, run, given)
    where = choose_device(device)
    model, _ = load_model(folder, getattr(torch, run.train.dtype), where)
    model.dtype = getattr(torch, run.train.dtype)
    settings = replace(settings, form=of_one_group(settings.form, {m.shape[-1] for _, m in layer_matrices(model)}))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    tell("perplexity before")
    first = perplexity(model, texts, evaluated, where)
    numbers = spread(texts.calibrations, sequences)
    batches = (
        tensors_of(texts.calibration(numbers[n : n + TOGETHER]), where) for n in range(0, len(numbers), TOGETHER)
    )
    quantize_layers(model, batches, settings, lambda done, total: tell(f"layer {done} of {total}"))
    tell("perplexity after")
    second = perplexity(model, texts, evaluated, where)
    entries, packing = packed_entries(model, dtypes, settings.form)
    values |= {"torch_dtype": run.train.dtype, "quantization_config": packing}
    with new_folder(out) as made:
        write_companions(folder, made, run.model, values)
        shutil.copyfile(folder / RUN_FILE, made / RUN_FILE)
        after = write_entries(made, entries, None, FILE_BYTES)
    return Quantized(before, after, first, second, notes)


def of_one_group(form: WeightFormat, widths: set[int]) -> WeightFormat:
    """The format with the largest groups that divide the rows of all matrices: a folder names one size."""
    while form.kind == "int4" and len(groups := {form.group_of(width) for width in widths} - {0}) > 1:
        form = replace(form, group=min(groups))
    return form
