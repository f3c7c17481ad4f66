"""Batch invariance on a GPU: a row's bits by the kernels, whatever the other rows and tiles; and a request's, alone, in company,
cut into chunks, and by the trainer's forward pass. No tolerance anywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.measure.verify import random_batch
from shardwise.model import Transformer, initialize
from shardwise.model.invariant.attention import attend_documents
from shardwise.model.invariant.network import make_invariant, read_exactly, token_logprobs
from shardwise.model.varlen import VarlenMask, varlen_attention_reference
from shardwise.run import ModelConfig, run_from_dict
from shardwise.run.derive import derive_model
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.engine import Engine
from shardwise.serve.request import Output, Request, Sampling
from shardwise.serve.runner import Runner
from shardwise.train.step import TrainState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LONGEST, VOCAB, ANSWER = 1024, 1003, 24
LATENT = dict(attention="latent", kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32)
EXPERTS = dict(experts=8, experts_per_token=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(kv_heads=2, head_dim=64),
    "wide heads": dict(kv_heads=1, head_dim=128),
    "gpt": dict(norm="layernorm", activation="gelu", bias="all", position="learned", tied_embeddings=True),
    "window": dict(sliding_window=100, head_dim=64),
    "qwen": dict(kv_heads=2, qk_norm=True, head_dim=64, tied_embeddings=True),
    "mixtral": EXPERTS | dict(router="softmax"),
    "deepseek": LATENT | EXPERTS | dict(router="sigmoid", shared_experts=1, dense_layers=1, q_rank=48),
    "parallel": dict(parallel_block=True, activation="geglu"),
}
PROMPTS = [
    tuple(random.Random(n).randrange(VOCAB) for _ in range(length)) for n, length in enumerate((1, 40, 300, 777))
]
SAMPLING = Sampling(1.0, seed=3, logprobs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(512, 1024), (1000, 712), (64, 64), (4096, 4096)])
def test_rows_of_a_gemm(n: int, k: int, dtype: torch.dtype) -> None:
    from shardwise.model.kernels.gemm.invariant import Tile, invariant_gemm

    torch.manual_seed(0)
    x, weight = torch.randn(600, k, device="cuda").to(dtype), (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
    whole = invariant_gemm(x, weight)
    torch.testing.assert_close(whole, F.linear(x, weight), rtol=2e-2, atol=2e-2)
    for rows in (1, 2, 17, 33, 64, 100, 200, 512):
        assert torch.equal(invariant_gemm(x[-rows:], weight), whole[-rows:])
    for tile in (Tile(128, 16, 64, 8, 3), Tile(64, 32, 128, 4, 3), Tile(128, 256, 64, 8, 3)):
        assert torch.equal(invariant_gemm(x[5:9], weight, tile=tile), whole[5:9])


def test_rows_of_experts_and_heads() -> None:
    from shardwise.model.kernels.gemm.invariant import invariant_gemm, invariant_gemm_by_head, invariant_grouped_gemm

    torch.manual_seed(0)
    x, weight = torch.randn(500, 256, device="cuda").bfloat16(), torch.randn(6, 192, 256, device="cuda").bfloat16()
    counts = torch.tensor([100, 0, 301, 1, 0, 98], device="cuda")
    made, first = invariant_grouped_gemm(x, weight, counts), 0
    for expert, count in enumerate(counts.tolist()):
        assert torch.equal(made[first : first + count], invariant_gemm(x[first : first + count], weight[expert]))
        first += count
    heads = torch.randn(70, 6, 256, device="cuda").bfloat16()
    made = invariant_gemm_by_head(heads, weight)
    for head in range(6):
        assert torch.equal(made[:, head], invariant_gemm(heads[:, head], weight[head]))
    assert torch.equal(invariant_gemm_by_head(heads[7:8], weight), made[7:8])


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 64), (4, 4, 128), (16, 1, 80)])
def test_documents_have_the_bits_of_each_alone(heads: int, kv_heads: int, width: int, window: int) -> None:
    torch.manual_seed(0)
    lengths = [1, 300, 17, 600, 106]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] + [1024] * 3, dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1, 1024, n, width, device="cuda").bfloat16() for n in (heads, kv_heads, kv_heads))
    whole = attend_documents(q, k, v, VarlenMask(bounds, window), width**-0.5)
    wanted = varlen_attention_reference(*(x.double() for x in (q, k, v)), VarlenMask(bounds, window), width**-0.5)
    assert float((whole.double() - wanted).abs().max()) < 2e-2
    first = 0
    for length in lengths:
        own = slice(first, first + length)
        alone = attend_documents(q[:, own], k[:, own], v[:, own], VarlenMask(None, window), width**-0.5)
        assert torch.equal(alone, whole[:, own])
        first += length


def model_of(family: str, dtype: torch.dtype) -> Transformer:
    """With parameters in float32, as a trainer has them."""
    config = derive_model(ModelConfig(layers=2, hidden=256, heads=4, vocab=VOCAB, **FAMILIES[family]), LONGEST)
    model = Transformer(config, dtype=dtype).eval()
    initialize(model, config, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 4
    make_invariant(model)
    return model.cuda()


def as_served(model: Transformer) -> Transformer:
    """With parameters as `make_engine` loads them."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if not read_exactly(model.config, name):
            parameter.data = parameter.data.to(model.dtype)
    return model


