"""Small models that are sure of themselves, engines for them, and what they must answer: by the forward pass without a cache."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from shardwise.model import Transformer, initialize
from shardwise.run import ModelConfig
from shardwise.run.derive import derive_model
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.engine import Engine
from shardwise.serve.request import Output, Request
from shardwise.serve.runner import Launched, Recorded, Row, Runner

LATENT = dict(attention="latent", kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12)
EXPERTS = dict(experts=4, experts_per_token=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(kv_heads=2),
    "gpt": dict(norm="layernorm", activation="gelu", bias="all", position="learned", tied_embeddings=True),
    "bloom": dict(norm="layernorm", activation="gelu", bias="all", position="alibi", embedding_norm=True),
    "window": dict(sliding_window=4),
    "qwen": dict(kv_heads=2, qk_norm=True, bias="qkv", tied_embeddings=True),
    "mixtral": EXPERTS | dict(router="softmax"),
    "deepseek": LATENT | EXPERTS | dict(router="sigmoid", shared_experts=1, dense_layers=1, q_rank=12),
    "parallel": dict(parallel_block=True, activation="geglu"),
}
VOCAB, LONGEST = 40, 64
LARGER: dict[str, dict[str, Any]] = {
    "deep": dict(layers=7, heads=8, kv_heads=2, head_dim=8),
    "deep experts": dict(
        layers=6, heads=8, experts=8, experts_per_token=3, router="sigmoid", shared_experts=1, dense_layers=1
    )
    | LATENT,
}
"""For many ranks: a layer for each of eight stages, a head for each of eight ranks."""


@functools.cache
def model_of(family: str, dtype: torch.dtype = torch.float64) -> Transformer:
    sizes = dict(layers=2, hidden=32, heads=4, vocab=VOCAB) | (FAMILIES | LARGER)[family]
    config = derive_model(ModelConfig(**sizes), LONGEST)
    with torch.inference_mode(False):  # whoever asks first: a test may change the weights
        model = Transformer(config).eval()
        initialize(model, config, 0)
        for parameter in model.parameters():  # so that no two tokens are near ties
            parameter.requires_grad_(False)
            if parameter.ndim > 1:
                parameter *= 8
        return model.to(dtype)


class ReplayingRunner(Runner):
    """A runner whose steps are replayed as a GPU's are: into the same memory each time, of inputs of a few sizes. Only what a CUDA
    graph would do is done by calling the functions again."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.records = True
        self.shared_sizes = sorted({*self.shared_sizes, 3, 8, 32, 64})

    def capture(
        self, compute: Callable[[], tuple[torch.Tensor, torch.Tensor]], inputs: torch.Tensor, hidden: torch.Tensor
    ) -> Recorded:
        logits, tokens = (made.clone() for made in compute())

        def replay() -> None:
            for mine, made in zip((logits, tokens), compute(), strict=True):
                mine.copy_(made)
            # Of several tokens of a slot, a GPU may leave any: here, the first.
            self.sampler.last[inputs[0].flip(0).long()] = tokens.flip(0).clamp(min=0)

        return replay, inputs, hidden, logits, tokens

    def launch(self, rows: list[Row], masks: np.ndarray | None = None, keep_logits: bool = False) -> Launched:
        made = super().launch(rows, masks, keep_logits)
        made.tokens = None if made.tokens is None else made.tokens.clone()  # as a GPU's are copied to the host
        return made


@functools.cache
def draft_of(family: str, dtype: torch.dtype = torch.float64, noise: float = 0.1) -> Transformer:
    """A model that mostly says what the family's does."""
    with torch.inference_mode(False):
        model = copy.deepcopy(model_of(family, dtype))
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            size = float(parameter.std()) if parameter.ndim > 1 else 0.0
            parameter += noise * size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
        return model


def draft_runner(
    family: str, settings: ServeConfig, pages: int, dtype: torch.dtype = torch.float64, replays: bool = False
) -> Runner | None:
    """The runner of the draft model, where the settings ask for one."""
    if settings.speculate != "draft":
        return None
    sequences = min(settings.max_sequences, settings.max_step_tokens)
    kind = ReplayingRunner if replays else Runner
    return kind(draft_of(family, dtype), pages, settings.page_tokens, sequences, LONGEST, dtype, drafts=1)


def engine_of(
    family: str, settings: ServeConfig, pages: int, dtype: torch.dtype = torch.float64, stages: int = 1, replays: bool = False,
    **more: Any,
) -> Engine:  # fmt: skip
    """With several stages as many steps are under way, though one device computes them all."""
    sequences = min(settings.max_sequences, settings.max_step_tokens)
    drafts = settings.draft_tokens if settings.speculate != "none" else 0
    kind = ReplayingRunner if replays else Runner
    runner = kind(model_of(family, dtype), pages, settings.page_tokens, sequences, LONGEST, dtype, drafts=drafts)
    runner.stages = stages
    return Engine(runner, settings, pages, draft=draft_runner(family, settings, pages, dtype, replays), **more)


@functools.cache
@torch.inference_mode()
def expected(
    family: str, prompt: tuple[int, ...], count: int, dtype: torch.dtype = torch.float64
) -> tuple[list[int], list[float]]:
    """The likeliest tokens one after the other, and their logprobs."""
    text, logprobs = list(prompt), []
    for _ in range(count):
        row = model_of(family, dtype)(torch.tensor([text])).result[0, -1].log_softmax(-1)
        text.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return text[len(prompt) :], logprobs


@functools.cache
@torch.inference_mode()
def expected_of_prompt(family: str, prompt: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[float]:
    """The logprobs of the tokens of a prompt behind its first."""
    rows = model_of(family, dtype)(torch.tensor([prompt])).result[0].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, prompt[1:], strict=False)]


def answers(engine: Engine, requests: Iterable[Request]) -> dict[tuple[str, int], list[Output]]:
    """All outputs of requests that come at once."""
    found: dict[tuple[str, int], list[Output]] = {}
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for output in engine.step():
            found.setdefault((output.request, output.index), []).append(output)
    return found


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]
