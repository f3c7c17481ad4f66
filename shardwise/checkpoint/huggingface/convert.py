"""Converts a Hugging Face folder to a checkpoint, and a checkpoint to a Hugging Face folder, one tensor at a time.

Everything is checked before a byte is written. The result is written under a temporary name and renamed when it is complete, so
that a folder that exists is complete.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.adapters import is_adapter
from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.format import RUN_FILE, read_json
from shardwise.checkpoint.huggingface.config import config_from_model, model_from_config
from shardwise.checkpoint.huggingface.families import family_named
from shardwise.checkpoint.huggingface.packed.decode import PackedReader
from shardwise.checkpoint.huggingface.packed.folder import check_names, copy_packed
from shardwise.checkpoint.huggingface.packed.scheme import read_packing
from shardwise.checkpoint.huggingface.quantized import open_published
from shardwise.checkpoint.huggingface.tensors import Link, Shifted, left_out, links, links_of_folder, sort_out
from shardwise.checkpoint.huggingface.tokenizer import made_tokenizer, token_ids, tokenizer_config
from shardwise.checkpoint.reader import Reader, compare_shapes, find_weights, open_checkpoint
from shardwise.checkpoint.weights import open_weights, state_shapes
from shardwise.checkpoint.writer import FILE_BYTES, Entry, write_weights
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.files import sync, write_atomically
from shardwise.run import ModelConfig, Problem, UserError, read_run, run_from_dict, to_dict
from shardwise.run.write import sections_to_toml

Shapes = dict[str, tuple[int, ...]]
Progress = Callable[[int, int], None]  # bytes written, and in all

GENERATION = "generation_config.json"
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", GENERATION,
    "shardwise_tokenizer.json",  # a tokenizer of ours; transformers ignores it
)  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion: the architecture, the number of parameters (tied ones once), the bytes of the tensors written,
    and notes on what was left out."""

    architecture: str
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def from_hf(
    hf_dir: str | Path, out_dir: str | Path, progress: Progress | None = None, file_bytes: int = FILE_BYTES
) -> Conversion:
    """Convert a Hugging Face folder to a checkpoint. Packed weights are copied unchanged, and a `run.toml` is added."""
    source, out = Path(hf_dir), Path(out_dir)
    if not source.is_dir():
        raise UserError(Problem("there is no such folder", where=str(source)))
    if not (source / "config.json").is_file():
        raise UserError(Problem("holds no config.json, so it is not a Hugging Face folder", where=str(source)))
    check_free(out)
    where = str(source / "config.json")
    values = read_json(source / "config.json")
    config, notes = model_from_config(values, where)
    packing, shapes, entries = read_packing(values, where), state_shapes(config), []
    reader = open_published(source, values, where) if packing is None else Reader(source, find_weights(source))
    found = links_of_folder(config, shapes, values, reader.names)
    if packing is None:
        notes += _check_theirs(reader, config, found, shapes)
        for link in found:
            dtype = torch.float32 if isinstance(link, Shifted) else _promoted(reader, link.theirs)
            entries += [Entry(name, dtype, shapes[name], partial(link.to_ours, name, reader)) for name in link.ours]
        kind = _dtype_name(entries)
    else:
        notes += packing.notes + check_names(reader, PackedReader(reader, packing), config, found)
        kind = str(values.get("torch_dtype") or values.get("dtype")).removeprefix("torch.")
        kind = kind if kind in ("float32", "float16") else "bfloat16"
    with new_folder(out) as folder:
        copy_companions(source, folder)
        _write_ids(folder, values)
        write_run(folder, out, config, kind, where)
        total = write_entries(folder, entries, progress, file_bytes) if packing is None else copy_packed(source, folder)
    return Conversion(family_named(values, where).architecture, _parameters(shapes), total, tuple(notes))


def write_run(folder: Path, out: Path, config: ModelConfig, dtype: str, where: str) -> None:
    """Write the `run.toml` of some weights. Batch, layout and the like are left to the run that trains them, and derived if not
    given."""
    train = {"dtype": dtype, "seq_len": min(512, config.max_positions)}
    learns = {"objective": {"kind": "reward"}} if config.scores else {}
    run = run_from_dict({"name": out.resolve().name or "run", "model": asdict(config), "train": train} | learns, where)
    sections = {"name": run.name, "model": to_dict(run)["model"], "train": train} | learns
    write_atomically(folder / RUN_FILE, sections_to_toml(sections).encode())


def _write_ids(folder: Path, values: dict[str, Any]) -> None:
    """Write the ids of the tokens that begin, end and pad a text, if only the config has them."""
    ids = {key: values[key] for key in TOKEN_IDS if values.get(key) is not None}
    if ids and not (folder / GENERATION).exists():
        write_json(folder / GENERATION, ids)


