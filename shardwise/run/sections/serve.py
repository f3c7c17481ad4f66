"""The section of a run that says how a model is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.run.sections.declare import key


@dataclass(frozen=True)
class ServeConfig:
    """How a trained model answers requests, and how these come. A length is a number, "U(100,1024)" or a file with one a line."""

    rate: float = key(0.0, "requests a second that come, at random moments (Poisson); 0: see concurrency", least=0)
    concurrency: int = key(0, "clients that each send their next request when the last is answered", least=0)
    requests: int = key(0, "requests of the load that is planned; 0: as many as show the steady state", least=0)
    input_tokens: str = key("512", "lengths of prompts")
    output_tokens: str = key("128", "lengths of answers")
    ttft_ms: float = key(0.0, "limit on the time to the first token that goodput counts; 0: none", least=0)
    tpot_ms: float = key(0.0, "limit on the time for each further token that goodput counts; 0: none", least=0)
    max_sequences: int = key(512, "sequences that run at once", least=1)
    max_step_tokens: int = key(8192, "tokens that one step computes, of prompts and answers together", least=1)
    page_tokens: int = key(64, "tokens whose keys and values a page of memory holds", least=1)
    kv_dtype: Literal["auto", "bfloat16", "float16", "float32", "float64", "fp8"] = key(
        "auto", "of keys and values; auto: that of the arithmetic"
    )
    weights: Literal["auto", "bfloat16", "fp8", "int8", "int4"] = key(
        "auto", "how matrices are stored; auto: the dtype of the arithmetic, or what the folder holds"
    )
    head: Literal["auto", "int8"] = key(
        "auto",
        "how the head is stored; auto: the dtype of the arithmetic; int8: half the bytes that a token by itself reads of it",
    )
    prefix_cache: bool = key(
        True, "prefix cache: keep the pages of prompts for later requests, as long as there is room"
    )
    preemption: Literal["recompute", "swap"] = key(
        "recompute",
        "what happens to pages that are taken back: their tokens are recomputed, or moved to the host's memory",
    )
    swap_gib: float = key(4.0, "swap: GiB of the host's memory for pages", least=0)
    invariant: bool = key(False, "the same bits for a request whatever else is in the batch, at some cost in speed")
    memory_gib: float = key(0.0, "GiB for keys and values; 0: what the plan leaves of the device's memory", least=0)
    speculate: Literal["none", "ngram", "draft"] = key(
        "none",
        "guess tokens that a step then verifies together: ngram, what followed the same tokens before; draft, a small model's; "
        "answers stay the same",
    )
    draft: str = key("", "draft: the small model, a checkpoint or run folder; for a plan also a preset")
    draft_tokens: int = key(4, "tokens guessed at a time", least=1)
    ngram_min: int = key(2, "ngram: the fewest latest tokens that have to have come before", least=1)
    ngram_max: int = key(4, "ngram: the most of them that are compared, where the fewest came more than once", least=1)
    acceptance: float = key(
        0.7, "what a plan assumes: the probability that a guess is right, where all before it were", least=0, most=1
    )
