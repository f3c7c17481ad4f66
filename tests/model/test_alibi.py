"""ALiBi as elements of queries and keys against biases that are added to the scores, and what 16 bits leave of them."""

from __future__ import annotations

import pytest
import torch

from shardwise.model import Transformer, initialize
from shardwise.model.alibi import alibi_elements, alibi_of_rank, alibi_slopes, with_elements
from shardwise.model.attention import dot_product_attention
from shardwise.run import ModelConfig
from shardwise.run.derive import derive_model


def test_slopes_of_a_power_of_two_and_of_other_numbers_of_heads() -> None:
    # Press et al. 2022, section 3: 8 heads have 1/2 to 1/256, and 16 the geometric means between them as well.
    torch.testing.assert_close(alibi_slopes(8, "cpu"), 0.5 ** torch.arange(1, 9, dtype=torch.float64))
    sixteen, twelve = alibi_slopes(16, "cpu"), alibi_slopes(12, "cpu")
    torch.testing.assert_close(sixteen[1::2], alibi_slopes(8, "cpu"))
    torch.testing.assert_close(twelve, torch.cat((alibi_slopes(8, "cpu"), sixteen[0::2][:4])))


@pytest.mark.parametrize("heads", [4, 6])
def test_it_is_attention_with_biases_that_fall_with_the_distance(heads: int) -> None:
    config = derive_model(ModelConfig(hidden=8 * heads, heads=heads, position="alibi"), 32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, heads, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    positions = torch.arange(20)[None]
    for_queries, for_keys = alibi_elements(config, positions, torch.float64)
    got = dot_product_attention(with_elements(q, for_queries), with_elements(k, for_keys), v, None, 8**-0.5)

    back = positions[0][:, None] - positions[0]
    scores = torch.einsum("bqhw,bkhw->bhqk", q, k) * 8**-0.5 - alibi_slopes(heads, "cpu")[:, None, None] * back
    scores = scores.masked_fill(back < 0, float("-inf"))
    want = torch.einsum("bhqk,bkhw->bqhw", scores.softmax(dim=-1), v)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_sixteen_bits_hold_every_position_and_the_slope_to_sixteen_bits() -> None:
    config = derive_model(ModelConfig(hidden=14336, heads=112, position="alibi"), 2048)
    positions = torch.tensor([[0, 1, 255, 256, 257, 2047, 65535, 65537, 1_000_003]])
    for dtype in (torch.bfloat16, torch.float16):
        q, k = (x.double() for x in alibi_elements(config, positions, dtype))
        bias = (q * k).sum(dim=-1)[0] / 128**0.5
        want = positions[0][:, None] * alibi_slopes(112, "cpu")
        torch.testing.assert_close(bias, want, atol=0, rtol=2**-15)


def test_devices_with_some_of_the_heads_have_their_slopes() -> None:
    config = derive_model(ModelConfig(hidden=48, heads=6, position="alibi"), 32)
    positions = torch.arange(5)[None]
    whole, keys = alibi_elements(config, positions, torch.float64)
    parts = [alibi_of_rank(config, 3, rank)(config, positions, torch.float64) for rank in range(3)]
    assert torch.equal(torch.cat([q for q, _ in parts], dim=2), whole)
    assert all(torch.equal(k, keys) for _, k in parts)


def test_embeddings_are_normalised_before_the_first_layer() -> None:
    config = derive_model(ModelConfig(layers=1, hidden=16, heads=2, vocab=20, embedding_norm=True, norm="layernorm"), 8)
    model = Transformer(config)
    initialize(model, config, 0)
    tokens = torch.arange(8)[None]
    x = model.embed_tokens(tokens, tokens)
    torch.testing.assert_close(x, torch.nn.functional.layer_norm(model.embed(tokens), (16,), eps=config.norm_eps))