def answers(model: Transformer, prompts: list[tuple[int, ...]], step: int, page: int, company: int) -> list[Any]:
    """Tokens and logprobs of each prompt's answer."""
    settings = ServeConfig(max_sequences=64, max_step_tokens=step, page_tokens=page)
    runner = Runner(model, 4000, page, 64, LONGEST, model.dtype)
    engine = Engine(runner, settings, 4000)
    draw = random.Random(step)
    for n in range(company):
        tokens = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 90)))
        engine.add(Request(f"other {n}", tokens, draw.randint(1, 40), Sampling(0.7, top_k=draw.choice([0, 5]))))
    for n, prompt in enumerate(prompts):
        engine.add(Request(str(n), prompt, ANSWER, SAMPLING))
    found: dict[str, list[Output]] = {}
    while not engine.idle:
        for output in engine.step():
            found.setdefault(output.request, []).append(output)
    return [
        (
            [token for each in found[str(n)] for token in each.tokens],
            [each.logprob for output in found[str(n)] for each in output.logprobs],
        )
        for n in range(len(prompts))
    ]


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.bfloat16) for family in FAMILIES), ("mixtral", torch.float16)]
)
def test_a_request_has_the_bits_of_training_in_any_company(family: str, dtype: torch.dtype) -> None:
    trained, served = model_of(family, dtype), as_served(model_of(family, dtype))
    alone = [answers(served, [prompt], 2048, 64, 0)[0] for prompt in PROMPTS]
    assert answers(served, PROMPTS, 97, 16, 40) == alone
    assert answers(served, PROMPTS[::-1], 2048, 32, 7)[::-1] == alone
    texts = [prompt + tuple(tokens) for prompt, (tokens, _) in zip(PROMPTS, alone, strict=True)]
    rows = torch.tensor([[token for text in texts for token in text]], device="cuda")
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None].cuda()
    bounds = torch.tensor([0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()], dtype=torch.int32)
    logits = trained(rows, positions, bounds.cuda()).result[0]
    assert logits.requires_grad  # it is the pass that training learns by
    by_text: tuple[Tensor, ...] = logits.split([len(text) for text in texts])
    for own, text, prompt, (_, logprobs) in zip(by_text, texts, PROMPTS, alone, strict=True):
        made = token_logprobs(own[:-1], torch.tensor(text[1:], device="cuda"))
        assert made[len(prompt) - 1 :].tolist() == logprobs


@pytest.mark.parametrize("family", ["llama", "gpt", "window", "qwen"])  # a router may decide otherwise for a last bit
def test_gradients_are_those_of_the_ordinary_network(family: str) -> None:
    config = derive_model(ModelConfig(layers=2, hidden=256, heads=4, vocab=VOCAB, **FAMILIES[family]), LONGEST)
    tokens = torch.randint(VOCAB, (2, 65), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for invariant in (False, True):
        model = Transformer(config, dtype=torch.bfloat16)
        initialize(model, config, 0)
        if invariant:
            make_invariant(model)
        model.cuda()
        loss = model(tokens[:, :-1], finish=lambda x, w, model=model: model.loss(x, w, tokens[:, 1:])).result
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    largest = max(float(plain.norm()) for plain in found[0][1:])
    for plain, own in zip(*found, strict=True):  # some are zero but for rounding: that of a bias of keys, for one
        assert float((plain - own).norm()) <= 0.05 * float(plain.norm()) + 0.002 * largest


@pytest.mark.parametrize("graph", [True, False])
def test_a_run_trains_with_it(graph: bool) -> None:
    """Launched and replayed, over packed documents: nearly the losses of an ordinary run."""
    model = dict(layers=2, hidden=256, heads=4, kv_heads=2, vocab=512)
    train = dict(
        steps=9, seq_len=256, global_batch=4, dtype="bfloat16", device="cuda", lr=1e-2, cuda_graph=graph, compile=False
    )
    losses = []
    for invariant in (False, True):
        run = run_from_dict(
            dict(model=model, data=dict(separate_documents=True), train=train | dict(invariant=invariant))
        )
        state = TrainState(run)
        batch = random_batch(run)
        losses.append([state.train_step(batch).read()[0] for _ in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1][-1] < losses[1][0]
