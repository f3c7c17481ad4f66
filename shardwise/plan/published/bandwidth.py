"""Databricks' serving figures: the share of memory bandwidth that decode reaches, the time to the first token, and the gain of
static batches ("LLM Inference Performance Engineering: Best Practices", 12 October 2023).

None of these took part in any fit. Model bandwidth utilization (MBU) is the bytes that a token reads (parameters and KV cache) over
the bytes that the memory could have read in the time of a token.
"""

from __future__ import annotations

import math

from shardwise.hardware import make_cluster
from shardwise.plan.cost.flops import parameters
from shardwise.plan.published.exhibit import Exhibit, Line
from shardwise.plan.serving import inference
from shardwise.plan.serving.cost import Serving, cache_bytes
from shardwise.plan.serving.engines import ENGINES, FORMATS
from shardwise.plan.serving.loads import Load, prepare, quantities
from shardwise.run import ModelConfig, run_from_dict

POST = "Databricks (MosaicML) 2023, LLM Inference Performance Engineering"
PROMPT, ANSWER = 512, 64

BANDWIDTH = (
    # chip, GPUs, MBU of Llama 2 70B with one sequence; TensorRT-LLM
    ("a100-sxm-40g", 4, 0.55),
    ("h100-sxm", 2, 0.60),
)
FIRST = (
    # model, chip, GPUs, milliseconds to the first token of one prompt; TensorRT-LLM
    ("MPT-7B", "a100-sxm-40g", 1, 46.0),
    ("MPT-7B", "a100-sxm-40g", 2, 34.0),
    ("MPT-7B", "a100-sxm-40g", 4, 26.0),
    ("Llama 2 70B", "a100-sxm-40g", 4, 154.0),
    ("Llama 2 70B", "a100-sxm-40g", 8, 114.0),
)
BATCHES = {
    # GPUs: requests per second of MPT-7B by batch; FasterTransformer
    1: {1: 0.9, 4: 3.2, 8: 5.3, 16: 8.0, 32: 10.5, 64: 12.5},
    2: {1: 1.3, 4: 3.0, 8: 5.5, 16: 9.5, 32: 14.5, 64: 17.0, 128: 22.0},
    4: {1: 1.7, 4: 6.2, 8: 11.5, 16: 18.0, 32: 25.0, 64: 33.0, 128: 36.5},
}


def _model(name: str) -> ModelConfig:
    """A model of the post. MPT's attention biases cost next to nothing here and are left out."""
    shapes = {
        "MPT-7B": dict(
            hidden=4096, layers=32, heads=32, ffn=16384, vocab=50432, activation="gelu", tied_embeddings=True
        ),
        "Llama 2 70B": dict(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=32000),
    }
    return run_from_dict(dict(model=shapes[name])).model


def _serving(name: str, chip: str, devices: int, engine: str) -> Serving:
    half = FORMATS["fp16"]
    cluster = make_cluster(chip, 1, 8)
    return Serving(_model(name), cluster, ENGINES[engine], half, half, cache_bytes=2.0, tensor=devices)


def _found(s: Serving, batch: int) -> dict[str, float]:
    content = inference.fitted_inference()
    load = Load("static", batch, PROMPT, ANSWER)
    return quantities(prepare(s, load), inference.constants_of(s, content["effects"]))


def _line(label: str, published: float, planned: float) -> Line:
    width = math.exp(inference.fitted_inference()["interval"])
    return Line(label, published, planned, planned / width, planned * width)


def model_bandwidth() -> Exhibit:
    lines = []
    for chip, devices, figure in BANDWIDTH:
        s = _serving("Llama 2 70B", chip, devices, "trtllm")
        # A rank caches the keys and values of its own heads, and all ranks read theirs at once.
        read = 2.0 * parameters(s.model).total + devices * cache_bytes(s, PROMPT + ANSWER / 2)
        reached = read / (_found(s, 1)["tpot"] * devices * s.chip.hbm)
        lines.append(_line(f"Llama 2 70B, {devices} x {chip}", figure, reached))
    said = (
        "Parameters and cache over what the memory could have read in the time of a token; one sequence, prompts of 512 tokens. "
        "The sentence with the two figures names no model; Llama 2 70B is assumed."
    )
    return Exhibit("Bandwidth that decoding reaches", POST, "share of the memory's bandwidth", lines, said)


def first_tokens() -> Exhibit:
    lines = [
        _line(f"{name}, {devices} x {chip}", figure, 1e3 * _found(_serving(name, chip, devices, "trtllm"), 1)["ttft"])
        for name, chip, devices, figure in FIRST
    ]
    return Exhibit("Time to the first token", f"{POST}, Table 1", "ms, one prompt of 512 tokens", lines)


def static_batches() -> Exhibit:
    lines = []
    for devices, figures in BATCHES.items():
        s = _serving("MPT-7B", "a100-sxm-40g", devices, "fastertransformer")
        for batch, figure in figures.items():
            planned = _found(s, batch)["output_tokens_per_s"] / ANSWER
            lines.append(_line(f"MPT-7B, {devices} x A100, batch {batch}", figure, planned))
    said = (
        "Prompts of 512 tokens, answers of 64. The post does not say which A100; that of 40 GB, as elsewhere in it, is assumed. "
        "Two are slower than one with 4 sequences: links between pairs of GPUs differ from server to server, says the post."
    )
    return Exhibit("What static batches gain", f"{POST}, Table 2", "requests a second", lines, said)
