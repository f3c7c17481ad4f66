"""A pipeline schedule is one list of actions for each rank: the planner times that list and the trainer executes it.

An action names the pass, its stage and its microbatch. Communication is not listed, because it follows from the placement of the
stages: a forward sends its output to the next stage, a backward sends its gradient to the previous stage, and nothing is sent
between two stages of one rank. Where ranks have partners, E and L hand saved activations over and take them back; they are in the
lists of both partners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "E", "L", "U"]

FORWARD: Kind = "F"
BACKWARD: Kind = "B"  # for the input and the weights together
BACKWARD_INPUT: Kind = "I"
BACKWARD_WEIGHT: Kind = "W"
EVICT: Kind = "E"  # saved activations go to the rank's partner
LOAD: Kind = "L"  # … and come back
UPDATE: Kind = "U"  # the rank updates its weights, by itself
KINDS: tuple[Kind, ...] = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, EVICT, LOAD, UPDATE)
PASSES: tuple[Kind, ...] = (FORWARD, BACKWARD, BACKWARD_INPUT)
"""The kinds that take a microbatch through a stage, and send a message to the next stage."""


class Action(NamedTuple):
    """One pass of one stage for one microbatch; `str()` is short, "F2.5" for the forward of stage 2 on microbatch 5."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


_make: Callable[[tuple[Kind, int, int]], Action] = partial(tuple.__new__, Action)


def actions_of(kind: Kind, stages: Iterable[int], microbatches: Iterable[int]) -> list[Action]:
    """Actions of one kind, built several times as fast as one by one: long schedules have millions."""
    return list(map(_make, zip(repeat(kind), stages, microbatches, strict=False)))


@dataclass(frozen=True)
class Schedule:
    """What each pipeline rank does, in order. `placement[stage]` is the rank that holds the stage."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int
    partners: bool = False
    """Whether ranks hand saved activations to the rank at the same distance from the other end."""
    directions: int = 1
    """The number of ends at which microbatches enter. Stages are numbered along one direction, then along the other; each direction
    takes its share of the microbatches."""

    @property
    def stages(self) -> int:
        """Stages over all ranks; each rank holds `stages / len(ranks)` of them."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the network."""
        own = (stage for stage, home in enumerate(self.placement) if home == rank)
        return tuple(sorted(own, key=lambda stage: stage % self.depth))

    @property
    def depth(self) -> int:
        """Number of stages that a microbatch goes through."""
        return self.stages // self.directions

    def is_first(self, stage: int) -> bool:
        """Whether microbatches enter at this stage."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """Whether microbatches end at this stage, with the loss."""
        return stage % self.depth == self.depth - 1

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that go through a stage: all, or the first half in one direction and the rest in the other."""
        half = -(-self.microbatches // self.directions)
        return range(half, self.microbatches) if stage >= self.depth else range(half)


class Message(NamedTuple):
    """A message from one stage to another: `stage` is the one that computed it."""

    kind: Literal["activation", "gradient"]
    stage: int
    microbatch: int


def message_of(action: Action, placement: Sequence[int]) -> tuple[int, Message] | None:
    """The rank that receives the result of this action, and the message; None when it stays on its rank."""
    kind, stage, microbatch = action
    if kind == FORWARD:
        receiver, what = stage + 1, Message("activation", stage, microbatch)
    elif kind in PASSES:
        receiver, what = stage - 1, Message("gradient", stage, microbatch)
    else:
        return None
    if not 0 <= receiver < len(placement) or placement[receiver] == placement[stage]:
        return None
    return placement[receiver], what


def messages_to(receiver: int, schedule: Schedule) -> dict[int, tuple[Message, ...]]:
    """The messages that a rank receives, by sender, in the order the sender produces them.

    Point-to-point calls between two processes match in order, so a receiver that posts its receives in this order gets
    each message where it expects it, even where two ranks have several neighbouring stages.
    """
    found: dict[int, tuple[Message, ...]] = {}
    for sender, actions in enumerate(schedule.ranks):
        sent = (message_of(action, schedule.placement) for action in actions)
        mine = tuple(each[1] for each in sent if each is not None and each[0] == receiver)
        if mine:
            found[sender] = mine
    return found


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages placed round-robin, `chunks` on each rank: stage s is on rank s mod ranks."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down the ranks and up again, so that rank 0 holds both the embedding and the head."""
    return (*range(ranks), *reversed(range(ranks)))


def keep_microbatches(
    lists: Iterable[Iterable[Action]], microbatches: int, made: int
) -> tuple[tuple[Action, ...], ...]:
    """The lists, which were made for `made` microbatches, without those from `microbatches` on.

    No action depends on another microbatch, so leaving some out cannot cause a deadlock. This is how regular schedules serve
    irregular counts: the next regular count is scheduled, and the surplus left out.
    """
    if made == microbatches:
        return tuple(map(tuple, lists))
    return tuple(tuple(action for action in actions if action.microbatch < microbatches) for actions in lists)


def saved_activations(
    schedule: Schedule,
    whole: Sequence[float] | None = None,
    after_input: Sequence[float] | None = None,
    handed: Sequence[float] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Saved activations of each rank after each of its actions: they live from F until the backward no longer needs them.

    `whole[stage]` is the size that one microbatch keeps between F and B or I, and `after_input[stage]` the size left between I and
    W (by default all of it). By default each counts 1, and the result is a number of microbatch-stages. The cost of a split
    backward lies between two counts: everything kept until W, and nothing kept after I. `handed[stage]` is the size that is evicted
    and loaded again (by default all of it): the partner holds that much.
    """
    whole = [1] * schedule.stages if whole is None else whole
    after_input = whole if after_input is None else after_input
    if schedule.partners:
        return tuple(_with_partner(actions, whole, whole if handed is None else handed) for actions in schedule.ranks)
    change: dict[str, list[float]] = {
        "F": list(whole),
        "B": [-size for size in whole],
        "I": [left - size for size, left in zip(whole, after_input, strict=True)],
        "W": [-left for left in after_input],
        "U": [0.0] * len(whole),
    }
    return tuple(tuple(accumulate([change[kind][stage] for kind, stage, _ in actions])) for actions in schedule.ranks)


def _with_partner(actions: Sequence[Action], whole: Sequence[float], handed: Sequence[float]) -> tuple[float, ...]:
    """The same for one rank that has a partner."""
    own = {stage for kind, stage, _ in actions if kind == FORWARD}
    away: set[tuple[int, int]] = set()
    changes = []
    for kind, stage, microbatch in actions:
        if kind == FORWARD:
            changes.append(whole[stage])
        elif kind == EVICT:
            away.add((stage, microbatch))
            changes.append(-whole[stage] if stage in own else handed[stage])
        elif kind == LOAD:
            changes.append(handed[stage] if stage in own else -handed[stage])
        else:
            changes.append(-(handed if (stage, microbatch) in away else whole)[stage])
    return tuple(accumulate(changes))


def peak_activations(
    schedule: Schedule,
    whole: Sequence[float] | None = None,
    after_input: Sequence[float] | None = None,
    handed: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The peak of each rank's saved activations; arguments as for `saved_activations`."""
    return tuple(max(levels, default=0) for levels in saved_activations(schedule, whole, after_input, handed))
