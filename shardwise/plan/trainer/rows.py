"""Rows that routers send to experts."""

from __future__ import annotations

from shardwise.plan.trainer.rank import PlannedRank
from shardwise.run.derive import accepted_choices


def rows_to_experts(planned: PlannedRank) -> tuple[int, int]:
    """The rows that a rank dispatches, and those that arrive for its own experts, when routers choose all experts equally often.
    The accepted choices go to the expert ranks in turn; where they do not divide evenly, the first ranks get one more."""
    m, lay, length = planned.run.model, planned.run.layout, planned.run.train.seq_len
    choices = planned.local_tokens * m.experts_per_token
    accepted = choices * accepted_choices(m, length) // (length * m.experts_per_token)
    mine = -((planned.index("expert") - accepted) // lay.expert)
    # With expert tensor parallelism each tensor rank has the rows of all tensor ranks.
    slices = lay.tensor if lay.expert_tensor else 1
    return accepted * slices, mine * lay.expert * slices
