"""A recipe: the files, the steps in order, and the tokenizer. It is read from TOML, and all problems are reported at once.

The settings of a step are the keyword arguments of its function, so a name, a default and a type are written in one place.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from shardwise.data.prepare.minhash import HASHES
from shardwise.data.prepare.steps import MAPS, RULES, SHUFFLES, Step, settings_of
from shardwise.run.problems import Problem, UserError, nearest, unreadable

VERSION = 1
MOST_STEPS = 32
"""Bits of the mask of the steps that changed a document."""
MOST_HASHES = 4096
"""The most of anything that a comparison of documents counts: words, bands, hash functions of a band."""
Bad = Literal["skip", "stop"]


@dataclass(frozen=True)
class Source:
    """Files that belong together; each source becomes one token set."""

    name: str
    paths: tuple[str, ...]
    field: str = "text"
    weight: float = 1.0
    """How often a run draws from it, relative to the others; 0 keeps it out of the mixture."""


@dataclass(frozen=True)
class TokenizerChoice:
    """Raw bytes, a tokenizer file, or a tokenizer trained on the kept documents."""

    path: str = "byte"
    train: int = 0
    """Vocabulary size of a byte-level BPE to train; 0: `path` is used."""
    end: str = ""
    train_bytes: int = 2**30
    """Bytes of text to train on: the first documents of every source in turn."""


@dataclass(frozen=True)
class Recipe:
    """The whole recipe."""

    sources: tuple[Source, ...]
    steps: tuple[Step, ...] = ()
    words: str = "simple"
    """How text is split into words: "simple", or "spacy/en"."""
    bad: Bad = "skip"
    """How to treat input that cannot be read: skip and record it, or stop."""
    longest: int = 2**26
    """The most bytes of one document; a longer one counts as unreadable. It bounds the memory of a worker."""
    tokenizer: TokenizerChoice = field(default_factory=TokenizerChoice)

    def digest(self) -> str:
        """A hash that changes when anything in the recipe does."""
        said = json.dumps([VERSION, asdict(self)], sort_keys=True)
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a file; its paths are relative to that file."""
    try:
        table = tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as e:
        raise unreadable(e, where=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(Problem(f"is not TOML: {e}", where=str(path))) from None
    problems: list[Problem] = []
    recipe = _recipe(table, Path(path).parent, problems)
    if problems:
        raise UserError(*(Problem(p.message, p.key, str(path)) for p in problems))
    return recipe


def _recipe(table: dict[str, Any], folder: Path, problems: list[Problem]) -> Recipe:
    sources = [_source(each, number, folder, problems) for number, each in enumerate(_list(table, "sources", problems))]
    steps = [_step(each, number, folder, problems) for number, each in enumerate(_list(table, "steps", problems))]
    if len(steps) > MOST_STEPS:
        problems.append(Problem(f"are {len(steps)}; a recipe has at most {MOST_STEPS}", "steps"))
    if not sources and not problems:
        problems.append(Problem('is missing: [[sources]] with a name and paths = ["..."]', "sources"))
    names = [source.name for source in sources]
    problems += [Problem(f'"{name}" is given twice', "sources.name") for name in {*names} if names.count(name) > 1]
    if sources and not any(source.weight for source in sources):
        problems.append(Problem("are all 0: at least one source must be drawn from", "sources.weight"))
    tokenizer = table.get("tokenizer", {})
    if not isinstance(tokenizer, dict):
        problems.append(Problem("is a table: [tokenizer] with path or train", "tokenizer"))
        tokenizer = {}
    chosen = _fill(TokenizerChoice, tokenizer, "tokenizer", problems)
    if chosen.get("path", "byte") != "byte":
        chosen["path"] = str((folder / chosen["path"]).resolve())
    own = {key: value for key, value in table.items() if key not in ("sources", "steps", "tokenizer")}
    filled = _fill(Recipe, own, "", problems, without=("sources", "steps", "tokenizer"))
    if filled.get("bad", "skip") not in get_args(Bad):
        problems.append(Problem(f'"{filled["bad"]}" is not known: "skip" or "stop"', "bad"))
    if filled.get("longest", 1) < 1:
        problems.append(Problem(f"{filled['longest']} must be at least 1", "longest"))
    return Recipe(tuple(sources), tuple(steps), tokenizer=TokenizerChoice(**chosen), **filled)


def _list(table: dict[str, Any], key: str, problems: list[Problem]) -> list[dict[str, Any]]:
    value = table.get(key, [])
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return value
    problems.append(Problem(f"is a list of tables: write [[{key}]] above each", key))
    return []


def _source(table: dict[str, Any], number: int, folder: Path, problems: list[Problem]) -> Source:
    where = f"sources[{number}]"
    filled = _fill(Source, {"name": "", "paths": [], **table}, where, problems)
    name = filled.get("name", "")
    if not name or not name.replace("-", "").replace("_", "").isalnum():
        problems.append(Problem(f'"{name}" must be of letters, digits, - and _', f"{where}.name"))
    paths = filled.get("paths", ())
    if not paths:
        problems.append(Problem("names no file or folder", f"{where}.paths"))
    if filled.get("weight", 1.0) < 0:
        problems.append(Problem(f"{filled['weight']} must not be negative", f"{where}.weight"))
    return Source(**{**filled, "name": name, "paths": tuple(str(folder / path) for path in paths)})


def _step(table: dict[str, Any], number: int, folder: Path, problems: list[Problem]) -> Step:
    where = f"steps[{number}]"
    kind = table.get("kind")
    known = {**RULES, **MAPS, **SHUFFLES}
    if kind not in known:
        there = f"; there are {', '.join(known)}"
        message = "is missing" + there if kind is None else f'"{kind}" is not known{nearest(str(kind), known) or there}'
        problems.append(Problem(message, f"{where}.kind"))
        return Step("", {})
    settings = settings_of(known[kind])
    given = {key: value for key, value in table.items() if key != "kind"}
    for key in [key for key in given if key not in settings]:
        problems.append(Problem(f"{kind} has no such setting{nearest(key, settings)}", f"{where}.{key}"))
        del given[key]
    for key, value in given.items():
        parameter = settings[key]
        default = parameter.default
        if default is inspect.Parameter.empty:
            default = {"str": "", "int": 0, "float": 0.0}.get(str(parameter.annotation), ())
        given[key] = _value(value, default, f"{where}.{key}", problems)
    if kind in SHUFFLES:
        for key, value in given.items():
            least, most = (0, 2**32 - 1) if key == "seed" else (1, MOST_HASHES)
            if type(value) is int and not least <= value <= most:
                problems.append(Problem(f"{value} must be between {least} and {most:,}", f"{where}.{key}"))
            if key == "hash" and value not in HASHES:
                problems.append(Problem(f'"{value}" is not known: {" or ".join(HASHES)}', f"{where}.{key}"))
    missing = [key for key, parameter in settings.items() if parameter.default is parameter.empty and key not in given]
    problems += [Problem(f"{kind} needs it", f"{where}.{key}") for key in missing]
    if kind == "decontaminate" and "paths" in given:
        given["paths"] = [str(folder / path) for path in given["paths"]]
    defaults = {key: parameter.default for key, parameter in settings.items() if key not in missing}
    filled = json.loads(json.dumps({**defaults, **given}))
    return Step(kind, {key: filled[key] for key in settings if key in filled})


def _fill(
    kind: Any, table: dict[str, Any], where: str, problems: list[Problem], without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The fields of a dataclass that a table sets, with values of the right type."""
    example = kind("", ()) if kind is Source else kind(()) if kind is Recipe else kind()
    fields = {name: getattr(example, name) for name in kind.__dataclass_fields__ if name not in without}
    found = {}
    for key, value in table.items():
        place = f"{where}.{key}" if where else key
        if key not in fields:
            known = (*fields, *without)
            there = f"; there are {', '.join(known)}"
            problems.append(Problem(f"is not known{nearest(key, known) or there}", place))
        else:
            found[key] = _value(value, fields[key], place, problems)
    return found


def _value(value: Any, default: Any, where: str, problems: list[Problem]) -> Any:
    """The value if it is of the default's type, else the default."""
    if isinstance(default, bool):
        right, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        right, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif isinstance(default, float):
        right, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
        value = float(value) if right else value
    elif isinstance(default, str):
        right, wanted = isinstance(value, str), "a text"
    elif default and not isinstance(default[0], str):
        right = isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value)
        right = right and all(type(number) in (int, float) for each in value for number in each)
        wanted = "a list of pairs of numbers"
    else:
        right, wanted = isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of texts"
    if not right:
        problems.append(Problem(f"{json.dumps(value, default=str)} is not {wanted}", where))
        return default
    return value
