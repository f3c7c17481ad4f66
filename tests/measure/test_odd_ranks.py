"""Numbers of ranks that no drawn layout has: three context ranks, whose sequence the other tests' length does not divide."""

from __future__ import annotations

import pytest
from parallel_pool import RankPool

from shardwise.measure.verify import TOLERANCE, verify_rank
from shardwise.run import Run, run_from_dict


def differences(rank: int, run: Run) -> list[str]:
    """What a rank does otherwise than planned."""
    verdict = verify_rank(run, steps=1)
    return [each.name for each in verdict.beyond(TOLERANCE)] + ([] if verdict.schedule else ["schedule"])


@pytest.mark.large("six ranks that together gave no answer once")
@pytest.mark.parametrize("method", ["ulysses", "ring", "gather"])
def test_latent_attention_with_experts_over_three_context_ranks(ranks: RankPool, method: str) -> None:
    latent = dict(attention="latent", q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8)
    experts = dict(experts=6, experts_per_token=2, expert_ffn=24, shared_experts=1, router="sigmoid")
    layout = dict(context=3, tensor=2, expert=3, expert_tensor=True, context_method=method)
    train = dict(steps=3, seq_len=48, global_batch=2, microbatch=1, dtype="float64", device="cpu")
    model = dict(layers=2, hidden=48, heads=6, ffn=64, vocab=61) | latent | experts
    run = run_from_dict(dict(model=model, layout=layout, train=train))
    assert ranks.run(run.layout.world, differences, run) == [[]] * 6
