"""Several engines answer as one: here all of them are threads."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe

import numpy as np
import pytest
from engines import answers, engine_of, expected, tokens_of
from patience import HANG_SECONDS

from shardwise.run import UserError
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.engine import Engine
from shardwise.serve.leader import Leader
from shardwise.serve.replicas import Replicas, answer_requests, in_process
from shardwise.serve.request import Output, Request, Sampling

SETTINGS = ServeConfig(max_sequences=2, max_step_tokens=16, page_tokens=4)
PREFIX = (5, 9, 3, 7, 1, 2, 8, 8, 4)


@contextmanager
def replicas(count: int) -> Iterator[tuple[Replicas, list[Engine]]]:
    engines = [engine_of("llama", SETTINGS, 64) for _ in range(count)]
    channels, threads = [], []
    for engine in engines[1:]:
        here, there = in_process()
        channels.append(here)
        threads.append(threading.Thread(target=answer_requests, args=(engine, there), daemon=True))
        threads[-1].start()
    made = Replicas(engines[0], channels)
    yield made, engines
    made.close()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def test_all_answer_and_equal_prefixes_meet() -> None:
    with replicas(3) as (made, engines):
        alone = [answers(made, [Request(f"alone {n}", (*PREFIX, n), 5, Sampling(0.0))]) for n in range(3)]
        assert sum(engine.stats().prefix_hits > 0 for engine in engines) == 1
        assert made.stats().prefix_hits == 2 * 8
        found = answers(made, [Request(str(n), (*PREFIX, n), 5, Sampling(0.0), n=2) for n in range(6)])
        assert all(engine.stats().generated_tokens for engine in engines), "nobody has all of them"
        for n in range(6):
            for index in range(2):
                assert tokens_of(found[str(n), index]) == expected("llama", (*PREFIX, n), 5)[0]
        for n in range(3):
            assert tokens_of(alone[n][f"alone {n}", 0]) == expected("llama", (*PREFIX, n), 5)[0]
        assert made.router.under_way == [0, 0, 0]
        assert made.stats().pages_used == 0


def test_what_cannot_run_is_refused_and_what_is_left_is_aborted() -> None:
    with replicas(2) as (made, _):
        with pytest.raises(UserError, match="64 at most"):
            made.add(Request("long", (1,) * 60, 10))
        made.add(Request("one", PREFIX, 30, Sampling(0.0), n=2))
        with pytest.raises(UserError, match="already"):
            made.add(Request("one", PREFIX, 30))
        made.finish("one", 0)
        made.abort("one")
        made.abort("unknown")
        found = []
        while not made.idle:
            found += made.step()
        assert (found[-1].index, found[-1].finish) == (1, "abort")
        assert all(output.index == 1 for output in found)
        assert made.router.under_way == [0, 0]
        assert made.stats().pages_used == 0


def test_a_replica_that_fails_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of("llama", SETTINGS, 64)
    made = Replicas(engine, [])
    engine.runner.model = None  # type: ignore[assignment]
    made.add(Request("one", PREFIX, 30))
    with pytest.raises(RuntimeError, match="replica 0 has ended"):
        answers(made, [])  # steps until it is idle, which it never is
    assert "Traceback" in capsys.readouterr().err


def test_a_replica_that_sends_much_is_sent_much_at_the_same_time() -> None:
    """Neither end's buffer holds what the other sends."""
    engines = [engine_of("llama", SETTINGS, 64) for _ in range(2)]
    here, there = Pipe()
    stepping, step = threading.Event(), engines[1].step

    def first_step() -> list[Output]:
        engines[1].step = step  # type: ignore[method-assign]
        stepping.set()
        return [Output("unknown", 0, (1,) * 10**6), *step()]

    engines[1].step = first_step  # type: ignore[method-assign]
    replica = threading.Thread(target=answer_requests, args=(engines[1], there), daemon=True)
    replica.start()
    made, found = Replicas(engines[0], [here]), []

    def ask() -> None:
        for n, user in enumerate(("", "", "u" * 10**6, "u" * 10**6)):  # every other one goes to this replica
            made.add(Request(str(n), (n, *PREFIX), 2, Sampling(0.0), user=user))
            assert n != 1 or stepping.wait(HANG_SECONDS)
        found.append(answers(made, []))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HANG_SECONDS)
    assert not asking.is_alive()
    for n in range(4):
        assert tokens_of(found[0][str(n), 0]) == expected("llama", (n, *PREFIX), 2)[0]
    made.close()
    replica.join(HANG_SECONDS)
    assert not replica.is_alive()


def test_a_step_is_sent_to_a_stage_that_reads_it_only_after_the_last() -> None:
    here, there = Pipe()
    leader = Leader(engine_of("llama", SETTINGS, 64).runner, [here], stages=3)  # type: ignore[arg-type]
    masks = np.zeros((1, 10**6), np.int32)
    launching = threading.Thread(target=leader.launch, args=([], masks), daemon=True)
    launching.start()
    launching.join(HANG_SECONDS)
    assert not launching.is_alive()
    (name, (_, told, _)) = pickle.loads(there.recv_bytes())[0]
    assert (name, told.shape) == ("launch", masks.shape)
    leader.close()
    assert pickle.loads(there.recv_bytes()) is None
