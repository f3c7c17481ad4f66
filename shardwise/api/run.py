"""A run as a program writes it: from keywords, a dict or a TOML file, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.hardware.chips import unknown_chip
from shardwise.run import PRESETS, PlannedRun, UserError, read_planned, read_run, to_dict, to_toml
from shardwise.run import Run as ResolvedRun
from shardwise.run.config import SECTIONS, all_keys
from shardwise.run.problems import as_path
from shardwise.run.write import sections_to_toml

Source = str | PathLike[str] | Mapping[str, Any] | ResolvedRun


class Run:
    """The description of a job.

    `Run("job.toml")`, `Run({"model": {"preset": "llama3-8b"}})` or keywords, which can also override either: sections
    (`layout={"tensor": 8}`, `layout="auto"`), dotted keys (`**{"train.steps": 10}`), and keys whose name only one section has
    (`tensor=8, chip="h100"`). All mistakes are raised at once, as `UserError`.
    """

    def __init__(self, source: Source | Run | None = None, /, **keys: Any) -> None:
        path = as_path(source) if isinstance(source, str | PathLike) else None
        given: tuple[Mapping[str, Any], ...] = ()
        if isinstance(source, Run):
            path, given = source._path, source._given
        elif isinstance(source, ResolvedRun):
            given = (to_dict(source),)
        elif isinstance(source, Mapping):
            given = (_sections(source),)
        elif path is None and source is not None:
            raise UserError(f"a run is a file, a dict or a Run, not {type(source).__name__}")
        self._read(path, (*given, _sections(keys)) if keys else given)

    def _read(self, path: Path | None, given: tuple[Mapping[str, Any], ...]) -> None:
        self._path, self._given = path, given
        self._planned = read_planned(path, given, (unknown_chip,))
        run = self._planned.run
        self.name, self.model, self.layout, self.data = run.name, run.model, run.layout, run.data
        self.train, self.objective, self.adapter = run.train, run.objective, run.adapter
        self.memory, self.serve, self.cluster = run.memory, run.serve, run.cluster

    def replace(self, **keys: Any) -> Run:
        """This run with some keys changed."""
        return Run(self, **keys)

    def free(self) -> Run:
        """This run without its layout keys, so that the layout is searched for."""
        freed = object.__new__(Run)
        given = ({name: value for name, value in each.items() if name != "layout"} for each in self._given)
        freed._read(self._path, (*given, {"layout": "auto"}))
        return freed

    def planned(self) -> PlannedRun:
        """The run as the planner reads it: with precision and batch of the preset where none is set."""
        return self._planned

    def trained(self) -> ResolvedRun:
        """The run as the trainer reads it: with small defaults where nothing is set."""
        return read_run(self._path, self._given, (unknown_chip,))

    def to_dict(self) -> dict[str, Any]:
        """Every key, by section."""
        return to_dict(self._planned.run)

    def to_toml(self) -> str:
        """The run as a file, with every key."""
        return to_toml(self._planned.run)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self._planned.run == other._planned.run

    def __hash__(self) -> int:
        return hash(self._planned.run)

    def __repr__(self) -> str:
        changed = [f"{key}={value!r}" for key, value in _changed(self._planned.run).items()]
        return f"Run({self.name}: {', '.join(changed) or 'defaults'})"

    def _repr_html_(self) -> str:
        sections: dict[str, Any] = {"name": self.name}
        for key, value in _changed(self._planned.run).items():
            section, _, leaf = key.partition(".")
            sections.setdefault(section, {})[leaf] = list(value) if isinstance(value, tuple) else value
        return f"<pre>{escape(sections_to_toml(sections))}</pre>"


def as_run(source: Source | Run) -> Run:
    """A verb's argument as a run."""
    return source if isinstance(source, Run) else Run(source)


def _sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections, from sections, dotted keys, and keys that only one section has. Other keys are left for the reader to
    refuse."""
    found: dict[str, Any] = {}
    homes: dict[str, list[str]] = {}
    for key in all_keys():
        homes.setdefault(key.rpartition(".")[2], []).append(key)
    for name, value in values.items():
        if not isinstance(name, str):
            raise UserError(f"{name!r} is no name of a key")
        full = homes[name][0] if name not in SECTIONS and len(homes.get(name, ())) == 1 else name
        section, _, leaf = full.partition(".")
        if leaf:
            inner = found.setdefault(section, {})
            if isinstance(inner, dict):
                inner[leaf] = value
            else:  # layout="auto", tensor=8
                found[section] = {"auto": True, leaf: value}
        elif isinstance(value, Mapping):
            found[section] = {**found.get(section, {}), **value}
        elif section in found and value == "auto":
            found[section]["auto"] = True
        else:
            found[section] = value
    return found


def _changed(run: ResolvedRun) -> dict[str, Any]:
    """The keys that differ from their defaults and from the preset."""
    default = ResolvedRun()
    preset = PRESETS.get(run.model.preset, {})
    return {
        f"{section}.{leaf}": value
        for section in SECTIONS
        for leaf, value in vars(getattr(run, section)).items()
        if value != getattr(getattr(default, section), leaf) and not (section == "model" and preset.get(leaf) == value)
    }
