"""Generation: the same tokens with and without the cache, alone and in a batch; draws that follow the distribution."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import main
from shardwise.model import Transformer, initialize
from shardwise.model.generate import Sampling, generate, pick
from shardwise.run import ModelConfig, UserError, run_from_dict
from shardwise.run.derive import derive_model
from shardwise.train.loop import train

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(kv_heads=2),
    "gpt": dict(norm="layernorm", activation="gelu", bias="all", position="learned", tied_embeddings=True),
    "window": dict(sliding_window=4),
    "deepseek": dict(
        attention="latent", kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12, experts=4, experts_per_token=2, router="sigmoid"
    ),
}  # fmt: skip
PROMPTS = [[5, 9, 3, 7, 1, 2], [4], [8, 8, 1]]


def build(family: str) -> Transformer:
    config = derive_model(ModelConfig(layers=2, hidden=32, heads=4, vocab=40, **FAMILIES[family]), 32)
    model = Transformer(config).double().eval()
    initialize(model, config, 0)
    for p in model.parameters():  # a random model that is sure of itself, so that no two tokens are near ties
        if p.ndim > 1:
            p.data *= 8
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(0.8, top_k=10, top_p=0.9, seed=3)], ids=["greedy", "sampled"]
)
def test_cache_and_company_change_no_token(family: str, sampling: Sampling) -> None:
    model = build(family)
    cached = generate(model, PROMPTS, 12, sampling)
    assert cached == generate(model, PROMPTS, 12, sampling, use_cache=False)
    assert all(len(row) == 12 for row in cached)
    assert len({tuple(row) for row in cached}) == 3
    # The first row draws from the same generator whether it has company or not.
    assert generate(model, PROMPTS[:1], 12, sampling) == cached[:1]


def test_greedy_takes_the_likeliest_token_each_time() -> None:
    model = build("llama")
    made = generate(model, PROMPTS[:1], 8, Sampling(0))[0]
    text = list(PROMPTS[0])
    for token in made:
        assert token == int(model(torch.tensor([text])).result[0, -1].argmax())
        text.append(token)


def test_draws_follow_the_distribution_that_temperature_and_cuts_leave() -> None:
    logits = torch.tensor([0.1, 2.0, 1.0, -1.0, 1.5])
    source = torch.Generator().manual_seed(0)

    def share(sampling: Sampling) -> torch.Tensor:
        drawn = torch.tensor([pick(logits, sampling, source) for _ in range(1500)])
        return drawn.bincount(minlength=5) / 1500

    warm = (logits.double() / 0.7).softmax(0)
    torch.testing.assert_close(share(Sampling(0.7)).double(), warm, rtol=0, atol=0.05)
    top2 = torch.zeros(5).double()
    top2[[1, 4]] = logits[[1, 4]].double().softmax(0)
    torch.testing.assert_close(share(Sampling(1.0, top_k=2)).double(), top2, rtol=0, atol=0.05)
    # In order of likelihood 0.43, 0.26, 0.16, …: 0.6 is reached by two tokens, 0.75 by three.
    assert (share(Sampling(1.0, top_p=0.6)) > 0).tolist() == [False, True, False, False, True]
    assert (share(Sampling(1.0, top_p=0.75)) > 0).tolist() == [False, True, True, False, True]
    assert share(Sampling(1e-320)).tolist() == [0, 1, 0, 0, 0]
    for bad in ([math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]):
        with pytest.raises(UserError, match="not finite"):
            pick(torch.tensor(bad), Sampling(1.0), source)


def test_seeds_repeat_and_differ() -> None:
    model = build("llama")
    first, again, other = (generate(model, PROMPTS, 12, Sampling(1.5, seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_a_finished_row_stops_and_the_others_go_on() -> None:
    model = build("llama")
    free = generate(model, PROMPTS, 10, Sampling(0))
    stopped = generate(model, PROMPTS, 10, Sampling(0), finished=lambda made: made[-1] == free[0][3])
    assert stopped[0] == free[0][: free[0].index(free[0][3]) + 1]
    assert [len(row) for row in stopped] != [10, 10, 10]


def test_more_than_the_learned_positions_is_refused() -> None:
    with pytest.raises(UserError, match="ask for at most 26"):
        generate(build("gpt"), PROMPTS, 30, Sampling(0))
    with pytest.raises(UserError, match="empty prompt"):
        generate(build("llama"), [[]], 3, Sampling(0))


def test_the_command_continues_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source.txt"  # not the built-in corpus, which is another with every Python
    source.write_text("def one(): return 1\n" * 40)
    assert main(["data", "build", str(source), "--out", str(tmp_path / "set")]) == 0
    run = run_from_dict(
        dict(
            name="g",
            model=dict(layers=1, hidden=16, heads=2, vocab=257),
            data=dict(sets=[str(tmp_path / "set")]),
            train=dict(steps=2, seq_len=32, global_batch=2, eval_every=0, device="cpu"),
        )
    )
    train(run, tmp_path / "run")
    capsys.readouterr()
    base = [
        "generate",
        str(tmp_path / "run"),
        "--prompt",
        "def",
        "--prompt",
        "a longer one",
        "--max-tokens",
        "7",
        "--json",
    ]
    results = []
    for extra in (
        ["--temperature", "0"],
        ["--temperature", "0", "--no-cache"],
        ["--temperature", "0", "--dtype", "float64"],
    ):
        assert main(base + extra) == 0
        results.append(json.loads(capsys.readouterr().out)["samples"])
    assert results[0] == results[1]
    assert [s["prompt"] for s in results[0]] == ["def", "a longer one"]
    assert all(len(s["tokens"]) == 7 for s in results[0])
    text = results[0][0]["text"]
    assert main([*base[:4], "--max-tokens", "7", "--temperature", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"def{text}\n"
    assert main([*base, "--temperature", "0", "--stop", text[2:4]]) == 0
    cut = json.loads(capsys.readouterr().out)["samples"][0]
    assert cut["ended_by"] == "stop"
    assert cut["text"] == text[: text.index(text[2:4])]
