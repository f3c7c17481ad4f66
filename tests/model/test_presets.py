"""Every preset has, to the parameter, the size of the same config in `transformers`, and of the model as it
was published where that is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.model import Transformer
from shardwise.model.huggingface import config_from_model, model_from_config
from shardwise.run import PRESETS, run_from_dict

transformers = pytest.importorskip("transformers")

# Parameters as published; tied embeddings once.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}
# Classes whose defaults in transformers are the shape of a published model, and keys in which they differ.
DEFAULTS = {
    "gpt2-124m": ("GPT2Config", {"attn_pdrop", "embd_pdrop", "resid_pdrop"}),
    "llama2-7b": ("LlamaConfig", {"max_position_embeddings", "rms_norm_eps"}),
    "mixtral-8x7b": ("MixtralConfig", {"max_position_embeddings"}),
    "deepseek-v3": ("DeepseekV3Config", {"max_position_embeddings", "num_nextn_predict_layers"}),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_equal_those_of_transformers(preset: str, tmp_path: Path) -> None:
    config = run_from_dict({"model": {"preset": preset}}).model
    architecture, values = config_from_model(config)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
        )
        ours = Transformer(config)
    assert type(theirs).__name__ == architecture
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in theirs.parameters())
    # Published totals count the routers' selection bias too, which is no parameter on either side.
    stored = count + sum(b.numel() for name, b in ours.named_buffers() if name.endswith("router.bias"))
    assert stored == PUBLISHED.get(preset, stored)


@pytest.mark.parametrize("preset", DEFAULTS)
def test_keys_equal_the_published_ones(preset: str) -> None:
    _, values = config_from_model(run_from_dict({"model": {"preset": preset}}).model)
    name, differ = DEFAULTS[preset]
    theirs = getattr(transformers, name)().to_dict()
    sizes = {key for key, value in theirs.items() if type(value) in (int, float)} & values.keys() - differ
    assert len(sizes) > 5
    assert {key: values[key] for key in sizes} == {key: theirs[key] for key in sizes}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_survives_its_config(preset: str) -> None:
    config = run_from_dict({"model": {"preset": preset}}).model
    _, values = config_from_model(config)
    back, _ = model_from_config(json.loads(json.dumps(values)))
    assert {k: v for k, v in vars(back).items() if k != "preset"} == {
        k: v for k, v in vars(config).items() if k != "preset"
    }
