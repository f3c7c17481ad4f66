"""Rewards are plain functions of the user's; what is wrong with them is said in a sentence that names file, function and row."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardwise.run import UserError
from shardwise.tune.rewards import Answered, Rewards, load_functions, metric_names

FILE = """
import helper_of_rewards
from time import sleep

def match(prompt, completion, row):
    return completion == row["answer"]

def size(prompt, completion, row):
    row["answer"] = "changed"  # only this call sees it
    return helper_of_rewards.size(completion)

def fails(prompt, completion, row):
    return row["nothing"]

def nothing(prompt, completion, row):
    return None

def infinite(prompt, completion, row):
    return float("nan")

def huge(prompt, completion, row):
    return -(10 ** 10_000)

def slow(prompt, completion, row):
    try:
        while True:
            sleep(0.01)
    except Exception:
        return 0.0

def swallows(prompt, completion, row):
    for _ in range(2):  # as for several programs to be run
        try:
            while True:
                sleep(0.01)
        except:
            pass
    return 0.0

def leaves(prompt, completion, row):
    exec("exit()")

def consumes(prompt, completion, row):
    return row["tests"].pop()

NUMBER = 3
"""
ANSWERS = [Answered("p", "yes", dict(answer="yes", id=7)), Answered("p", "no!!", dict(answer="yes", id=8))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_rewards.py").write_text("def size(text):\n    return len(text)\n")
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def test_several_are_added_up_by_weight(file: Path) -> None:
    rewards = Rewards([f"{file}:match", f"{file}:size"], [2.0, -0.5])
    judged = rewards.judge(ANSWERS)
    assert rewards.names == ("match", "size")
    assert np.array_equal(judged, [[1, 3], [0, 4]])
    assert np.array_equal(rewards.total(judged), [0.5, -2.0])
    assert ANSWERS[0].row["answer"] == "yes"


def test_a_file_may_define_dataclasses_with_postponed_annotations(tmp_path: Path) -> None:
    """They look up their own module; two files of the same name are two modules."""
    text = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Judge:
    value: float = {value}

def score(prompt, completion, row):
    return Judge().value
"""
    names = []
    for value in (1.5, 2.5):
        (tmp_path / f"{value}").mkdir()
        (tmp_path / f"{value}" / "own.py").write_text(text.format(value=value))
        names.append(f"{tmp_path}/{value}/own.py:score")
    rewards = Rewards(names)
    assert np.array_equal(rewards.judge(ANSWERS[:1]), [[1.5, 2.5]])
    assert rewards.names == tuple(names)
    modules = {function.__module__ for function in rewards.functions}
    assert len(modules) == 2
    assert modules <= sys.modules.keys()


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["a.py:f", "a.py:g"], ("f", "g")),
        (["x/a.py:f", "x/b.py:f", "x/b.py:g"], ("a:f", "b:f", "g")),
        (["x/a.py:f", "y/a.py:f", "b.py:f"], ("x/a.py:f", "y/a.py:f", "b:f")),
    ],
)
def test_every_function_has_a_metric_of_its_own(sources: list[str], names: tuple[str, ...]) -> None:
    assert metric_names(sources) == names


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "raised KeyError: 'nothing' (line 13)"),
        ("nothing", "returned None, and a reward is a finite number"),
        ("infinite", "returned nan"),
        ("huge", "returned a number too large for a float"),
        ("leaves", "raised SystemExit"),
    ],
)
def test_mistakes_name_file_function_and_row(file: Path, name: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        Rewards([f"{file}:{name}"]).judge(ANSWERS[1:])
    text = str(error.value)
    assert text.startswith(f"{file}:{name}: objective.rewards: ")
    assert says in text
    assert '"id": 8' in text
    assert "'no!!'" in text


def test_answers_to_one_prompt_see_the_same_row(file: Path) -> None:
    row = dict(tests=[1, 2, 3])
    judged = Rewards([f"{file}:consumes"]).judge([Answered("p", "a", row), Answered("p", "b", row)])
    assert judged.tolist() == [[3.0], [3.0]]


@pytest.mark.parametrize("name", ["slow", "swallows"])
def test_what_takes_too_long_is_interrupted(file: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"took longer than objective.reward_seconds = 0.1"):
        Rewards([f"{file}:{name}"], seconds=0.1).judge(ANSWERS)
    time.sleep(0.15)  # no alarm is left


def test_another_thread_is_judged_afterwards(file: Path) -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(Rewards([f"{file}:size"]).judge(ANSWERS).tolist()))
    thread.start()
    thread.join()
    assert found == [[[3.0], [4.0]]]


def test_what_cannot_be_loaded_is_said_at_once(file: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    names = ["match", f"{file}:mach", f"{file}:NUMBER", f"{tmp_path}/none.py:f", f"{tmp_path}/broken.py:f"]
    with pytest.raises(UserError) as error:
        load_functions(names)
    said = (
        "not of the form file.py:function",
        "did you mean match?",
        "has no function NUMBER",
        "no such file",
        "SyntaxError",
    )
    assert all(part in str(error.value) for part in said)
