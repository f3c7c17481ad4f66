"""Every family against `transformers`: a tiny random model imported gives the same logits, and exported gives
back the same tensors bit for bit, whole or sharded, in float32 and bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import (
    MODELS,
    assert_same_tensors,
    edit_config,
    our_logits,
    random_model,
    save,
    tensors,
    their_logits,
    tokens,
    transformers,
)

from shardwise.checkpoint.huggingface import from_hf, to_hf
from shardwise.checkpoint.weights import load_model
from shardwise.run import read_run


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = save(tmp_path / "hf", *MODELS[name])
    done = from_hf(tmp_path / "hf", tmp_path / "ours")
    assert done.parameters == sum(p.numel() for p in model.parameters())
    theirs = their_logits(model, tokens())
    difference = (our_logits(tmp_path / "ours", tokens()) - theirs).abs().max().item()
    print(f"{name}: {difference:.2e} of {theirs.abs().max():.2f}")
    assert difference <= 1e-4
    assert read_run(tmp_path / "ours" / "run.toml").train.dtype == "float32"

    to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back", shifted=name.startswith("gemma"))
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(again) is type(model)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(their_logits(again, tokens()), theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen3-moe", "mixtral", "deepseek"])
@pytest.mark.drawn(2)
def test_sharded_bfloat16(name: str, tmp_path: Path) -> None:
    model = random_model(*MODELS[name], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size="12KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2

    from_hf(tmp_path / "hf", tmp_path / "ours", file_bytes=10_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    run = read_run(tmp_path / "ours" / "run.toml")
    assert (run.name, run.train.dtype) == ("ours", "bfloat16")
    to_hf(tmp_path / "ours", tmp_path / "back", file_bytes=9_000)
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(tmp_path / "hf").keys()

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.dtype == torch.bfloat16
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(their_logits(again, tokens()), their_logits(before, tokens()))
    assert our_logits(tmp_path / "ours", tokens()).dtype == torch.bfloat16


def test_cast_on_export_spares_the_selection_bias(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["deepseek"])
    from_hf(tmp_path / "hf", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back", dtype=torch.float16)
    for name, tensor in tensors(tmp_path / "back").items():
        wanted = torch.float32 if name.endswith("e_score_correction_bias") else torch.float16
        assert tensor.dtype == wanted, name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "float16"


def test_load_model_casts_parameters_alone(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["deepseek"])
    from_hf(tmp_path / "hf", tmp_path / "ours")
    model, _ = load_model(tmp_path / "ours", dtype=torch.float64)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert not any(buffer.any() for name, buffer in model.named_buffers() if name.endswith("load"))


@pytest.mark.parametrize("name", ["llama3", "qwen2-yarn", "mixtral", "deepseek-yarn"])
def test_settings_in_the_words_of_transformers_4(name: str, tmp_path: Path) -> None:
    model = save(tmp_path / "hf", *MODELS[name])
    theirs = their_logits(model, tokens())
    rope = dict(model.config.rope_parameters)
    theta = rope.pop("rope_theta")
    scaling = {"type": rope.pop("rope_type")} | rope
    scaling = scaling if scaling["type"] != "default" else None
    edit_config(tmp_path / "hf", rope_parameters="absent", rope_theta=theta, rope_scaling=scaling)
    from_hf(tmp_path / "hf", tmp_path / "ours")
    assert (our_logits(tmp_path / "ours", tokens()) - theirs).abs().max() <= 1e-4
    to_hf(tmp_path / "ours", tmp_path / "back")
    for absent in ({"rope_parameters": "absent"}, {"rope_theta": "absent", "rope_scaling": "absent"}):
        config = json.loads((tmp_path / "back" / "config.json").read_text())
        edit_config(tmp_path / "back", **absent)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
        torch.testing.assert_close(their_logits(again, tokens()), theirs, atol=1e-6, rtol=0)
        (tmp_path / "back" / "config.json").write_text(json.dumps(config))
