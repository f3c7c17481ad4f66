"""Adapters in the format of `peft`: `adapter_config.json` and `adapter_model.safetensors`, read and written without the library.

Tensors are named by the modules of the Hugging Face model. Where a family stores the rows of a matrix in another order, B has that
order too. Stacked experts are handled in `peft_experts.py`. Adapters that peft does not support are refused with a message: DoRA
on experts, and separate adapters of GPT-2's fused queries, keys and values.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from math import isclose, sqrt
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from shardwise.checkpoint.adapters import adapter_shapes, base_of, fingerprint, is_adapter
from shardwise.checkpoint.folder import checkpoint_folder, is_checkpoint
from shardwise.checkpoint.format import RUN_FILE, read_header, read_json
from shardwise.checkpoint.huggingface.convert import (
    Conversion,
    check_free,
    copy_companions,
    from_hf,
    new_folder,
    write_json,
)
from shardwise.checkpoint.huggingface.peft_experts import (
    STACKS,
    Stack,
    config_of,
    padded,
    pattern_of,
    scale_of,
    stacks_of,
)
from shardwise.checkpoint.huggingface.tensors import (
    Fused,
    FusedHeads,
    Interleaved,
    Link,
    Stacked,
    fuses_heads,
    like_gpt2,
    links,
)
from shardwise.checkpoint.reader import Reader, compare_shapes, open_checkpoint
from shardwise.checkpoint.writer import Entry, write_weights
from shardwise.data.chat.files import FILE as TEMPLATE
from shardwise.data.chat.files import choose_template
from shardwise.files import write_atomically
from shardwise.run import AdapterConfig, ModelConfig, Problem, Run, UserError, read_run, run_from_dict, to_dict
from shardwise.run.parameters import HEAD, factors_of, layer_parameters, magnitude_of
from shardwise.run.sections.adapter import MATRICES
from shardwise.run.write import sections_to_toml

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, SCORE = "base_model.model.", "score"
MERGE = "`convert to-hf --merge` merges them"
OTHER: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "trainable_token_indices": (None,),
    "exclude_modules": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
}
"""The accepted values of config keys that are not supported here."""
BESIDE_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initial values of adapters (`init_lora_weights`) that leave the base as it is. Others, such as PiSSA's, take from the base what
they put into the adapters, and peft does so again when it loads them."""