def to_hf(
    checkpoint: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    file_bytes: int = FILE_BYTES,
    merge: bool = False,
) -> Conversion:
    """Convert a checkpoint, or a run's newest one, to a Hugging Face folder; tensors keep their dtype unless one is given. With
    `merge`, adapters are merged into their base."""
    source, out = checkpoint_folder(checkpoint), Path(out_dir)
    check_free(out)
    config = read_run(source / RUN_FILE).model
    architecture, values = config_from_model(config, str(source / RUN_FILE))
    shapes = state_shapes(config)
    if is_adapter(source) != merge:
        reason = "holds adapters: --merge merges them into their base, `convert to-peft` writes them alone"
        raise UserError(Problem("holds no adapters that --merge could merge" if merge else reason, where=str(source)))
    reader = open_weights(source, config) if merge else open_checkpoint(source)
    problems = compare_shapes(reader, shapes, reader.names) + _not_floating(reader)
    if problems:
        raise UserError(*problems)

    entries = []
    for link in links(config, shapes):
        shape = link.their_shape(shapes[link.ours[0]])
        # The routers' selection bias moves in tiny steps; transformers too keeps it in float32 beside 16-bit weights.
        wanted = None if link.ours[0].endswith("router.bias") else dtype
        target = wanted or _promoted(reader, link.ours)
        entries += [Entry(name, target, shape, partial(link.to_theirs, name, reader)) for name in link.theirs]
    values["torch_dtype"] = _dtype_name(entries)
    with new_folder(out) as folder:
        write_companions(source, folder, config, values)
        total = write_entries(folder, entries, progress, file_bytes)
    return Conversion(architecture, _parameters(shapes), total, ())


def write_companions(source: Path, folder: Path, config: ModelConfig, values: dict[str, Any]) -> None:
    """Write all of a Hugging Face folder but its weights: the checkpoint's companion files, a tokenizer that transformers reads,
    the ids of special tokens, and the config."""
    copy_companions(source, folder)
    generation = read_json(source / GENERATION) if (source / GENERATION).is_file() else {}
    tokenizer: Tokenizer | None = None
    with contextlib.suppress(UserError):  # not every checkpoint has one
        tokenizer = load_tokenizer(source)
    ids = {key: generation.get(key) for key in TOKEN_IDS}
    if tokenizer is not None:
        ids = token_ids(tokenizer) | {key: value for key, value in ids.items() if value is not None}
        _write_missing(folder / "tokenizer.json", made_tokenizer(tokenizer))
        _write_missing(folder / "tokenizer_config.json", tokenizer_config(tokenizer, config.max_positions))
    ids = dict.fromkeys(TOKEN_IDS) | ids  # all three, since architectures have defaults of their own
    write_json(folder / GENERATION, generation | ids)
    write_json(folder / "config.json", values | ids)


def _write_missing(file: Path, content: dict[str, Any] | None) -> None:
    """Write a file that was not copied as a companion."""
    if content is not None and not file.exists():
        write_json(file, content)


def _check_theirs(reader: Reader, config: ModelConfig, found: list[Link], shapes: Shapes) -> list[str]:
    """Notes on the tensors that are left out; raises if others are missing, unknown or of another shape."""
    expected = {theirs: link.their_shape(shapes[link.ours[0]]) for link in found for theirs in link.theirs}
    names, notes = sort_out(reader.names, lambda name: "" if name in expected else left_out(config, name))
    problems = _not_floating(reader, expected)
    if (head := "lm_head.weight") in reader and config.tied_embeddings:
        embedding = next(link.theirs[0] for link in found if link.ours == ("embed.weight",))
        if embedding in reader and not torch.equal(reader.get(head), reader.get(embedding)):
            message = f"differs from {embedding}, though config.json says tie_word_embeddings"
            problems.append(Problem(message, head, str(reader.folder)))
    problems += compare_shapes(reader, expected, names)
    if problems:
        raise UserError(*problems)
    return notes


def _not_floating(reader: Reader, names: Iterable[str] | None = None) -> list[Problem]:
    """Problems with tensors that cannot be trained, such as those of a quantized model."""
    kinds = {reader.dtype(name) for name in (reader.names if names is None else names) if name in reader}
    odd = sorted(str(kind).removeprefix("torch.") for kind in kinds if not kind.is_floating_point or kind.itemsize < 2)
    message = f"holds weights in {', '.join(odd)}; they must be float64, float32, bfloat16 or float16"
    return [Problem(message, where=str(reader.folder))] if odd else []


def _promoted(reader: Reader, names: Iterable[str]) -> torch.dtype:
    """The dtype that holds the values of all these tensors."""
    return reduce(torch.promote_types, {reader.dtype(name) for name in names})


def _dtype_name(entries: Iterable[Entry]) -> str:
    """The dtype of most elements."""
    counts: Counter[torch.dtype] = Counter()
    for entry in entries:
        counts[entry.dtype] += math.prod(entry.shape)
    return str(counts.most_common(1)[0][0]).removeprefix("torch.")


def _parameters(shapes: Shapes) -> int:
    # The routers' selection bias is not a parameter: it is updated by counting tokens, not by gradients.
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith("router.bias"))


def write_entries(folder: Path, entries: list[Entry], progress: Progress | None, file_bytes: int) -> int:
    """Write weights; returns their bytes."""
    total = sum(entry.bytes for entry in entries)
    done = 0

    def count(written: int) -> None:
        nonlocal done
        done += written
        if progress is not None:
            progress(done, total)

    return write_weights(folder, entries, file_bytes, count)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_atomically(file, (json.dumps(content, indent=2) + "\n").encode())


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the tokenizer, the chat template and the recommended sampling settings of a folder."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def check_free(out: Path) -> None:
    reason = "is a file" if out.exists() and not out.is_dir() else "is not empty"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(Problem(f"{reason}; name a folder that does not exist yet", where=str(out)))


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `out` on success and removed on failure."""
    out = out.resolve()
    folder = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")  # in containers process ids are the same
    try:
        folder.mkdir(parents=True)
        yield folder
        for path in (*folder.rglob("*"), folder):  # weights and tokenizers are copied without a flush
            sync(path)
        folder.rename(out)
        sync(out.parent)
    except OSError as e:
        raise UserError(Problem(f"cannot be written: {e.strerror or e}", where=str(out))) from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)
