"""Rows that routers send to experts, and the width of the numbers that index them."""

from __future__ import annotations

from shardwise.plan.trainer.rank import PlannedRank
from shardwise.run.derive import accepted_choices

INTEGER = 8
"""Bytes of an index: of a token, or of an expert."""


def rows_to_experts(planned: PlannedRank) -> tuple[int, int]:
    """The rows a rank has for the experts, and those it gets for its own, when routers choose all experts alike: the choices that
    are accepted go to the ranks of the experts in turn. Where these do not divide them, the first ranks get one more."""
    m, lay, length = planned.run.model, planned.run.layout, planned.run.train.seq_len
    choices = planned.local_tokens * m.experts_per_token
    accepted = choices * accepted_choices(m, length) // (length * m.experts_per_token)
    mine = -((planned.index("expert") - accepted) // lay.expert)
    # With expert tensor parallelism each tensor rank has the rows of all of them.
    slices = lay.tensor if lay.expert_tensor else 1
    return accepted * slices, mine * lay.expert * slices
