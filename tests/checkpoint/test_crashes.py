"""A save may die, or fail, at any of its file operations: the run folder then holds the checkpoint before or the new one, whole,
and the next run goes on from it. Operations are counted by wrapping the functions of `os` and `open` in the dying process."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import pytest
import torch
from parallel_pool import RankPool

from shardwise.checkpoint.folder import complete, step_of
from shardwise.checkpoint.format import damage
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.resume import resume
from shardwise.checkpoint.state import local_shards
from shardwise.train.step import TrainState

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
Strike = Callable[[str, tuple[Any, ...]], None]


@contextmanager
def struck(strike: Strike) -> Iterator[None]:
    """Call `strike` before every file operation that changes something."""

    def before(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **named: Any) -> Any:
            strike(name, arguments)
            return function(*arguments, **named)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, before(name, getattr(os, name)))
        opened = before("open", io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        yield


def tensors(train_state: TrainState) -> dict[str, torch.Tensor]:
    return {
        shard.name: shard.values.clone() for shard in local_shards(train_state) if not shard.name.startswith("random/")
    }


@pytest.fixture(scope="module")
def states() -> dict[int, TrainState]:
    """A run after 1 and after 2 steps; the checkpoint of step 1 is to be removed when that of step 2 is there."""
    run = cases.make_run("dense", {}, layers=1, dtype="float32", keep=1)
    return {step: checkpoint_cases.trained(run, step) for step in (1, 2)}


def save(train_state: TrainState, out: Path, said: list[str] | None = None) -> str:
    saver = checkpoint_cases.saver_of(train_state, out, said)
    saver.save(train_state)
    return saver.finish()


def assert_whole(out: Path, states: dict[int, TrainState]) -> int:
    """The newest checkpoint is exactly that of its step, and a run goes on from it; gives the step."""
    said: list[str] = []
    fresh = TrainState(states[1].run)
    found = resume(fresh, out, checkpoint_cases.DATA, said.append)
    assert found is not None
    assert said == []  # nothing damaged was in the way
    want, got = tensors(states[found.step]), tensors(fresh)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    # The dead save's leftovers are gone.
    assert {p.name for p in (out / "checkpoints").iterdir()} == {p.name for p in complete(out)}
    return found.step


def die_at(number: int, train_state: TrainState, out: Path) -> bool:
    """Save in a process of its own that is killed right before its n-th file operation, or halfway through it if it is a write;
    gives whether it was."""
    child = os.fork()
    if child == 0:
        count = 0
        write = os.write

        def strike(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

        with struck(strike):
            save(train_state, out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.drawn(group="crashes")
def test_a_crash_before_any_file_operation_leaves_the_old_or_the_new(
    tmp_path: Path, states: dict[int, TrainState]
) -> None:
    found = []
    while True:
        out = tmp_path / str(len(found))
        assert save(states[1], out) == ""
        died = die_at(len(found) + 1, states[2], out)
        found.append(assert_whole(out, states))
        if not died:
            break
    # Old up to the rename, new from there on; removing the old one takes operations too.
    assert found == sorted(found)
    assert found.count(1) > 15
    assert found.count(2) > 5


@pytest.mark.drawn(group="crashes")
def test_an_error_of_any_file_operation_is_logged_and_costs_nothing_but_that_save(
    tmp_path: Path, states: dict[int, TrainState]
) -> None:
    number, failures, error = 0, 0, errno.ENOSPC
    while True:
        number += 1
        out = tmp_path / str(number)
        said: list[str] = []
        assert save(states[1], out) == ""
        count = 0

        def strike(name: str, arguments: tuple[Any, ...], number: int = number) -> None:
            nonlocal count
            count += 1
            if count == number:
                raise OSError(error, os.strerror(error))

        with struck(strike):
            problem = save(states[2], out, said)
        if problem:
            failures += 1
            assert os.strerror(error) in problem
            assert any(line.startswith("warning: step 2 is not saved") for line in said)
        newest = complete(out)[-1]
        assert list(damage(newest)) == []
        assert step_of(newest) == (1 if problem else 2)
        # The disk has room again: the same step is saved, and nothing is left of the failure.
        assert save(states[2], out) == ""
        assert assert_whole(out, states) == 2
        if count < number:
            break
    assert failures > 15


def test_a_disk_that_stays_full_leaves_the_checkpoints_before(tmp_path: Path, states: dict[int, TrainState]) -> None:
    assert save(states[1], tmp_path) == ""

    def strike(name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("write", "open", "mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with struck(strike):
        assert "No space left" in save(states[2], tmp_path)
    assert assert_whole(tmp_path, states) == 1


def test_what_a_dead_attempt_left_is_never_taken_for_this_one(tmp_path: Path, states: dict[int, TrainState]) -> None:
    assert save(states[1], tmp_path) == ""
    number = 0
    while not list((tmp_path / "checkpoints").glob(".step-00000002.*.partial/rank-00000.safetensors")):
        number += 1  # die later and later, until the file of a dead attempt is whole
        assert die_at(number, states[2], tmp_path)
    other = TrainState(states[1].run)
    cases.steps(other, 0, 2, True, seed=5)
    assert save(other, tmp_path) == ""
    (folder,) = complete(tmp_path)
    want = tensors(other)
    reader = open_checkpoint(folder, kind="")
    assert all(torch.equal(reader.get(name), want[name]) for name in want)


@pytest.mark.parametrize("mute", [False, True], ids=["it says so", "it cannot even say so"])
def test_a_rank_whose_disk_is_full_fails_that_save_for_all(ranks: RankPool, tmp_path: Path, mute: bool) -> None:
    run = cases.make_run("dense", dict(shard=2), layers=1, keep=9)
    for results in ranks.run(2, checkpoint_cases.save_where_one_rank_fails, run, tmp_path, mute):
        assert [bool(problem) for problem in results] == [False, True, False]
        if not mute:
            assert results[1].startswith("rank 1 cannot write")
            assert "No space left on device" in results[1]
    assert [step_of(folder) for folder in complete(tmp_path)] == [1, 3]
    assert all(list(damage(folder)) == [] for folder in complete(tmp_path))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
