"""Which tests one worker takes together, and in which order."""

from __future__ import annotations

from workers import LONGEST, PARTS, SPREAD, place_of, scope_of


def test_a_file_stays_with_one_worker_and_what_waits_with_another() -> None:
    assert scope_of("tests/plan/test_search.py::test_a[1]") == scope_of("tests/plan/test_search.py::test_b")
    assert scope_of("tests/chaos/test_slow.py::test_a") == scope_of("tests/train/faults/test_stop.py::test_b[x]")


def test_of_a_run_of_ranks_all_checks_stay_together() -> None:
    one, other = "dense-layout0", "dense-layout1"
    assert scope_of(f"tests/{SPREAD}::test_losses[{one}]") == scope_of(f"tests/{SPREAD}::test_memory[{one}]")
    assert scope_of(f"tests/{SPREAD}::test_losses[{one}]") != scope_of(f"tests/{SPREAD}::test_losses[{other}]")


def test_a_long_file_is_taken_in_parts_of_as_many_cases() -> None:
    for file, parts in PARTS.items():
        scopes = [scope_of(f"tests/{file}::test_drawn_layouts[{number}]") for number in range(12 * parts)]
        assert {scopes.count(scope) for scope in scopes} == {12}
        assert len(set(scopes)) == parts


def test_long_files_come_first_and_single_runs_of_ranks_last() -> None:
    files = [SPREAD, "model/test_alibi.py", f"{LONGEST[1]}.py", f"{LONGEST[0]}.py"]
    assert sorted(files, key=place_of) == files[::-1]
