"""A Hugging Face folder into a checkpoint, and a checkpoint into a Hugging Face folder, a tensor at a time.

Everything is checked before a byte is written; the result is written under another name and takes its own
only when it is whole, so that a folder that exists is a folder that is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shardwise.model.huggingface.config import config_from_model, model_from_config
from shardwise.model.huggingface.families import family_named
from shardwise.model.huggingface.quantized import open_weights
from shardwise.model.huggingface.tensors import Link, left_out, links
from shardwise.model.saved_reader import SavedReader
from shardwise.model.weight_files import read_json
from shardwise.model.weight_writer import SHARD_BYTES, sync_folder, write_text
from shardwise.model.weights import (
    RUN_FILE,
    Entry,
    WeightReader,
    checkpoint_folder,
    compare_shapes,
    open_checkpoint,
    state_shapes,
    write_weights,
)
from shardwise.run import ModelConfig, Problem, UserError, read_run, run_from_dict, to_dict
from shardwise.run.write import sections_to_toml

Shapes = dict[str, tuple[int, ...]]
Progress = Callable[[int, int], None]  # bytes written, and in all

GENERATION = "generation_config.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "shardwise_tokenizer.json",  # a tokenizer of ours; transformers passes it over
    GENERATION,
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Conversion:
    """What was converted: the architecture, the parameters (tied ones once), the bytes of the tensors that
    were written, and what was left out."""

    architecture: str
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def from_hf(
    hf_dir: str | Path, out_dir: str | Path, progress: Progress | None = None, shard_bytes: int = SHARD_BYTES
) -> Conversion:
    """Make a checkpoint of a Hugging Face folder."""
    source, out = Path(hf_dir), Path(out_dir)
    if not source.is_dir():
        raise UserError(Problem("there is no such folder", where=str(source)))
    if not (source / "config.json").is_file():
        raise UserError(Problem("holds no config.json, so it is not a Hugging Face folder", where=str(source)))
    _check_free(out)
    where = str(source / "config.json")
    values = read_json(source / "config.json")
    config, notes = model_from_config(values, where)
    reader = open_weights(source, values, where)
    shapes = state_shapes(config)
    tied = list(links(config, shapes, interleaved=values.get("rope_interleave") is not False))
    if config.position == "learned" and not any(name.startswith("transformer.") for name in reader.names):
        tied = [replace(link, theirs=tuple(t.removeprefix("transformer.") for t in link.theirs)) for link in tied]
    notes += _check_theirs(reader, config, tied, shapes)

    entries = []
    for link in tied:
        for name in link.ours:
            dtype = _widest(reader.dtype(theirs) for theirs in link.theirs)
            entries.append(Entry(name, dtype, shapes[name], partial(link.to_ours, name, reader)))
    model = {"name": out.resolve().name or "run", "model": asdict(config)}
    train = {"dtype": _dtype_name(entries), "seq_len": min(512, config.max_positions)}
    run = run_from_dict({**model, "train": train}, where)
    with _new_folder(out) as folder:
        _copy_companions(source, folder)
        ids = {key: values[key] for key in TOKEN_IDS if values.get(key) is not None}
        if ids and not (folder / GENERATION).exists():
            write_text(folder / GENERATION, json.dumps(ids, indent=2) + "\n")
        # Batch, layout and the like are for who trains it, and follow from each other where they are not given.
        write_text(
            folder / RUN_FILE, sections_to_toml({"name": run.name, "model": to_dict(run)["model"], "train": train})
        )
        total = _write(folder, entries, progress, shard_bytes)
    return Conversion(family_named(values, where).architecture, _parameters(shapes), total, tuple(notes))


def to_hf(
    checkpoint: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    end: int | None = None,
) -> Conversion:
    """Make a Hugging Face folder of a checkpoint, or of the newest one of a run; tensors keep their dtype
    unless one is given. `end` is the token that ends a document, where the checkpoint names none."""
    source, out = checkpoint_folder(checkpoint), Path(out_dir)
    _check_free(out)
    config = read_run(source / RUN_FILE).model
    architecture, values = config_from_model(config, str(source / RUN_FILE))
    reader, shapes = open_checkpoint(source), state_shapes(config)
    problems = compare_shapes(reader, shapes, reader.names) + _not_floating(reader)
    if problems:
        raise UserError(*problems)

    entries = []
    for link in links(config, shapes):
        shape = link.their_shape(shapes[link.ours[0]])
        stored = _widest(reader.dtype(ours) for ours in link.ours)
        # The routers' selection bias moves in tiny steps; transformers too keeps it in float32 beside 16
        # bits.
        target = stored if dtype is None or link.ours[0].endswith("router.bias") else dtype
        entries += [Entry(name, target, shape, partial(link.to_theirs, name, reader)) for name in link.theirs]
    values["torch_dtype"] = _dtype_name(entries)
    with _new_folder(out) as folder:
        _copy_companions(source, folder)
        generation = read_json(source / GENERATION) if (source / GENERATION).is_file() else {}
        values |= {key: generation.get(key) for key in TOKEN_IDS}
        if values["eos_token_id"] is None:
            values["eos_token_id"] = end
        write_text(folder / "config.json", json.dumps(values, indent=2) + "\n")
        total = _write(folder, entries, progress, shard_bytes)
    return Conversion(architecture, _parameters(shapes), total, ())


def _check_theirs(reader: WeightReader, config: ModelConfig, tied: list[Link], shapes: Shapes) -> list[str]:
    """Notes on the tensors to be left out; raises when others are missing, unknown or of another shape."""
    expected = {theirs: link.their_shape(shapes[link.ours[0]]) for link in tied for theirs in link.theirs}
    reasons: Counter[str] = Counter()
    names = []
    problems = _not_floating(reader, expected)
    for name in reader.names:
        reason = "" if name in expected else left_out(config, name)
        if name == "lm_head.weight" and config.tied_embeddings:
            reason = "copy of the embedding (lm_head.weight), to which the output is tied"
            embedding = next(link.theirs[0] for link in tied if link.ours == ("embed.weight",))
            if embedding in reader and not _equal(reader, name, embedding):
                message = f"differs from {embedding}, though config.json says tie_word_embeddings"
                problems.append(Problem(message, name, str(reader.folder)))
        if reason:
            reasons[reason] += 1
        else:
            names.append(name)
    problems += compare_shapes(reader, expected, names)
    if problems:
        raise UserError(*problems)
    return [f"{reason} ({count})" for reason, count in reasons.items()]


def _equal(reader: WeightReader, one: str, other: str) -> bool:
    return reader.shape(one) == reader.shape(other) and torch.equal(reader.get(one), reader.get(other))


def _not_floating(reader: WeightReader | SavedReader, names: Iterable[str] | None = None) -> list[Problem]:
    """Complaints about tensors that cannot be trained, such as those of a quantized model."""
    kinds = {reader.dtype(name) for name in (reader.names if names is None else names) if name in reader}
    odd = sorted(str(kind).removeprefix("torch.") for kind in kinds if not kind.is_floating_point or kind.itemsize < 2)
    message = f"holds weights in {', '.join(odd)}; they must be float64, float32, bfloat16 or float16"
    return [Problem(message, where=str(reader.folder))] if odd else []


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    found = list(set(dtypes))
    widest = found[0]
    for dtype in found[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def _dtype_name(entries: Iterable[Entry]) -> str:
    """The dtype of most numbers."""
    counts: Counter[torch.dtype] = Counter()
    for entry in entries:
        counts[entry.dtype] += math.prod(entry.shape)
    return str(counts.most_common(1)[0][0]).removeprefix("torch.")


def _parameters(shapes: Shapes) -> int:
    # The routers' selection bias is moved by counting, not learned, and no parameter.
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith("router.bias"))


def _write(folder: Path, entries: list[Entry], progress: Progress | None, shard_bytes: int) -> int:
    total = sum(entry.bytes for entry in entries)
    done = 0

    def count(written: int) -> None:
        nonlocal done
        done += written
        if progress is not None:
            progress(done, total)

    return write_weights(folder, entries, shard_bytes, progress=count)


def _copy_companions(source: Path, folder: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(Problem("is a file; name a folder that does not exist yet", where=str(out)))
    if out.is_dir() and any(out.iterdir()):
        raise UserError(Problem("is not empty; name a folder that does not exist yet", where=str(out)))


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out` when all went well, and vanishes when not."""
    out = out.resolve()
    folder = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        folder.mkdir(parents=True)
        yield folder
        sync_folder(folder)
        folder.rename(out)
        sync_folder(out.parent)
    except OSError as e:
        raise UserError(Problem(f"cannot be written: {e.strerror or e}", where=str(out))) from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)
