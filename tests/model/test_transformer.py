"""The network against brute force: masks, packed documents, the cache, experts, routing and initial weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.data.batches import IGNORE_INDEX
from shardwise.model import Transformer, initialize
from shardwise.model.attention import DotProductAttention
from shardwise.model.initialize import draw
from shardwise.model.moe.layer import MoE, Router
from shardwise.model.rope import rope_cos_sin, rope_frequencies
from shardwise.model.varlen import attention_mask
from shardwise.run import ModelConfig
from shardwise.run.derive import derive_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(kv_heads=2),
    "gpt": dict(norm="layernorm", activation="gelu", bias="all", position="learned", tied_embeddings=True),
    "window": dict(sliding_window=5, qk_norm=True),
    "mixtral": dict(experts=4, experts_per_token=2),
    "deepseek": dict(
        attention="latent", q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12, experts=8, experts_per_token=2,
        expert_ffn=32, shared_experts=1, dense_layers=1, router="sigmoid", router_groups=4, router_top_groups=2,
        rope_scaling="yarn", rope_factor=4.0, yarn_mscale_all=1.0,
    ),
}  # fmt: skip


def build(family: str, seed: int = 0) -> Transformer:
    config = derive_model(ModelConfig(layers=3, hidden=64, heads=4, vocab=50, **FAMILIES[family]), 32)
    model = Transformer(config).double()
    initialize(model, config, seed)
    for p in model.parameters():  # wide enough that every part matters to the result
        if p.ndim > 1:
            p.data *= 5
    return model


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_does_not_depend_on_what_follows(family: str) -> None:
    model, tokens = build(family), some_tokens(1, 16)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 50
    a, b = model(tokens).result, model(changed).result
    torch.testing.assert_close(a[:, :10], b[:, :10], rtol=0, atol=1e-12)
    assert (a[:, 10:] - b[:, 10:]).abs().amax(dim=-1).min() > 1e-6 or family == "window"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_compute_what_each_alone_computes(family: str) -> None:
    model, tokens = build(family), some_tokens(1, 16)
    lengths = (5, 1, 10)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]
    packed = model(tokens, positions=positions, documents=documents).result
    alone = torch.cat([model(piece).result for piece in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-11)


def test_attention_is_softmax_of_products() -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 6, 4, 8).double(),
        torch.randn(2, 6, 2, 8).double(),
        torch.randn(2, 6, 2, 8).double(),
    )
    got = DotProductAttention(0.3)(q, k, v, None)
    want = torch.zeros_like(got)
    for b in range(2):
        for i in range(6):
            for h in range(4):
                scores = torch.stack([0.3 * q[b, i, h] @ k[b, j, h // 2] for j in range(i + 1)])
                want[b, i, h] = scores.softmax(0) @ v[b, : i + 1, h // 2]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("length", "window"), [(6, 3), (7, 0), (7, 4), (5, 1)])
def test_the_mask_is_causal_windowed_and_inside_documents(length: int, window: int) -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2][:length]])
    mask = attention_mask(length, documents, window, torch.device("cpu"))
    for i in range(length):
        for j in range(length):
            may = j <= i and (not window or i - j < window) and documents[0, i] == documents[0, j]
            assert bool(mask[0, 0, i, j]) == bool(may)


def test_targets_give_the_summed_loss_and_ignored_ones_do_not_count() -> None:
    model, tokens = build("llama"), some_tokens(2, 8)
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = IGNORE_INDEX
    logits = model(tokens).result
    want = -logits.log_softmax(-1)[:, :-1].gather(-1, targets[:, :-1, None]).sum()
    torch.testing.assert_close(
        model(tokens, finish=lambda x, matrix: model.loss(x, matrix, targets)).result, want, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_a_mixture_adds_its_chosen_experts_by_weight(router: str) -> None:
    config = derive_model(
        ModelConfig(
            hidden=16,
            heads=2,
            ffn=24,
            experts=5,
            experts_per_token=2,
            shared_experts=1,
            router=router,
            router_scale=1.5,
        ),
        8,
    )
    mixture = MoE(config).double()
    initialize(mixture, config, 0, "layers.0.ffn.")
    for p in mixture.parameters():
        p.data *= 20
    if router == "sigmoid":
        mixture.router.bias.copy_(torch.linspace(-0.3, 0.3, 5))
    x = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got, _ = mixture(x)
    for b in range(2):
        for t in range(7):
            token = x[b, t]
            logits = mixture.router.weight @ token
            scores = logits.sigmoid() if router == "sigmoid" else logits.softmax(0)
            choice = scores + mixture.router.bias if router == "sigmoid" else scores
            best = sorted(range(5), key=lambda e, c=choice: -c[e])[:2]
            want = mixture.shared(token)
            for e in best:
                inner = F.silu(mixture.experts.gate[e] @ token) * (mixture.experts.up[e] @ token)
                want = want + 1.5 * scores[e] / sum(scores[i] for i in best) * (mixture.experts.down[e] @ inner)
            torch.testing.assert_close(got[b, t], want, rtol=1e-10, atol=1e-10)


def test_group_limited_routing_stays_in_the_best_groups() -> None:
    config = derive_model(
        ModelConfig(hidden=8, experts=8, experts_per_token=3, router="sigmoid", router_groups=4, router_top_groups=2),
        8,
    )
    router = Router(config)
    initialize(router, config, 0, "layers.0.ffn.router.")
    router.weight.data *= 100
    x = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0))
    _, chosen, _ = router(x)
    scores = (x @ router.weight.T).sigmoid()[0]
    for t in range(64):
        groups = scores[t].view(4, 2).sum(1).topk(2).indices.tolist()
        eligible = [e for g in groups for e in (2 * g, 2 * g + 1)]
        best = sorted(eligible, key=lambda e: -scores[t, e])[:3]
        assert sorted(chosen[0, t].tolist()) == sorted(best)


def test_auxiliary_losses_are_the_papers_sums() -> None:
    config = derive_model(ModelConfig(hidden=8, experts=4, experts_per_token=2), 8)
    router = Router(config).double()
    initialize(router, config, 0, "layers.0.ffn.router.")
    router.weight.data *= 50
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, chosen, (balance, z) = router(x)
    logits = x @ router.weight.T
    want = 0.0
    for row in range(3):
        for e in range(4):
            f = 4 / (2 * 5) * sum(e in chosen[row, t] for t in range(5))
            want += f * logits[row].softmax(-1)[:, e].mean() * 5
    torch.testing.assert_close(balance, want)
    torch.testing.assert_close(z, (logits.exp().sum(-1).log() ** 2).sum())


def test_rebalancing_moves_the_bias_towards_idle_experts_and_counts_anew() -> None:
    config = derive_model(ModelConfig(hidden=8, experts=4, experts_per_token=1, router="sigmoid"), 8)
    router = Router(config)
    initialize(router, config, 0, "layers.0.ffn.router.")
    router.load.copy_(torch.tensor([10.0, 0.0, 5.0, 5.0]))
    router.rebalance(0.1)
    torch.testing.assert_close(router.bias, torch.tensor([-0.1, 0.1, 0.0, 0.0]))
    assert not router.load.any()
    router.train()
    router(torch.randn(2, 3, 8))
    assert router.load.sum() == 6


def test_a_parallel_block_adds_attention_and_feed_forward_of_one_norm() -> None:
    config = derive_model(ModelConfig(layers=2, hidden=16, heads=2, vocab=20, parallel_block=True), 8)
    model = Transformer(config).double()
    initialize(model, config, 0)
    block = model.layers["0"]
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = rope_cos_sin(config, torch.arange(8)[None], x.dtype)
    normed = block.attention_norm(x)
    want = x + block.attention(normed, rope, None, None) + block.ffn(normed)
    torch.testing.assert_close(block(x, rope, None)[0], want)


def test_a_parallel_block_may_have_two_norms_of_what_enters() -> None:
    keys = dict(layers=2, hidden=16, heads=2, vocab=20, parallel_block=True, parallel_norms=2, norm="layernorm")
    config = derive_model(ModelConfig(**keys), 8)
    model = Transformer(config).double()
    initialize(model, config, 0)
    block = model.layers["0"]
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = rope_cos_sin(config, torch.arange(8)[None], x.dtype)
    with torch.no_grad():
        block.ffn_norm.weight.mul_(2.0)
    want = x + block.attention(block.attention_norm(x), rope, None, None) + block.ffn(block.ffn_norm(x))
    torch.testing.assert_close(block(x, rope, None)[0], want)


def test_a_share_of_the_pairs_is_rotated_as_in_a_narrower_head_and_the_others_keep_still() -> None:
    config = derive_model(ModelConfig(layers=1, hidden=32, heads=2, vocab=20, rope_share=0.5), 8)
    narrow = derive_model(ModelConfig(layers=1, hidden=16, heads=2, vocab=20), 8)
    freq, _ = rope_frequencies(config, "cpu")
    torch.testing.assert_close(freq[:4], rope_frequencies(narrow, "cpu")[0])
    assert not freq[4:].any()


def test_initial_weights_depend_on_seed_name_and_place_only() -> None:
    small, again = build("mixtral"), build("mixtral")
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), again.parameters(), strict=True))
    other = build("mixtral", seed=1)
    assert not torch.equal(small.layers["0"].attention.q.weight, other.layers["0"].attention.q.weight)
    assert not torch.equal(small.layers["0"].attention.q.weight, small.layers["1"].attention.q.weight)
    stacked = small.layers["0"].ffn.experts.up
    assert not torch.equal(stacked[0], stacked[1])
    wide = derive_model(ModelConfig(layers=3, hidden=512, heads=4, vocab=50), 32)
    for name, std in (("attention.q", wide.init_std), ("attention.out", wide.init_std / 6**0.5)):
        drawn = torch.empty(512, 512)
        draw(drawn, wide, 0, f"layers.0.{name}.weight")
        assert drawn.std().item() == pytest.approx(std, rel=0.01)


def test_sixteen_bit_arithmetic_leaves_parameters_and_gradients_wide() -> None:
    config = derive_model(ModelConfig(layers=2, hidden=32, heads=2, vocab=50, experts=2, experts_per_token=1), 8)
    model = Transformer(config, dtype=torch.bfloat16)
    initialize(model, config, 0)
    tokens = some_tokens(2, 8)
    assert model(tokens).result.dtype == torch.bfloat16
    loss = model(tokens, finish=lambda x, matrix: model.loss(x, matrix, tokens)).result
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
