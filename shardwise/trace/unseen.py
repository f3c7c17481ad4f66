"""What some profiles do not show, in sentences: an answer that is empty, or less sure than it looks, says why."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.trace.answers import Explanation
from shardwise.trace.sending.axes import UNKNOWN


def unseen(answers: Explanation, dropped: int, lost: Mapping[int, int]) -> tuple[str, ...]:
    """What these profiles do not show, in sentences."""
    said = []
    missing = answers.world - len(answers.seen)
    if missing > 0:
        said.append(f"{missing} of {answers.world} ranks were not given: waiting for them counts as transfer")
    gone = sum(lost[rank] for rank in answers.launches)
    if gone:
        said.append(
            f"{gone} launches (of CUDA graphs, or lost) have no kernels in the profile: what they did looks idle, cause unknown"
        )
    if any(row.axis == UNKNOWN for row in answers.axes):
        said.append(
            "some messages name no process group, so their axis is unknown and collectives are matched as if of one group"
        )
    unsized = sum(row.total.messages - row.total.sized for row in answers.axes)
    if unsized:
        said.append(
            f"the size of {unsized} messages is not in the profile, so their bytes and bandwidth are not counted"
        )
    if dropped:
        said.append(
            f"{dropped} messages could not be matched: ranks do not have as many of them, or they do not end together"
        )
    if len(answers.seen) > 1 and any(clock.uncertainty < 0 for clock in answers.clocks.values()):
        said.append("clocks of some ranks could not be compared, since they share no matched collective")
    if answers.modules.rows and not any(answers.modules.in_modules.values()):
        said.append("no modules: record with labels, with_modules or with_stack to see kernels by module")
    if not answers.flops.ranks:
        said.append("no operations: record_shapes=True would tell them")
    if not any(answers.memory.values()):
        said.append("no memory over time: profile_memory=True would tell it")
    if not any(answers.devices.values()) and not answers.launches:
        said.append("no device: times are those of operators on the host's threads")
    return tuple(said)
