"""Every schedule passes the checker for any number of microbatches, and has the bubble and memory its paper states."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_check import bubble, check, idle

from shardwise.run.axes import BIDIRECTIONAL, LOOPED, SPLIT_BACKWARD, V_SHAPED
from shardwise.schedules import (
    SCHEDULES,
    Action,
    Cost,
    Schedule,
    legal,
    make_schedule,
    messages_to,
    peak_activations,
    time,
)

SMALL = settings(max_examples=150, deadline=None)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULES))
    chunks = draw(st.integers(1, 3)) if name in LOOPED else None
    ranks = draw(st.sampled_from((2, 4, 6, 8)) if name in BIDIRECTIONAL else st.integers(1, 8))
    return make_schedule(name, ranks, draw(st.integers(1, 20)), chunks)


def bubbles(
    schedule: Schedule, forward: float = 1, backward_input: float = 1, backward_weight: float = 1
) -> set[float]:
    return set(bubble(time(schedule, Cost.even(schedule.stages, forward, backward_input, backward_weight))))


@SMALL
@given(schedules())
def test_every_schedule_passes_the_checker_for_any_number_of_microbatches(schedule: Schedule) -> None:
    report = check(schedule)
    assert report.problems == ()
    assert all(levels[-1] == 0 for levels in report.in_flight)
    actions = [action for rank in schedule.ranks for action in rank]
    assert sum(action.kind == "F" for action in actions) == schedule.depth * schedule.microbatches


@SMALL
@given(schedules())
def test_each_stage_adds_up_its_gradients_in_the_same_order(schedule: Schedule) -> None:
    for stage in range(schedule.stages):
        for kinds in ("F", "BI", "BW"):
            order = [
                a.microbatch for a in schedule.ranks[schedule.placement[stage]] if a.stage == stage and a.kind in kinds
            ]
            assert order == list(schedule.microbatches_of(stage)), (stage, kinds)


@SMALL
@given(schedules())
def test_messages_are_the_neighbours_of_the_network_in_the_senders_order(schedule: Schedule) -> None:
    seen = set()
    ranks = range(len(schedule.ranks))
    channels = [(each, one, messages) for one in ranks for each, messages in messages_to(one, schedule).items()]
    for sender, receiver, messages in channels:
        assert sender != receiver
        order = {action: at for at, action in enumerate(schedule.ranks[sender])}
        made = []
        for kind, stage, microbatch in messages:
            reader = stage + 1 if kind == "activation" else stage - 1
            assert (schedule.placement[stage], schedule.placement[reader]) == (sender, receiver)
            made += [order[Action(k, stage, microbatch)] for k in ("F" if kind == "activation" else "BI")
                     if Action(k, stage, microbatch) in order]  # fmt: skip
            seen.add((kind, stage, microbatch))
        assert made == sorted(made)
        assert len(made) == len(messages)
    crossings = sum(a != b for a, b in pairwise(schedule.placement[: schedule.depth]))
    assert len(seen) == 2 * crossings * schedule.microbatches


def test_two_ranks_that_share_several_pairs_of_stages_share_one_channel() -> None:
    # One rank down the V and one up: activations of stage 0 and gradients of stage 3 both go from rank 0 to rank 1.
    messages = messages_to(1, make_schedule("zb-v", 2, 3))[0]
    assert {(message.kind, message.stage) for message in messages} == {("activation", 0), ("gradient", 3)}
    assert [str(Action("F", 2, 5)), str(Action("W", 0, 11))] == ["F2.5", "W0.11"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 3, 8])
def test_gpipe_and_1f1b_have_the_same_bubble_and_1f1b_holds_only_the_depth(ranks: int, more: int) -> None:
    microbatches = ranks + more
    gpipe = make_schedule("gpipe", ranks, microbatches)
    plain = make_schedule("1f1b", ranks, microbatches)
    assert bubbles(gpipe, 2, 3, 1) == bubbles(plain, 2, 3, 1) == {(ranks - 1) * (2 + 3 + 1)}
    assert check(gpipe).high_water == (microbatches,) * ranks
    assert check(plain).high_water == tuple(ranks - rank for rank in range(ranks))
    assert make_schedule("interleaved", ranks, microbatches, 1).ranks == plain.ranks
    assert make_schedule("breadth-first", ranks, microbatches, 1).ranks == gpipe.ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("microbatches", range(8, 25, 3))
def test_interleaving_divides_the_bubble_also_where_microbatches_do_not_divide(
    ranks: int, chunks: int, microbatches: int
) -> None:
    # A stage is a chunk-th of a rank's layers, so this is a chunk-th of the bubble of 1F1B.
    looped = make_schedule("interleaved", ranks, microbatches, chunks)
    broad = make_schedule("breadth-first", ranks, microbatches, chunks)
    assert bubbles(looped) == bubbles(broad) == {(ranks - 1) * 3}
    group = -(-microbatches // (microbatches // ranks))
    assert check(looped).high_water == tuple(
        min(2 * (ranks - rank - 1) + (chunks - 1) * group + 1, microbatches * chunks) for rank in range(ranks)
    )
    assert check(broad).high_water == (microbatches * chunks,) * ranks
    if microbatches % ranks == 0:
        assert group == ranks


@pytest.mark.parametrize(("forward", "grad_input", "grad_weight"), [(1, 1, 1), (3, 4, 2), (4, 3, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_zb_h1_keeps_the_memory_of_1f1b_and_fills_its_bubble_with_weights(
    ranks: int, more: int, forward: int, grad_input: int, grad_weight: int
) -> None:
    schedule = make_schedule("zb-h1", ranks, ranks + more)
    assert bubbles(schedule, forward, grad_input, grad_weight) == {(ranks - 1) * (forward + grad_input - grad_weight)}
    report = check(schedule)
    assert report.high_water == (ranks,) * ranks
    assert report.high_water_input == tuple(ranks - rank for rank in range(ranks))


@pytest.mark.parametrize(
    ("forward", "grad_input", "grad_weight"), [(1, 1, 1), (3, 4, 2), (4, 3, 3), (4, 5, 3), (2, 3, 2)]
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [-1, 0, 1, 7])
def test_zb_2p_never_waits_with_twice_the_memory_of_1f1b(
    ranks: int, more: int, forward: int, grad_input: int, grad_weight: int
) -> None:
    schedule = make_schedule("zb-2p", ranks, 2 * ranks + more)
    timing = time(schedule, Cost.even(ranks, forward, grad_input, grad_weight))
    # The paper's table 2: waiting, and what stage i = r + 1 holds, (2p - 2i + 1) M_B + (2i - 2) M_W.
    waits = (ranks - 1) * (forward + grad_input - 2 * grad_weight)
    assert max(idle(timing)) == waits
    assert set(bubble(timing)) == {max(waits, (ranks - 1) * forward)}
    report = check(schedule)
    assert report.high_water == (2 * ranks - 1,) * ranks
    assert report.high_water_input == tuple(2 * (ranks - rank) - 1 for rank in range(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [-1, 0, 1, 7])
def test_zb_v_never_waits_within_the_memory_of_1f1b(ranks: int, more: int) -> None:
    schedule = make_schedule("zb-v", ranks, 2 * ranks + more)
    timing = time(schedule, Cost.even(schedule.stages))
    assert idle(timing) == (0,) * ranks
    assert set(bubble(timing)) == {ranks - 1}
    assert check(schedule).high_water == (2 * ranks,) * ranks


@pytest.mark.parametrize(("forward", "grad_input", "grad_weight"), [(1, 1, 1), (4, 3, 2), (4, 4, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_dualpipe_v_in_sequence(ranks: int, more: int, forward: int, grad_input: int, grad_weight: int) -> None:
    schedule = make_schedule("dualpipe-v", ranks, 2 * ranks + more)
    assert bubbles(schedule, forward, grad_input, grad_weight) == {(ranks - 1) * (forward + grad_input - grad_weight)}
    assert check(schedule).high_water == (2 * ranks + 1,) * ranks
    for rank, actions in enumerate(schedule.ranks):
        # Published parts 3 and 7 split one backward for each rank below, part 6 half of its 2 (rank + 1).
        assert sum(action.kind == "W" for action in actions) == 2 * (ranks - rank - 1) + rank + 1
        for one, other in pairwise(actions):
            if (one.kind, other.kind) == ("F", "B"):
                assert one.microbatch != other.microbatch
                assert one.stage != other.stage


@pytest.mark.parametrize(("forward", "grad_input", "grad_weight"), [(1, 1, 1), (4, 3, 2), (4, 4, 3)])
@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("more", [0, 2, 14])
def test_dualpipe_in_sequence(ranks: int, more: int, forward: int, grad_input: int, grad_weight: int) -> None:
    schedule = make_schedule("dualpipe", ranks, 2 * ranks + more)
    assert bubbles(schedule, forward, grad_input, grad_weight) == {
        (ranks // 2 - 1) * (forward + grad_input - grad_weight)
    }
    assert check(schedule).high_water == (ranks + 1,) * ranks  # the report's table 2: PP + 1
    for rank, actions in enumerate(schedule.ranks):
        # Both ends see the same from their own side, and two ranks hold the same stages of the network.
        half, other = len(schedule.microbatches_of(0)), schedule.ranks[ranks - 1 - rank]
        mirrored = [
            Action(a.kind, (a.stage + ranks) % (2 * ranks), (a.microbatch + half) % (2 * half)) for a in actions
        ]
        assert mirrored == list(other)
        assert schedule.stages_of(rank) == (
            (rank, 2 * ranks - 1 - rank) if 2 * rank < ranks else (2 * ranks - 1 - rank, rank)
        )


def test_dualpipe_is_figure_5_of_the_report() -> None:
    # Eight ranks, ten microbatches each way; forwards by number, ' the other way, b a backward, w a weight gradient apart.
    schedule = make_schedule("dualpipe", 8, 20)

    def drawn(rank: int, count: int) -> str:
        def one(action: Action) -> str:
            kind = {"F": "", "B": "b", "I": "i", "W": "w"}[action.kind]
            return f"{kind}{action.microbatch % 10}" + ("'" if action.stage >= 8 else "")

        return " ".join(map(one, schedule.ranks[rank][:count]))

    assert drawn(0, 14) == "0 1 2 3 4 5 6 0' i0' w0' 1' i1' w1' 2'"
    assert drawn(3, 12) == "0 0' 1 1' 2 2' 3 3' 4 b0' 4' b0"
    assert drawn(7, 8) == "0' 1' 2' 3' 4' 5' 6' 0"
    assert [str(a) for a in schedule.ranks[0][-3:]] == ["W0.8", "I0.9", "W0.9"]


@pytest.mark.parametrize(("forward", "grad_input", "grad_weight"), [(1, 1, 1), (2, 3, 2), (3, 4, 2)])
@pytest.mark.parametrize(
    ("name", "ranks", "depth"),
    [*(("dualpipe-v", p, p) for p in (2, 3, 4, 8)), *(("dualpipe", p, p // 2) for p in (2, 4, 8, 16))],
)
def test_dualpipe_with_pairs_run_as_one_has_the_published_bubble(
    name: str, ranks: int, depth: int, forward: int, grad_input: int, grad_weight: int
) -> None:
    schedule = make_schedule(name, ranks, 2 * ranks + 4)
    backward = grad_input + grad_weight
    length = {"F": forward, "B": backward, "I": grad_input, "W": grad_weight}
    blocks: list[list[list[Action]]] = []
    for actions in schedule.ranks:
        blocks.append([])
        for action in actions:
            if action.kind == "B" and blocks[-1][-1][-1].kind == "F":
                blocks[-1][-1].append(action)
            else:
                blocks[-1].append([action])
    finished: dict[tuple[bool, int, int], int] = {}
    for stage in range(schedule.stages):
        for m in schedule.microbatches_of(stage):
            finished |= {(True, stage - 1, m): 0} if schedule.is_first(stage) else {}
            finished |= {(False, stage + 1, m): 0} if schedule.is_last(stage) else {}
    clock = [0] * ranks
    while any(blocks):
        for rank in range(ranks):
            while blocks[rank]:
                block = blocks[rank][0]
                inputs = [
                    (a.kind == "F", a.stage + (-1 if a.kind == "F" else 1), a.microbatch)
                    for a in block
                    if a.kind != "W"
                ]
                if any(needed not in finished for needed in inputs):
                    break
                clock[rank] = max([clock[rank], *(finished[needed] for needed in inputs)])
                clock[rank] += sum(length[action.kind] for action in block)
                finished |= {(a.kind == "F", a.stage, a.microbatch): clock[rank] for a in block if a.kind != "W"}
                blocks[rank].pop(0)
    work = 2 * len(schedule.microbatches_of(0)) * (forward + backward)
    assert max(clock) - work == (depth - 1) * ((forward + backward) + backward - 3 * grad_weight)


def test_memory_can_be_weighed_by_stage_and_by_what_the_weights_still_need() -> None:
    schedule = make_schedule("zb-h1", 2, 4)
    # Rank 1 holds one microbatch before I, and owes one W at the end: 10 + 3.
    assert peak_activations(schedule, [7, 10], [2, 3]) == (14, 13)
    assert peak_activations(schedule) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 0, 4), ["0 ranks"]),
        (("1f1b", 2, 0), ["0 microbatches"]),
        (("interleaved", 2, 4, 0), ["0 stages"]),
        (("zb-v", 2, 4, 3), ["zb-v holds 2 stages on each rank, not 3"]),
        (("zb-h1", 2, 4, 2), ["zb-h1 holds 1 stage on each rank, not 2"]),
        (("dualpipe", 3, 4), ["two ranks hold the same stages, so it needs an even number"]),
        (("interleave", -1, 0, 2), ["-1 ranks", "0 microbatches", "there are gpipe"]),
    ],
)
def test_what_is_not_legal_is_said_whole_and_not_made(arguments: tuple, words: list[str]) -> None:
    reasons = legal(*arguments)
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))
    with pytest.raises(ValueError, match=re.escape("; ".join(reasons))):
        make_schedule(*arguments)


def test_names_and_stages_agree_with_what_is_made() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 6, 4)
        assert legal(name, 6, 4) == legal(name, 6, 4, schedule.stages // 6) == []
        assert schedule.name == name
        assert schedule.stages == 6 * (2 if name in (*LOOPED, *V_SHAPED) else 1)
        assert schedule.stages_of(0)[0] == 0
        kinds = {action.kind for rank in schedule.ranks for action in rank}
        assert ("I" in kinds) == (name in SPLIT_BACKWARD)
    assert make_schedule("zb-v", 3, 4).stages_of(1) == (1, 4)
    assert make_schedule("interleaved", 3, 4).stages_of(1) == (1, 4)
    assert make_schedule("zb-v", 3, 4).stages_of(0) == (0, 5)