def to_peft(checkpoint: str | Path, out_dir: str | Path) -> Conversion:
    """Write the adapters of a checkpoint, or of a run's newest one, in peft's format."""
    source, out = checkpoint_folder(checkpoint), Path(out_dir)
    check_free(out)
    if not is_adapter(source):
        raise UserError(Problem("holds a whole network and no adapters; `convert to-hf` writes it", where=str(source)))
    run = read_run(source / RUN_FILE)
    reader, shapes = open_checkpoint(source), adapter_shapes(run)
    if problems := compare_shapes(reader, shapes, reader.names):
        raise UserError(*problems)
    entries, modules, beside = [], set[str](), set[str]()
    stacks = stacks_of(run.model, run.adapter)
    if stacks and run.adapter.kind == "dora":
        raise UserError(Problem(f"peft has no DoRA for stacked experts; {MERGE}", "adapter.kind", str(source)))
    for stack in stacks:
        matrix = next(iter(stack.matrices.values()))
        made = stack.shapes(stack.written_rank(run.adapter.rank))
        for (name, shape), write in zip(made.items(), (stack.write_a, stack.write_b), strict=True):
            dtype = reader.dtype(factors_of(matrix)[0])
            entries.append(Entry(f"{PREFIX}{name}", dtype, shape, partial(write, reader)))
    found = list(_links(run, str(source)))
    for link in found:
        module = link.theirs[0].removesuffix(".weight")
        if stacks and ".mlp." in module:  # without the number of the layer
            beside.add(module.split(".", 3)[3])
        else:
            modules.add(module.rpartition(".")[2])
    for link in _tensors(run, found):
        (ours,), (theirs,) = link.ours, link.theirs
        chunks = partial(link.to_theirs, theirs, reader)
        entries.append(Entry(f"{PREFIX}{theirs}", reader.dtype(ours), shapes[ours], chunks))
    with new_folder(out) as folder:
        total = write_weights(folder, entries, file_bytes=1 << 62)
        (folder / "model.safetensors").rename(folder / WEIGHTS)
        config = _config(run, sorted(modules), str(base_of(source, run)))
        write_json(folder / CONFIG, config | config_of(stacks, beside, run.adapter))
        _pass_template_on(source, folder)
    notes = ("adapter.dropout, which peft has not where experts are adapted",) if stacks and run.adapter.dropout else ()
    return Conversion(_called(run), sum(entry.bytes // entry.dtype.itemsize for entry in entries), total, notes)


def from_peft(adapter_dir: str | Path, out_dir: str | Path, base: str | Path = "") -> Conversion:
    """Make a checkpoint of adapters that peft wrote. Their base is a checkpoint, given or named by the adapters; if it is a
    Hugging Face folder, it is imported beside them."""
    source, out = Path(adapter_dir), Path(out_dir)
    check_free(out)
    config = _read_config(source)
    named = str(base or config.get("base_model_name_or_path") or "")
    imports = bool(named) and (Path(named) / "config.json").is_file() and not is_checkpoint(Path(named))
    if not imports and not (named and Path(named).exists()):
        reason = f"names {named or 'nothing'} as its base, which is no folder here; give --base, what `convert from-hf` made of it"
        raise UserError(Problem(reason, "base_model_name_or_path", str(source / CONFIG)))
    with new_folder(out) as folder:
        if imports:
            from_hf(named, folder / "base")
        weights = (folder / "base") if imports else checkpoint_folder(named).resolve()
        scores = config.get("task_type") == "SEQ_CLS"
        learns = {"objective": {"kind": "reward"}} if scores else {}
        model = read_run(weights / RUN_FILE).model
        if scores and not model.scores:  # a separate head, not the base's language-model head
            model = replace(model, scores=True, tied_embeddings=False)
        reader = Reader(source, {_ours_of(t.name): [t] for t in read_header(source / WEIGHTS)})
        adapter = _adapter(config, model, reader)
        final = out.resolve() / "base" if imports else weights
        train = {"weights": str(final), "seq_len": min(512, model.max_positions)}
        run = run_from_dict({"model": asdict(model), "adapter": asdict(adapter), "train": train} | learns)
        entries, shapes = [], adapter_shapes(run)
        for link in _tensors(run, _links(run, str(source))):
            (ours,), (theirs,) = link.ours, link.theirs
            chunks = partial(_ours, link, reader, run.adapter.rank)
            entries.append(Entry(ours, reader.dtype(theirs), shapes[ours], chunks))
        for stack in stacks_of(run.model, run.adapter):
            for part, matrix in stack.matrices.items():
                for factor, ours in enumerate(factors_of(matrix)):
                    chunks = partial(stack.part, reader, part, factor, run.adapter.rank)
                    entries.append(Entry(ours, reader.dtype(stack.names()[factor]), shapes[ours], chunks))
        sections = {"name": out.resolve().name, "model": to_dict(run)["model"], "adapter": to_dict(run)["adapter"]}
        sections |= learns
        write_atomically(folder / RUN_FILE, sections_to_toml(sections | {"train": train}).encode())
        total = write_weights(folder, entries)
        copy_companions(weights, folder)
        _pass_template_on(source, folder)
    return Conversion(_called(run), sum(entry.bytes // entry.dtype.itemsize for entry in entries), total, ())


def _pass_template_on(source: Path, folder: Path) -> None:
    """Copy the adapters' own chat template, if they have one: prompts must be rendered as in training."""
    if found := choose_template(source):
        (folder / TEMPLATE).write_bytes(found[0].encode())


def _called(run: Run) -> str:
    return "DoRA adapters" if run.adapter.kind == "dora" else "LoRA adapters"


def _links(run: Run, where: str) -> Iterator[Link]:
    """The link of each adapted matrix to its tensor in the family's files."""
    model = run.model
    for layer in range(model.layers):
        table = layer_parameters(model, model.is_moe(layer), run.adapter)
        names = [f"layers.{layer}.{entry.name}" for entry in table if entry.adapted]
        # `links` yields the link of fused q, k and v for the name of q only.
        asked = [f"layers.{layer}.attention.q.weight", *names] if fuses_heads(model) else names
        for link in links(model, dict.fromkeys(asked)):
            if isinstance(link, Stacked):
                continue
            if isinstance(link, Fused | FusedHeads) and len(link.ours) > 1:
                if set(link.ours) & set(names):
                    raise UserError(
                        Problem(
                            f"this family keeps q, k and v in one matrix, which peft adapts whole; {MERGE}", where=where
                        )
                    )
                continue
            if link.ours[0] in names:
                yield link


def _tensors(run: Run, found: Iterable[Link]) -> Iterator[Link]:
    """The link of each tensor of the adapters of these matrices; and of a score head, which is learned in full beside them."""
    for link in found:
        module = link.theirs[0].removesuffix(".weight")
        names = dict(zip(factors_of(link.ours[0]), (f"{module}.lora_A.weight", f"{module}.lora_B.weight"), strict=True))
        if run.adapter.kind == "dora":
            names[magnitude_of(link.ours[0])] = f"{module}.lora_magnitude_vector"
        for ours, theirs in names.items():
            reorder = isinstance(link, Interleaved) and not ours.endswith(".A.weight")
            yield replace(link, ours=(ours,), theirs=(theirs,)) if reorder else Link((ours,), (theirs,))
    if run.model.scores:
        yield Link((HEAD,), (f"{SCORE}.weight",))


def _ours(link: Link, reader: Reader, rank: int) -> Iterator[Tensor]:
    """Our tensor, padded to a rank."""
    (name,) = link.ours
    for values in link.to_ours(name, reader):
        factor = name.endswith((".A.weight", ".B.weight"))
        yield padded(values, rank, dim=0 if name.endswith(".A.weight") else 1) if factor else values


def _ours_of(name: str) -> str:
    """A tensor's name without peft's prefix and adapter name."""
    name = name.replace(f".{SCORE}.modules_to_save.", f".{SCORE}.")
    return re.sub(r"\.(lora_[AB])\.\w+\.weight$", r".\1.weight", name.removeprefix(PREFIX))


def _config(run: Run, modules: list[str], base: str) -> dict[str, Any]:
    adapter = run.adapter
    return dict(
        peft_type="LORA",
        task_type="SEQ_CLS" if run.model.scores else "CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=modules,
        use_rslora=adapter.rank_stabilized,
        use_dora=adapter.kind == "dora",
        bias="none",
        fan_in_fan_out=like_gpt2(run.model),
        modules_to_save=[SCORE] if run.model.scores else None,
        init_lora_weights=True,
    )


def _read_config(source: Path) -> dict[str, Any]:
    if not (source / CONFIG).is_file() or not (source / WEIGHTS).is_file():
        raise UserError(Problem(f"is no folder of peft adapters: it needs {CONFIG} and {WEIGHTS}", where=str(source)))
    config, where = read_json(source / CONFIG), str(source / CONFIG)
    if config.get("task_type") == "SEQ_CLS":  # there peft lists the head's possible names
        saved = [name for name in config.get("modules_to_save") or () if name not in (SCORE, "classifier")]
        config = config | {"modules_to_save": saved}
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(Problem(f"is {config.get('peft_type')!r}; only LORA is read", "peft_type", where))
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        problems.append(Problem("the rank and alpha must be numbers", "r", where))
    problems += [
        Problem(f"is {config[key]!r}; only {allowed[0]!r} is read", key, where)
        for key, allowed in OTHER.items()
        if key in config and config[key] not in allowed
    ]
    if (begun := config.get("init_lora_weights", True)) not in BESIDE_THE_BASE:
        reason = (
            f"is {begun!r}, with which the base has other weights too; have peft save them as adapters of the base as it was "
            "(save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )
        problems.append(Problem(reason, "init_lora_weights", where))
    known = (*(f"experts.{name}" for name in STACKS), *STACKS)
    others = [name for name in config.get("target_parameters") or () if not name.endswith((*known, "_proj.weight"))]
    if others:
        reason = f"names {', '.join(others)}; only {' and '.join(known[:2])} are read"
        problems.append(Problem(reason, "target_parameters", where))
    for key in ("rank_pattern", "alpha_pattern"):
        if wrong := [name for name in config.get(key) or () if not name.endswith(tuple(STACKS))]:
            problems.append(Problem(f"speaks of {', '.join(wrong)}; only experts may have their own", key, where))
    if problems:
        raise UserError(*problems)
    return config


def _adapter(config: dict[str, Any], model: ModelConfig, reader: Reader) -> AdapterConfig:
    """The config of the adapters in the file, which must adapt the same matrices in every layer."""
    scale = dict(rank=config["r"], alpha=float(config["lora_alpha"]), rank_stabilized=bool(config.get("use_rslora")))
    kind: Literal["lora", "dora"] = "dora" if config.get("use_dora") else "lora"
    every = AdapterConfig(kind, targets=MATRICES, dropout=float(config.get("lora_dropout") or 0.0), **scale)
    held, all_of = dict[str, set[str]](), dict[str, set[str]]()
    for layer in range(model.layers):
        table = layer_parameters(model, model.is_moe(layer), every)
        linear = [f"layers.{layer}.{entry.name}" for entry in table if entry.is_linear and entry.adapted]
        for link in links(model, linear):
            module, leaf = link.theirs[0].removesuffix(".weight"), link.ours[0].split(".")[-2]
            all_of.setdefault(leaf, set()).add(module)
            if f"{module}.lora_A.weight" in reader:
                held.setdefault(leaf, set()).add(module)
    stacks = _stacks(config, model, every, reader)
    for of_parts, some in ((all_of, stacks_of(model, every)), (held, stacks)):
        for part, matrix in (each for stack in some for each in stack.matrices.items()):
            of_parts.setdefault(part, set()).add(matrix)
    where = str(reader.folder / WEIGHTS)
    if partly := [leaf for leaf in held if held[leaf] != all_of[leaf]]:
        raise UserError(Problem(f"adapts {', '.join(partly)} in some layers only, which is not read", where=where))
    if not held:
        raise UserError(Problem("holds no adapter of a matrix of this network", where=where))
    adapter = replace(every, targets=tuple(name for name in MATRICES if name in held))
    run = Run(model=model, adapter=adapter)
    shapes, expected = adapter_shapes(run), dict[str, tuple[int, ...]]()
    for stack in stacks:
        expected |= stack.shapes(stack.rank(reader))
    expected |= {link.theirs[0]: shapes[link.ours[0]] for link in _tensors(run, _links(run, where))}
    if problems := compare_shapes(reader, expected, reader.names):
        raise UserError(*problems)
    return _of_one_rank(config, adapter, stacks, reader)


def _stacks(config: dict[str, Any], model: ModelConfig, every: AdapterConfig, reader: Reader) -> list[Stack]:
    """The stacks of experts that a config names and whose tensors are in the file."""
    named = config.get("target_parameters") or ()
    parts = [part for name, of in STACKS.items() if any(each.endswith(name) for each in named) for part in of]
    found = stacks_of(model, replace(every, kind="lora", targets=tuple(parts))) if parts else []
    return [stack for stack in found if set(stack.names()) <= set(reader.names)]


def _of_one_rank(config: dict[str, Any], adapter: AdapterConfig, stacks: list[Stack], reader: Reader) -> AdapterConfig:
    """The adapter with one rank for all, the largest. Where a stack holds adapters of gate and up side by side, each has half of
    its rank."""
    where, scale = str(reader.folder / CONFIG), scale_of(config, adapter.rank, adapter.alpha)
    _refuse_other_patterns(config, stacks, reader)
    for stack in stacks:
        rank = pattern_of(config, "rank_pattern", stack.parameter, adapter.rank)
        alpha = pattern_of(config, "alpha_pattern", stack.parameter, adapter.alpha)
        if stack.rank(reader) != rank:
            raise UserError(Problem(f"says rank {rank:g}, and {stack.path} has {stack.rank(reader)}", "r", where))
        if not isclose(scale_of(config, int(rank), alpha), scale, rel_tol=1e-9):
            raise UserError(
                Problem(f"gives {stack.parameter} another scale, which is not read", "alpha_pattern", where)
            )
    side_by_side = all(stack.is_two(reader, adapter.rank) for stack in stacks if stack.rank(reader) != adapter.rank)
    rank = adapter.rank if side_by_side else max(adapter.rank, *(stack.rank(reader) for stack in stacks))
    alpha = scale * (sqrt(rank) if adapter.rank_stabilized else rank)
    return replace(adapter, rank=rank, alpha=adapter.alpha if rank == adapter.rank else alpha)


def _refuse_other_patterns(config: dict[str, Any], stacks: list[Stack], reader: Reader) -> None:
    """Raise for ranks and alphas of anything but stacks of experts. Patterns are regular expressions for the end of a name."""
    experts = [f"{stack.path.replace('.base_layer', '')}.{stack.parameter}" for stack in stacks]
    paths = {name for stack in stacks for name in stack.names()}
    linear = [
        name.removesuffix(".lora_A.weight")
        for name in reader.names
        if name.endswith(".lora_A.weight") and name not in paths
    ]

    def matches(pattern: str, names: list[str]) -> bool:
        try:
            return any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
        except re.error:
            return False

    problems = []
    for key in ("rank_pattern", "alpha_pattern"):
        wrong = [each for each in config.get(key) or () if not matches(each, experts) or matches(each, linear)]
        if wrong:
            reason = f"speaks of {', '.join(wrong)}; only experts may have their own"
            problems.append(Problem(reason, key, str(reader.folder / CONFIG)))
    if problems:
        raise UserError(*problems)


def adapter_folder(adapter: Path) -> Path:
    """The folder with the files of adapters: a peft folder, or the newest checkpoint of a run."""
    return adapter if (adapter / CONFIG).is_file() else checkpoint_folder(adapter)


@contextlib.contextmanager
def adapted(folder: Path, adapter: Path | None) -> Iterator[Path]:
    """The folder of a checkpoint with adapters, from peft or from a run that trained them on it, valid within the context; without
    adapters, the checkpoint itself."""
    if adapter is None:
        yield folder
    elif (adapter / CONFIG).is_file():
        with tempfile.TemporaryDirectory(prefix="shardwise-adapter-") as scratch:
            from_peft(adapter, Path(scratch) / "adapter", folder)
            yield Path(scratch) / "adapter"
    else:
        found = adapter_folder(adapter)
        if not is_adapter(found):
            raise UserError(Problem("holds a whole network and no adapters", "--adapter", str(found)))
        base = base_of(found, read_run(found / RUN_FILE))
        if fingerprint(base) != fingerprint(folder):
            raise UserError(Problem(f"belongs to {base}, and not to {folder}", "--adapter", str(found)))
        yield found
