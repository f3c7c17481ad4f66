"""Every preset has, to the parameter, the size of the same config in `transformers`, and of the model as it
was published where that is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from late import Late
from published_sizes import PUBLISHED

from shardwise.checkpoint.huggingface import config_from_model, model_from_config
from shardwise.model import Transformer
from shardwise.run import PRESETS, run_from_dict

transformers: Any = Late("transformers")

# Classes whose defaults in transformers are the shape of a published model, and keys in which they differ.
DEFAULTS = {
    "gpt2-124m": ("GPT2Config", {"attn_pdrop", "embd_pdrop", "resid_pdrop"}),
    "llama2-7b": ("LlamaConfig", {"max_position_embeddings", "rms_norm_eps"}),
    "mixtral-8x7b": ("MixtralConfig", {"max_position_embeddings"}),
    "deepseek-v3": ("DeepseekV3Config", {"max_position_embeddings", "num_nextn_predict_layers"}),
}

# PaLM was not released, and no architecture of transformers is like it; its paper's table 1 has these sizes, in billions.
PALM = {"palm-8b": 8.63, "palm-62b": 62.50, "palm-540b": 540.35}
RELEASED = [preset for preset in PRESETS if preset not in PALM]


@pytest.mark.parametrize("preset", PALM)
def test_palm_has_the_sizes_of_its_paper(preset: str) -> None:
    with torch.device("meta"):
        ours = Transformer(run_from_dict({"model": {"preset": preset}}).model)
    assert sum(p.numel() for p in ours.parameters()) / 1e9 == pytest.approx(PALM[preset], rel=5e-4)


@pytest.mark.parametrize("preset", RELEASED)
@pytest.mark.drawn(8)
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


@pytest.mark.parametrize("preset", RELEASED)
def test_a_preset_survives_its_config(preset: str) -> None:
    config = run_from_dict({"model": {"preset": preset}}).model
    _, values = config_from_model(config)
    back, _ = model_from_config(json.loads(json.dumps(values)))
    assert {k: v for k, v in vars(back).items() if k != "preset"} == {
        k: v for k, v in vars(config).items() if k != "preset"
    }
