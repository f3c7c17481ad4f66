"""Reads a TOML file and `--section.key=value` overrides into a resolved, checked `Run`, or into the list of all its problems."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from shardwise.run.axes import AXES
from shardwise.run.config import SECTIONS, Run, all_keys
from shardwise.run.derive import derive
from shardwise.run.presets import PRESETS, pretraining
from shardwise.run.problems import Problem, UserError, as_path, nearest, unreadable
from shardwise.run.rules.check import broken_rules
from shardwise.run.rules.rule import Broken
from shardwise.run.sections.declare import Key
from shardwise.run.sections.layout import LayoutConfig
from shardwise.run.vocabulary import all_text, vocabulary_of

COMMAND_LINE = "command line"
FREE = "layout=auto"
PRECISION_AND_BATCH = ("train.dtype", "train.seq_len", "train.global_batch")
"""Keys that a plan takes from the preset if the run does not set them."""


class _Given(dict[str, tuple[Any, str]]):
    """Values by full key, each with its source; later sources overwrite earlier ones."""


Rule = Callable[[Run], Iterable[Broken]]
Override = str | Mapping[str, Any]
"""An override of a file: `section.key=value` from the command line, or nested sections from a program."""


def read_run(path: str | Path | None = None, overrides: Iterable[Override] = (), rules: Iterable[Rule] = ()) -> Run:
    """The run of a TOML file (or of the defaults alone), with `section.key=value` overrides applied. The override `layout=auto`
    discards the file's layout. `rules` are the caller's own, reported with all the others."""
    problems: list[Problem] = []
    return _resolve(_all_given(path, overrides, problems), problems, rules)


SERVED_ELSEWHERE = ("layout.", "cluster.nodes", "cluster.devices_per_node", "cluster.rendezvous")
"""Keys of a training run that say nothing about where it is served."""


def read_served(path: str | Path | None, overrides: Iterable[Override] = ()) -> Run:
    """The run of a checkpoint to be served. It uses one device unless the overrides say otherwise, whatever it was trained on. Of
    the layout only the axes and `stages` count, since a forward pass has nothing else to lay out."""
    problems: list[Problem] = []
    given = _all_given(path, overrides, problems)
    kept = {n: v for n, v in given.items() if v[1] == COMMAND_LINE or not n.startswith(SERVED_ELSEWHERE)}
    run = _resolve(_Given(kept), problems, (_no_search,), serves=True)
    layout = LayoutConfig(**{name: getattr(run.layout, name) for name in (*AXES, "stages")})
    return replace(run, layout=layout)


def _no_search(run: Run) -> Iterable[Broken]:
    if run.layout.auto:
        yield Broken("layout.auto", (), "`shardwise plan` searches for the layout of a server; give what it finds")


class PlannedRun(NamedTuple):
    """A run as it is planned, and the keys that the user left open: their values, and the source of these."""

    run: Run
    left_open: dict[str, Any]
    source: str

    def sentence(self) -> str:
        """One line on what the user did not set; empty if everything is set."""
        values = ", ".join(f"{name} = {value}" for name, value in self.left_open.items())
        if not values:
            return ""
        hint = "" if self.source == "defaults" else "; `shardwise train` takes its own defaults unless you set them"
        return f"not set in the run, {self.source}: {values}{hint}"


def read_planned(
    path: str | Path | None = None, overrides: Iterable[Override] = (), rules: Iterable[Rule] = ()
) -> PlannedRun:
    """The run for a plan. If a run names a published model, the plan is about that model: dtype, sequence length and batch that
    the run does not set are those of its pretraining, with the batch kept in tokens. Training has small defaults instead, which
    suit any machine."""
    problems: list[Problem] = []
    given = _all_given(path, overrides, problems)
    preset = given.get("model.preset", ("", ""))[0]
    left, source = [name for name in PRECISION_AND_BATCH if name not in given], "defaults"
    if left and isinstance(preset, str) and preset in PRESETS:
        source = f"taken from the preset {preset}"
        published = pretraining(preset)
        if length := _given_length(given):
            published["global_batch"] = max(1, published["global_batch"] * published["seq_len"] // length)
        keys = {name: value for name, value in published.items() if f"train.{name}" in left}
        auto = given.get("layout.auto", ("",))[0] in (True, "true")
        if "global_batch" in keys and "train.microbatch" not in given and not auto:
            keys["microbatch"] = 1  # a rank's full share of such a batch never fits
        left = [f"train.{name}" for name in keys]
        given.update({f"train.{name}": (value, f"preset {preset}") for name, value in keys.items()})
    run = _resolve(given, problems, rules, serves=None)
    return PlannedRun(run, {name: getattr(run.train, name.partition(".")[2]) for name in left}, source)


def _given_length(given: _Given) -> int:
    """The sequence length that the user set; 0 if there is none, or none that can be used, which is reported with the rest."""
    if "train.seq_len" not in given:
        return 0
    raw, where = given["train.seq_len"]
    try:
        return _convert(raw, all_keys()["train.seq_len"], from_text=where == COMMAND_LINE)
    except ValueError:
        return 0


def _all_given(path: str | Path | None, overrides: Iterable[Override], problems: list[Problem]) -> _Given:
    given = _Given()
    overrides = list(overrides)
    if path is not None:
        file = as_path(path)
        given.update(_from_file(file, problems))
        given.setdefault("name", (file.stem, str(path)))
        if any(_frees(item) for item in overrides):
            given = _Given({name: value for name, value in given.items() if not name.startswith("layout.")})
        _find_chip_file(given, file.parent)
    given.update(_from_overrides(overrides, problems))
    _find_chip_file(given, Path.cwd())
    return given


def _frees(override: Override) -> bool:
    """Whether an override leaves the entire layout open."""
    if isinstance(override, str):
        return override.removeprefix("--") == FREE
    layout = override.get("layout")
    return layout == "auto" or (isinstance(layout, Mapping) and layout.get("auto") is True)


def _find_chip_file(given: _Given, folder: Path) -> None:
    """Look for a chip's own file next to the run, then in the working folder. The resolved run has the absolute path, so that a
    copy of the run finds it too."""
    chip, where = given.get("cluster.chip", ("", ""))
    if isinstance(chip, str) and chip.endswith(".toml") and (folder / chip).is_file():
        given["cluster.chip"] = (str((folder / chip).resolve()), where)


RETIRED: dict[str, Any] = {"layout.compress_frozen": False}
"""Keys that are gone, with the value that changes nothing: the run.toml of an earlier run names every key, and is read."""


def run_from_dict(values: dict[str, Any], where: str = "") -> Run:
    """The run of nested sections, as read from TOML or JSON."""
    problems: list[Problem] = []
    return _resolve(_flatten(values, where, problems), problems)


def _resolve(given: _Given, problems: list[Problem], rules: Iterable[Rule] = (), serves: bool | None = False) -> Run:
    """`serves`: whether the layout is that of a server; None: it is if the run has a load to plan."""
    keys = all_keys()
    for name in [n for n in given if n not in keys]:
        value, where = given.pop(name)
        if name not in RETIRED or value != RETIRED[name]:
            problems.append(Problem(_unknown(name, keys), name, where))

    preset, where = given.get("model.preset", ("", ""))
    if isinstance(preset, str) and preset in PRESETS:
        base = {f"model.{k}": (v, f"preset {preset}") for k, v in PRESETS[preset].items()}
        given = _Given({**base, **given})
    elif isinstance(preset, str) and preset:
        hint = nearest(preset, PRESETS) or f"; known: {', '.join(PRESETS)}."
        reason = f'there is no preset "{preset}"{hint} `shardwise config --presets` lists them'
        problems.append(Problem(reason, "model.preset", where))

    values: dict[str, Any] = {}
    bad = {p.key for p in problems}
    if "model.preset" in bad:  # then no size of the model is known, and rules about sizes would only mislead
        bad |= {name for name in keys if name.startswith("model.")}
    for name, (raw, where) in given.items():
        try:
            values[name] = _convert(raw, keys[name], from_text=where == COMMAND_LINE)
        except ValueError as e:
            problems.append(Problem(str(e), name, where))
            bad.add(name)

    if "model.vocab" not in given and (size := vocabulary_of(values.get("data.sets", ()))):
        values["model.vocab"] = size
    if not all_text((*values.get("data.sets", ()), *values.get("data.validation", ()))):
        values["data.separate_documents"] = True
    if values.get("layout.auto"):
        fixed = tuple(k for k in _section(values, "layout") if k not in ("auto", "fixed"))
        values.setdefault("layout.fixed", fixed)
    sections = {s: cls(**_section(values, s)) for s, cls in SECTIONS.items()}
    run = derive(Run(name=values.get("name", "run"), **sections))
    if serves is None:
        serves = bool(run.serve.rate or run.serve.concurrency)
    for rule in chain(broken_rules(run, serves), *(more(run) for more in rules)):
        if not bad & {rule.key, *rule.others}:
            problems.append(Problem(rule.reason, rule.key, _blame(given, rule.key, rule.others)))
    if problems:
        raise UserError(*problems)
    return run


def _blame(given: _Given, key: str, others: tuple[str, ...]) -> str:
    """The source that set the key; if the key is a default, the source of one of the other keys."""
    return next((given[k][1] for k in (key, *others) if k in given), "defaults")


def _section(values: dict[str, Any], section: str) -> dict[str, Any]:
    return {k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(section + ".")}


def _unknown(name: str, keys: dict[str, Key]) -> str:
    section, _, leaf = name.partition(".")
    if leaf and section not in SECTIONS:
        return f"there is no section [{section}]{nearest(section, SECTIONS) or '; known: ' + ', '.join(SECTIONS)}"
    same_leaf = [k for k in keys if k.split(".")[-1] == (leaf or section)]
    if same_leaf:
        return f"there is no such key; did you mean {' or '.join(same_leaf)}?"
    return f"there is no such key{nearest(name, keys)}"


def _from_file(path: Path, problems: list[Problem]) -> _Given:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return _flatten(tomllib.loads(text), str(path), problems)
    except tomllib.TOMLDecodeError as e:
        raise UserError(Problem(f"is not valid TOML: {e}", where=str(path))) from None
    except UnicodeDecodeError as e:
        raise UserError(Problem(f"is not UTF-8 text (byte {e.start})", where=str(path))) from None
    except IsADirectoryError:
        own = f", such as {path / 'run.toml'}" if (path / "run.toml").is_file() else ""
        raise UserError(Problem(f"is a folder; a run is a TOML file{own}", where=str(path))) from None
    except ValueError:  # of Python, which reads no integer of more than 4,300 digits
        raise UserError(Problem("has a number with too many digits", where=str(path))) from None
    except RecursionError:
        raise UserError(Problem("is nested too deeply to be a run", where=str(path))) from None
    except OSError as e:
        raise unreadable(e, where=path) from None


def _flatten(values: Mapping[str, Any], where: str, problems: list[Problem]) -> _Given:
    given = _Given()
    for section, content in values.items():
        if isinstance(content, Mapping):
            given.update({f"{section}.{k}": (v, where) for k, v in content.items()})
        elif section == "layout" and content == "auto":
            given["layout.auto"] = (True, where)
        elif section in SECTIONS:
            problems.append(Problem(f"is a section, written [{section}], not a value", section, where))
        else:
            given[section] = (content, where)
    return given


def _from_overrides(overrides: Iterable[Override], problems: list[Problem]) -> _Given:
    given = _Given()
    for item in overrides:
        if not isinstance(item, str):
            given.update(_flatten(item, "", problems))
            continue
        name, equals, text = item.removeprefix("--").partition("=")
        if not equals:
            problems.append(Problem("has no value; write --section.key=value", name, COMMAND_LINE))
        elif item.removeprefix("--") == FREE:
            given["layout.auto"] = ("true", COMMAND_LINE)
        elif name in SECTIONS:
            reason = f'is "{text}": a whole layout is "auto", or its keys are given one by one'
            problems.append(Problem(reason if name == "layout" else "is a section, not a value", name, COMMAND_LINE))
        else:
            given[name] = (text, COMMAND_LINE)
    return given


def type_name(kind: Any) -> str:
    """The name of a type in the schema and in messages."""
    if get_origin(kind) is Literal:
        return " | ".join(json.dumps(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {type_name(get_args(kind)[0])}"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "nothing"}[kind]


def _parse_text(text: str, kind: Any) -> Any:
    """A command-line value: text if the key is text, otherwise parsed as TOML."""
    words = get_args(kind) if get_origin(kind) is Literal else ()
    if kind is str or (words and all(isinstance(word, str) for word in words)):
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [_parse_text(part.strip(), get_args(kind)[0]) for part in text.split(",")] if text else []
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError, RecursionError):
        return text
    except ValueError:  # of Python, which reads no integer of more than 4,300 digits
        raise ValueError(f"{text[:20]}… has too many digits") from None


def _convert(raw: Any, key: Key, *, from_text: bool) -> Any:
    value = _typed(_parse_text(raw, key.type) if from_text else raw, key.type)
    for limit, broken, word in (
        (key.least, lambda v, x: v < x, "at least"),
        (key.above, lambda v, x: v <= x, "above"),
        (key.most, lambda v, x: v > x, "at most"),
    ):
        if limit is not None and broken(value, limit):
            raise ValueError(f"{value} must be {word} {limit:g}")
    if key.name == "name" and (not value or Path(value).name != value or value in (".", "..")):
        raise ValueError(f'"{value}" must be usable as the name of a folder')
    return value


def _typed(value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            words = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
            raise ValueError(f'"{value}" is not one of {", ".join(words)}{nearest(str(value), words)}')
        return value
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_typed(item, get_args(kind)[0]) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{_shortened(value)} is too large") from None
    # People write a thousand as 1e3, which TOML reads as a float.
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not a {type_name(kind)}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if kind is int and abs(value) >= 2**63:
        raise ValueError(f"{_shortened(value)} is too large")
    return value


def _shortened(value: int) -> str:
    """A number for a message; a very long one by its size alone."""
    return str(value) if abs(value) < 10**40 else f"a number of {value.bit_length()} bits"
