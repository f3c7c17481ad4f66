"""The section of a run that says how a model is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.run.sections.declare import key

MOST_REQUESTS = 1_000_000
"""Most requests of a planned load, which are simulated one by one."""


@dataclass(frozen=True)
class ServeConfig:
    """How a trained model answers requests, and how these come. A length is a number, "U(100,1024)" or a file with one a line."""

    rate: float = key(0.0, "requests per second, at random times (Poisson); 0: see concurrency", least=0)
    concurrency: int = key(0, "clients; each sends its next request after the answer to the last", least=0)
    requests: int = key(
        0, "requests in the planned load; 0: enough to reach the steady state", least=0, most=MOST_REQUESTS
    )
    input_tokens: str = key("512", "lengths of prompts")
    output_tokens: str = key("128", "lengths of answers")
    ttft_ms: float = key(0.0, "goodput: limit on the time to first token, in ms; 0: none", least=0)
    tpot_ms: float = key(0.0, "goodput: limit on the time per output token after the first, in ms; 0: none", least=0)
    max_sequences: int = key(512, "most sequences that run at once", least=1)
    max_step_tokens: int = key(8192, "most tokens per step, prompts and answers together", least=1)
    page_tokens: int = key(64, "tokens per page of the KV cache", least=1)
    kv_dtype: Literal["auto", "bfloat16", "float16", "float32", "float64", "fp8"] = key(
        "auto", "dtype of the KV cache; auto: that of the computation"
    )
    weights: Literal["auto", "bfloat16", "fp8", "int8", "int4"] = key(
        "auto", "how matrices are stored; auto: as in the folder, or else in the dtype of the computation"
    )
    head: Literal["auto", "int8"] = key(
        "auto",
        "how the output head is stored; auto: in the dtype of the computation; int8: half the bytes to read in decoding",
    )
    prefix_cache: bool = key(True, "keep the pages of prompts for later requests while there is room")
    preemption: Literal["recompute", "swap"] = key(
        "recompute",
        "when pages run out, drop a request's pages and recompute them later, or swap them to host memory",
    )
    swap_gib: float = key(4.0, "swap: GiB of host memory for pages", least=0)
    invariant: bool = key(False, "batch invariance: a request gets the same bits whatever else is in the batch; slower")
    memory_gib: float = key(0.0, "GiB for the KV cache; 0: all memory that the plan leaves free", least=0, most=1e6)
    speculate: Literal["none", "ngram", "draft"] = key(
        "none",
        "speculative decoding: a step verifies several guessed tokens; ngram: guess what followed the same tokens before; draft: "
        "guess with a small model; answers stay the same",
    )
    draft: str = key("", "draft: checkpoint or run folder of the small model; a plan also takes a preset")
    draft_tokens: int = key(4, "tokens per guess", least=1)
    ngram_min: int = key(2, "ngram: shortest match with earlier tokens, in tokens", least=1)
    ngram_max: int = key(4, "ngram: longest match that is tried when several places match", least=1)
    acceptance: float = key(
        0.7, "for the plan: probability that a guessed token is right when those before it are", least=0, most=1
    )
