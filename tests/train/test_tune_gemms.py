"""Algorithms drawn for the steps of a run, without a GPU: when that begins, what is used in each step, what is kept of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.model.gemm import tuned
from shardwise.model.gemm.cublaslt import Algorithm, LibraryError, Shape
from shardwise.run import run_from_dict
from shardwise.train import tune_gemms
from shardwise.train.tune_gemms import Tuner, attach

BF16 = torch.bfloat16
SHAPES = [Shape(rows, 32, 16, False, False, 16, 32, BF16, BF16, BF16) for rows in (16, 32, 48, 64)]
FAST, SLOW = Algorithm(b"\1" * 64, 0), Algorithm(b"\2" * 64, 0)


class Machine:
    """A clock on which a step takes as long as its algorithms say, with events, candidates and multiplications that know it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.now = 0.0
        machine = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = machine.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class Candidates:
            def __init__(self, shape: Shape, device: int) -> None:
                if shape == SHAPES[2]:
                    raise LibraryError("none for this one")
                if shape == SHAPES[3]:
                    raise torch.cuda.OutOfMemoryError

            def found(self) -> list[Algorithm]:
                return machine.found

        fake: Any = SimpleNamespace(takes=lambda algorithm: True)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(tune_gemms, "Candidates", Candidates)
        monkeypatch.setattr(tuned, "Multiplication", lambda shape, device: fake)
        self.choices = tuned.Choices(0, path / "choices.json")
        self.used: list[list[Algorithm | None]] = []
        self.found = [SLOW, FAST]
        self.effects = {None: 0.0, FAST: -4.0, SLOW: 3.0}

    def step(self) -> None:
        made = [self.choices.of(shape) for shape in SHAPES]
        self.used.append([one[1] if one is not None else None for one in made])
        one, two, *_ = self.used[-1]
        self.now += 100.0 + self.effects[one] - self.effects[two] / 2  # the second gains by being slow

    def run(self, tuner: Tuner, steps: int) -> None:
        for _ in range(steps):
            tuner()
            self.step()


def test_steps_find_out_and_the_next_run_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, said = Machine(monkeypatch, tmp_path), []
    tuner = Tuner(machine.choices, said.append)
    machine.run(tuner, tune_gemms.STEPS + tune_gemms.COMPARED + 10)
    assert machine.used[:2] == [[None] * 4] * 2  # the first step notes shapes, the second comes after the search
    drawn = machine.used[2 : tune_gemms.STEPS + 2]
    assert {one[0] for one in drawn} == {None, FAST, SLOW}
    compared = machine.used[tune_gemms.STEPS + 2 : tune_gemms.STEPS + 2 + tune_gemms.COMPARED]
    assert sorted(compared, key=str) == sorted(
        [[FAST, SLOW, None, None], [None] * 4] * (tune_gemms.COMPARED // 2), key=str
    )
    assert machine.used[-7:] == [[FAST, SLOW, None, None]] * 7
    assert len(said) == 2
    assert "2 of 2 GEMMs" in said[1]
    assert "5.5%" in said[1]
    next_time = Machine(monkeypatch, tmp_path)
    told: list[str] = []
    next_time.run(Tuner(next_time.choices, told.append), 5)
    # What could not be tried is looked at again, and there is nothing to find.
    assert next_time.used == [[FAST, SLOW, None, None]] * 5
    assert not told


def test_what_only_seemed_better_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, said = Machine(monkeypatch, tmp_path), []
    tuner = Tuner(machine.choices, said.append)
    machine.run(tuner, tune_gemms.STEPS + 2)
    monkeypatch.setattr(machine, "effects", {None: 0.0, FAST: 1.0, SLOW: -1.0})  # from here on it is otherwise
    machine.run(tuner, tune_gemms.COMPARED + 2)
    assert machine.used[-1] == [None] * 4
    assert "are the fastest" in said[1]
    assert machine.choices.known == {SHAPES[0].name: None, SHAPES[1].name: None}


def test_a_second_run_in_one_process_leaves_known_ones_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, said = Machine(monkeypatch, tmp_path), []
    machine.run(Tuner(machine.choices, said.append), tune_gemms.STEPS + tune_gemms.COMPARED + 5)
    again = Tuner(machine.choices, said.append)
    machine.run(again, 10)
    again.stop()
    machine.run(again, 2)
    assert machine.used[-12:] == [[FAST, SLOW, None, None]] * 12
    assert len(said) == 2


def test_products_without_candidates_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, said = Machine(monkeypatch, tmp_path), []
    machine.found = []
    tuner = Tuner(machine.choices, said.append)
    machine.run(tuner, tune_gemms.STEPS + tune_gemms.COMPARED + 5)
    assert machine.used == [[None] * 4] * (tune_gemms.STEPS + tune_gemms.COMPARED + 5)
    assert not said
    assert tuner.done


def test_a_stopped_search_leaves_everything_to_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, tmp_path)
    tuner = Tuner(machine.choices, lambda _: None)
    machine.run(tuner, 20)
    assert any(one[0] is not None for one in machine.used)
    tuner.stop()
    machine.run(tuner, tune_gemms.STEPS)
    assert machine.used[20:] == [[None] * 4] * tune_gemms.STEPS
    assert not machine.choices.known


def test_too_many_shapes_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_gemms, "SHAPES", 3)
    machine, said = Machine(monkeypatch, tmp_path), []
    machine.run(Tuner(machine.choices, said.append), 20)
    assert machine.used == [[None] * 4] * 20
    assert not said


def test_a_cpu_finds_nothing_out() -> None:
    train_state: Any = SimpleNamespace(run=run_from_dict({}), device=torch.device("cpu"), tuner=None)
    attach(train_state)
    assert train_state.tuner is None
