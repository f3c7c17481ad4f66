"""Serving: limits that physics sets, what each axis divides, and the errors on published rows."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest

from shardwise.hardware import make_cluster, memory_seconds
from shardwise.hardware.chips import ITEM_BYTES
from shardwise.plan.cost.flops import forward_flops, parameters
from shardwise.plan.published.rows import published
from shardwise.plan.published.serving_rows import serving_of_row
from shardwise.plan.published.validate import Prediction, predict
from shardwise.plan.serving.cost import (
    Serving,
    Shape,
    busiest_share,
    cache_bytes,
    capacity,
    experts_hit,
    layer_cost,
    memory_by_owner,
    weight_bytes,
)
from shardwise.plan.serving.engines import ENGINES, FORMATS
from shardwise.plan.serving.inference import constants_of, fitted_inference
from shardwise.plan.serving.loads import Load, prepare, quantities
from shardwise.run import PRESETS, ModelConfig
from shardwise.run.derive import derive_model

LLAMA = derive_model(ModelConfig(**PRESETS["llama3-8b"]), 8192)


def answer(
    model: ModelConfig = LLAMA, cluster: Any = None, tensor: int = 1, pipeline: int = 1, batch: int = 1, input_len: int = 1024,
    output_len: int = 128, precision: str = "bf16",
) -> dict[str, Any]:  # fmt: skip
    """A batch that starts and ends together, on TensorRT-LLM."""
    form, cache = FORMATS[precision], 1.0 if precision in ("fp8", "fp4") else 2.0
    serving = Serving(
        model, cluster or make_cluster("h100", 1), ENGINES["trtllm"], form, form, cache, tensor, pipeline,
        expert_tensor=tensor,
    )  # fmt: skip
    prepared = prepare(serving, Load("static", batch, input_len, output_len))
    found: dict[str, Any] = quantities(prepared, constants_of(serving, fitted_inference()["effects"]))
    return found | {"memory": memory_by_owner(serving, batch, input_len, output_len)}


@pytest.fixture(scope="module")
def predictions() -> dict[bool, list[Prediction]]:
    rows = published("inference")
    return {leave_out: [predict(row, leave_out=leave_out) for row in rows] for leave_out in (False, True)}


@pytest.mark.parametrize("chip", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_a_step_takes_at_least_the_reading_of_its_weights(chip: str, tensor: int) -> None:
    cluster = make_cluster(chip, 1)
    read = 2 * (parameters(LLAMA).total - parameters(LLAMA).embedding)
    found = answer(cluster=cluster, tensor=tensor)
    assert read / tensor / cluster.chip.hbm < found["tpot"] < 4 * read / tensor / cluster.chip.hbm + 3e-3


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_prompt_takes_at_least_its_operations(precision: str) -> None:
    cluster = make_cluster("h100", 1)
    head = 2.0 * LLAMA.vocab * LLAMA.hidden  # only the last position meets it
    flops = 8 * 4096 * (forward_flops(LLAMA, 4096) - head)
    found = answer(cluster=cluster, batch=8, input_len=4096, precision=precision)
    least = flops / cluster.chip.speed({"bf16": "bfloat16"}.get(precision, precision))
    assert least < found["ttft"] < 3 * least


def test_time_grows_with_prompt_answer_and_batch() -> None:
    base = answer()
    for more in (dict(input_len=4096), dict(output_len=256), dict(batch=16)):
        assert answer(**more)["latency"] > base["latency"]
    assert answer(batch=16)["output_tokens_per_s"] > 8 * base["output_tokens_per_s"]


def test_latency_is_the_first_token_and_the_others() -> None:
    found = answer(output_len=100)
    assert found["latency"] == pytest.approx(found["ttft"] + 99 * found["tpot"])


def test_tensor_ranks_and_stages_divide_weights_and_cache() -> None:
    whole, cut, staged = answer(batch=4), answer(batch=4, tensor=8), answer(batch=4, pipeline=2)
    for owner in ("weights", "kv_cache"):
        assert whole["memory"][owner] == pytest.approx(8 * cut["memory"][owner], rel=1e-3)
        assert whole["memory"][owner] == pytest.approx(2 * staged["memory"][owner], rel=1e-3)
    assert whole["memory"]["weights"] == pytest.approx(2 * parameters(LLAMA).total, rel=1e-3)
    assert whole["memory"]["kv_cache"] == 4 * (1024 + 128) * 32 * 2 * 8 * 128 * 2


def test_more_ranks_than_key_heads_copy_them() -> None:
    assert (
        answer(tensor=8)["memory"]["kv_cache"]
        == answer(cluster=make_cluster("h100", 2), tensor=16)["memory"]["kv_cache"]
    )


def test_narrow_weights_are_read_faster_but_not_multiplied_faster() -> None:
    steps = [answer(cluster=make_cluster("a100", 1), precision=p)["tpot"] for p in ("bf16", "int8", "int4g32")]
    assert steps == sorted(steps, reverse=True)
    prompts = [answer(cluster=make_cluster("a100", 1), batch=8, precision=p)["ttft"] for p in ("bf16", "int8")]
    assert prompts[1] > 0.9 * prompts[0]


def test_experts_that_a_batch_touches() -> None:
    assert experts_hit(128, 8, 1) == pytest.approx(8)
    assert experts_hit(128, 8, 2) == pytest.approx(16 - 8 * 8 / 128)
    assert experts_hit(128, 8, 1e4) == pytest.approx(128)


@pytest.mark.parametrize("ranks", [4, 16])
def test_skewed_experts_against_tokens_that_choose(ranks: int) -> None:
    """Popularities are drawn, and each token chooses its experts by them: fewer experts are touched, and one rank has more rows."""
    skew, experts, tokens, draws = 1.0, 128, 64, 400
    generator = np.random.default_rng(0)
    touched, busiest = [], []
    for _ in range(draws):
        popularity = np.exp(skew * generator.standard_normal(experts))
        chances = np.minimum(4 * popularity / popularity.sum(), 1.0)
        touched.append((generator.random((tokens, experts)) < chances).any(axis=0).sum())
        rows = chances.reshape(ranks, -1).sum(axis=1)
        busiest.append(rows.max() / rows.mean())
    assert experts_hit(experts, 4, tokens, skew) == pytest.approx(np.mean(touched), rel=0.03)
    assert experts_hit(experts, 4, tokens, skew) < 0.9 * experts_hit(experts, 4, tokens)
    assert busiest_share(experts, ranks, skew) == pytest.approx(np.mean(busiest), rel=0.1)
    assert busiest_share(experts, 1, skew) == busiest_share(experts, ranks, 0.0) == 1.0


@pytest.mark.parametrize("chosen", [2, 8])
def test_experts_that_get_every_token_are_equally_popular(chosen: int) -> None:
    model = derive_model(ModelConfig(**PRESETS["mixtral-8x7b"] | dict(experts_per_token=chosen)), 8192)
    form, at = FORMATS["bf16"], Shape(64, 1, 1024, decode=True)

    def experts(skew: float) -> float:
        engine = replace(ENGINES["trtllm"], expert_skew=skew)
        serving = Serving(model, make_cluster("h100", 1), engine, form, form, tensor=4, expert=4)
        return layer_cost(serving, at, routed=True).seconds["experts"]

    assert (experts(1.0) == experts(0.0)) == (chosen == 8)


def test_inputs_in_4_bits_have_a_kernel_before_each_gemm() -> None:
    def elementwise(precision: str) -> float:
        form = FORMATS[precision]
        s = Serving(LLAMA, make_cluster("b200", 1), ENGINES["vllm"], form, form)
        return layer_cost(s, Shape(4, 1, 1024, True), routed=False).seconds["elementwise"]

    chip, m = make_cluster("b200", 1).chip, LLAMA
    widths = (m.hidden, m.heads * m.head_dim, m.hidden, m.ffn)  # of the inputs of qkv, out, up and down
    kernels = sum(memory_seconds(chip, 4 * width * (2 + ITEM_BYTES["fp4"])) for width in widths)
    assert elementwise("fp4") - elementwise("fp8") == pytest.approx(kernels)


def test_a_cache_has_the_width_that_its_engine_gives_it() -> None:
    rows = [r for r in published("inference") if r["precision"] == "fp8" and not r["software"].get("kv_dtype")]
    widths = {(r["software"]["framework"], serving_of_row(r)[0].cache_bytes) for r in rows}
    assert widths == {("tensorrt-llm", 1.0), ("vllm", 2.0), ("sglang", 2.0)}
    assert serving_of_row(rows[0] | {"software": {"framework": "vllm", "kv_dtype": "fp8"}})[0].cache_bytes == 1.0


def test_a_mixture_reads_only_the_experts_it_touches() -> None:
    mixture = derive_model(ModelConfig(**PRESETS["mixtral-8x7b"]), 4096)
    cluster = make_cluster("h200", 1)
    read = 2 * (parameters(mixture).active - parameters(mixture).embedding)
    step = answer(model=mixture, cluster=cluster, tensor=2)["tpot"]
    assert read / 2 / cluster.chip.hbm < step < parameters(mixture).total / cluster.chip.hbm


def test_memory_decides_how_many_run() -> None:
    row = next(row for row in published("inference") if row["workload"]["batch"] is None)
    serving, load, _ = serving_of_row(row)
    few, many = capacity(serving, 8192, 1024), capacity(serving, 512, 512)
    assert 1 <= few < many
    assert few * cache_bytes(serving, 9216) + sum(weight_bytes(serving).values()) < serving.chip.memory
    assert load.requests


def test_latent_attention_keeps_one_small_row_for_all_heads() -> None:
    row = next(row for row in published("inference") if row["model"]["name"] == "DeepSeek-V3")
    serving = serving_of_row(row)[0]
    assert cache_bytes(serving, 100) == 61 * 100 * (512 + 64) * serving.cache_bytes


def test_axes_that_share_ranks_are_counted_once() -> None:
    rows = {row["id"]: row for row in published("inference")}
    twice = next(row for name, row in rows.items() if "b200_sxm_sglang_fp4_agg_1024x1024_c4_tp4_ep4" in name)
    assert twice["hardware"]["gpus"] == 16
    serving, _, assumed = serving_of_row(twice)
    assert (serving.tensor, serving.expert, serving.cluster.devices) == (4, 4, 4)
    assert len(assumed) == 1


def test_what_a_row_leaves_out_makes_it_unsupported() -> None:
    row = published("inference")[0]
    for change in (
        lambda r: r["parallel"].update(tp=None),
        lambda r: r.update(precision="fp3"),
        lambda r: r["workload"].update(input_len=None),
        lambda r: r.update(measured={}),
        lambda r: r["hardware"].update(chip="abacus"),
    ):
        changed = deepcopy(row)
        change(changed)
        found = predict(changed)
        assert not found.supported
        assert found.reason


def test_figures_that_exclude_each_other_are_refused() -> None:
    row = next(r for r in published("inference") if "gpt_oss_120b_h100_sxm_vllm_fp4_agg_1024x1024_c512" in r["id"])
    assert "exclude each other" in predict(row).reason
    # By hand: of 512 clients 512 x 5.738 / (23.793 + 5.738) decode at a time; 114.7e9 weights of experts in 4.5 bits are on two
    # devices of 3.35 TB/s, and 99 tokens of 4 experts each touch more than half of 128 however uneven the choice may be.
    assert 114.7e9 * 4.5 / 8 / 2 / 2 / 3.35e12 > 4.8e-3
    slower = deepcopy(row)
    slower["measured"]["tpot_ms"] = 15.0
    assert predict(slower).supported
    alone = deepcopy(row)  # a token without others touches 4 experts
    alone["note"] = "closed-loop concurrency=1"
    assert predict(alone).supported


def test_a_known_source_is_predicted_without_itself() -> None:
    row = published("inference")[0]
    assert row["group"] in fitted_inference()["without"]
    seen, unseen = (predict(row, leave_out=flag).predicted for flag in (False, True))
    assert seen != unseen
    assert predict(row | {"group": "another"}).supported


def test_every_format_has_a_speed_on_every_chip() -> None:
    for chip in ("v100", "a100", "h100", "b200"):
        for form in FORMATS.values():
            assert form.dtype(make_cluster(chip, 1).chip) in make_cluster(chip, 1).chip.peak


@pytest.mark.drawn(group="published")
def test_published_rows_stay_within_the_stated_error(predictions: dict[bool, list[Prediction]]) -> None:
    for leave_out, bound in ((False, 0.05), (True, 0.09)):
        supported = [p for p in predictions[leave_out] if p.supported]
        assert len(supported) == len(published("inference")) - 1  # whose figures exclude each other
        assert median(abs(p.error or 0) for p in supported) < bound
    held = [p.low <= p.measured <= p.high for p in predictions[True] if p.low and p.measured and p.high]
    assert 0.7 <= sum(held) / len(held) <= 0.9
    sizes = [abs(p.memory_error) for p in predictions[True] if p.memory_error is not None]
    assert len(sizes) == 11
    assert median(sizes) < 0.1
