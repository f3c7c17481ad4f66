"""Serving engines and weight formats: the facts that change the cost of a pass.

What an engine does is stated here. How well it does it is fitted, in `fitted.json` under its family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.hardware.chips import ITEM_BYTES, Chip
from shardwise.run import ModelConfig
from shardwise.run.weights import QUANTIZED, bytes_a_weight


@dataclass(frozen=True)
class Engine:
    """Facts about a serving engine."""

    name: str
    family: str
    """Engines of a family share fitted constants."""
    graphs: bool = True
    """Whether a decode step is one CUDA graph, so that the host launches no single kernels."""
    launch: float = 6e-6
    """Host seconds to launch a kernel outside graphs."""
    wait: float = 1e-6
    """Seconds that ranks wait for each other at a collective, for each doubling of the ranks."""
    step: float = 1e-3
    """Seconds of a step outside the network: scheduling, sampling, returning tokens."""
    one_shot: bool = True
    """Whether one kernel that reads all peers does small all-reduces, instead of NCCL."""
    attention: Literal["unfused", "flash2", "flash3"] = "flash3"
    kernels: float = 14.0
    """Kernels of a dense layer."""
    shares_steps: bool = True
    """Whether a new prompt is prefilled in the steps that decode, so that both read the weights once."""
    kv_share: float = 0.9
    """Share of the memory left besides weights and buffers that the KV cache takes."""
    kv_whole: bool = True
    """A sequence starts only when its KV cache fits at its final length; otherwise when it fits at its average length."""
    max_batch: int = 2048
    max_tokens: int = 8192
    """Prompt tokens in one step."""
    fixed: float = 2.0
    """GiB taken by driver, libraries and workspaces."""
    buffers: float = 12.0
    """Bytes that a pass holds at a time, in copies of the residual stream."""
    arrive: float = 0.0
    """Seconds a request spends before the engine sees it: network, tokenizer, queues between processes."""
    tables_apart: bool = False
    """Whether embedding and head are stored twice even when they are tied."""
    bf16_head: bool = True
    """Whether embedding and head stay in 16 bits when the other weights have fewer."""
    narrow_cache: bool = True
    """Whether the KV cache has 8 bits when weights have 8 or 4, unless a row states its dtype: TensorRT-LLM uses the dtype the
    checkpoint was quantized for; the `auto` of vLLM and SGLang is the model's own dtype."""
    expert_skew: float = 1.0
    """Standard deviation of the logarithm of how often experts are chosen: real text prefers some. Published MoE models, each
    predicted without its source, are predicted best with 1 to 1.6; this minimum is too wide for the value to be fitted."""


ENGINES: dict[str, Engine] = {
    e.name: e
    for e in (
        # C++, fused kernels, NCCL; one thread per GPU launches all kernels, so ranks drift apart at each all-reduce.
        Engine("fastertransformer", "fastertransformer", graphs=False, launch=4e-6, wait=12e-6, step=0.5e-3,
               one_shot=False, attention="unfused", kernels=12.0, shares_steps=False, fixed=2.6, buffers=20.0, tables_apart=True),
        # PyTorch compiled with CUDA graphs, NCCL inside them; only sampling happens between steps.
        Engine("gpt-fast", "gpt-fast", step=0.15e-3, one_shot=False, attention="flash2", kernels=10.0,
               shares_steps=False, bf16_head=False),
        Engine("trtllm", "engine", step=1e-3, arrive=30e-3),
        Engine("vllm", "engine", step=1.5e-3, arrive=30e-3, kv_whole=False, kv_share=0.9, max_batch=1024,
               narrow_cache=False),
        Engine("sglang", "engine", step=1e-3, arrive=30e-3, kv_whole=False, kv_share=0.85, shares_steps=False,
               narrow_cache=False),
    )
}  # fmt: skip


OURS = Engine("shardwise", "engine", attention="flash2", kernels=8.0, kv_whole=False, expert_skew=0.0)
"""This project's engine. Its loads are simulated and its steps were measured (`step_time.py`), so only the operations of its passes
are stated here."""


@dataclass(frozen=True)
class Format:
    """How weights are stored, and the dtype of their GEMMs."""

    name: str
    bytes: float
    """Per weight, including its scales."""
    multiply: str
    low_precision: str = ""
    """The dtype of the GEMMs instead where the chip supports it."""
    reach: float = 1.0
    """Share of the memory bandwidth reached by kernels that have to dequantize the weights first."""

    @property
    def label(self) -> str:
        """The name that runs and profiles use."""
        return next((word for word, name in STORED.items() if name == self.name), self.name)

    def dtype(self, chip: Chip) -> str:
        """The compute dtype of the GEMMs on a chip."""
        if self.low_precision in chip.peak:
            return self.low_precision
        return self.multiply if self.multiply in chip.peak else "float16"


STORED = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "int8": "int8", "int4": "int4g32",
}  # fmt: skip
"""The format of each value of `serve.weights` and `train.dtype`."""
FORMATS = {
    f.name: f
    for f in (
        Format("fp64", 8.0, "float64"),
        Format("fp32", 4.0, "float32"),
        Format("fp16", 2.0, "float16"),
        Format("bf16", 2.0, "bfloat16"),
        Format("int8", 1.0, "bfloat16", reach=0.9),  # weight-only: GEMMs in 16 bits
        Format("int4g32", 0.625, "bfloat16", reach=0.8),  # a scale and a zero point of two bytes each per 32 weights
        Format("fp8", 1.0, "bfloat16", "fp8"),
        Format("fp4", ITEM_BYTES["fp4"], "bfloat16", "fp4"),
    )
}


def stored_format(model: ModelConfig, weights: str, dtype: str) -> Format:
    """The format of a model that computes in `dtype` and stores its matrices as `weights`."""
    form = FORMATS[STORED[dtype if weights == "auto" else weights]]
    return replace(form, bytes=bytes_a_weight(model, weights, dtype)) if weights in QUANTIZED else form
