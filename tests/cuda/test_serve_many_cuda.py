"""Serving on ranks with GPUs: those that share one, over gloo, compute in float64 what one process computes; in bfloat16, by the
fused blocks, tokens and logprobs are close to that. With several GPUs, over NCCL, steps are recorded, and there are stages too."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from engines import LARGER, answers, model_of, tokens_of
from many_ranks import check_layout, share_of
from parallel_pool import RankPool

from shardwise.parallel.inference import Peers
from shardwise.run import LayoutConfig, Run
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.many import taking_part
from shardwise.serve.request import Request, Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LARGER["wide"] = dict(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, qk_norm=True)
"""With heads that the kernels are written for."""
LARGER["wide experts"] = LARGER["wide"] | dict(experts=4, experts_per_token=2, router="softmax", expert_ffn=64)
PROMPTS = [(5, 9, 3, 7, 1, 2), (4,), (8, 8, 1, 30, 2), (5, 9, 3, 7, 1, 3)]


def narrow(rank: int, family: str, axes: dict[str, int], store: str = "") -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs in bfloat16. With a store, over NCCL, each rank on a GPU of its own."""
    device = "cuda:0"
    layout = LayoutConfig(**axes)
    if store:
        import torch.distributed as dist

        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=layout.world)
    settings = ServeConfig(max_sequences=4, max_step_tokens=16, page_tokens=16)
    peers = Peers(layout)
    runner = share_of(family, layout, settings, 64, peers, torch.bfloat16, device)
    run = Run(model=runner.model.config, layout=layout, serve=settings)
    found: list[tuple[list[int], list[float]]] = []
    with taking_part(runner, run, 64, 0, "127.0.0.1", warm=True) as engine:
        if engine is not None:
            asked = [Request(str(n), prompt, 20, Sampling(0.0, logprobs=0)) for n, prompt in enumerate(PROMPTS)]
            plain = [Request(f"plain {n}", prompt, 20, Sampling(0.0)) for n, prompt in enumerate(PROMPTS)]
            made: Any = engine
            said = answers(made, asked) | answers(made, plain)
            for n in range(len(PROMPTS)):
                outputs = said[str(n), 0]
                assert tokens_of(outputs)[:4] == tokens_of(said[f"plain {n}", 0])[:4], "picked by the recorded step"
                found.append((tokens_of(outputs), [each.logprob for output in outputs for each in output.logprobs]))
    assert runner.fused == len(runner.model.layers) or "experts" in family
    return found


def check_close(family: str, found: list[tuple[list[int], list[float]]]) -> None:
    """The model itself, in float64, gives those tokens about those logprobs."""
    for prompt, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
        assert len(tokens) == 20
        rows = model_of(family)(torch.tensor([[*prompt, *tokens]])).result[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs).double(), wanted, rtol=0.1, atol=0.25)


@pytest.mark.parametrize(
    ("axes", "families"),
    [
        (dict(tensor=2), ["llama", "gpt", "mixtral", "deepseek"]),
        (dict(tensor=2, expert=2), ["mixtral", "deepseek"]),
        (dict(replicate=2), ["qwen"]),
    ],
    ids=str,
)
def test_ranks_that_share_a_gpu_answer_as_the_uncached_model(
    axes: dict[str, int], families: list[str], ranks: RankPool
) -> None:
    ranks.run(2, check_layout, axes, [(family, f"cuda {family}") for family in families], "cuda")


@pytest.mark.parametrize("family", ["wide", "wide experts"])
def test_fused_blocks_of_two_ranks_are_close_in_bfloat16(family: str, ranks: RankPool) -> None:
    check_close(family, ranks.run(2, narrow, family, dict(tensor=2))[0])


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("family", ["wide", "wide experts"])
@pytest.mark.parametrize("axes", [dict(tensor=4), dict(pipeline=4), dict(tensor=2, pipeline=2)], ids=str)
def test_over_nccl(axes: dict[str, int], family: str, ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_close(family, ranks.run(4, narrow, family, axes, f"{folder}/store")[0])
