"""Hugging Face folders as they are found: older names, extra tensors, fp8, copies of tied weights, broken
ones; and what conversion needs of memory and of the folder it writes to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flushed import flushes_watched
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import (
    GROUPED,
    LATENT,
    MODELS,
    edit_config,
    our_logits,
    save,
    tensors,
    their_logits,
    tokens,
    transformers,
)

import shardwise
from shardwise.checkpoint.huggingface import from_hf, to_hf
from shardwise.checkpoint.huggingface.convert import new_folder
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.run import UserError


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    model = save(tmp_path / "hf", *MODELS["gpt2"])
    published = {name.removeprefix("transformer."): t for name, t in tensors(tmp_path / "hf").items()}
    for layer in range(2):
        published[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        published[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(published, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path / "hf", attn_pdrop=0.1, bos_token_id=5, architectures="absent")
    (tmp_path / "hf" / "generation_config.json").unlink()
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    done = from_hf(tmp_path / "hf", tmp_path / "ours")
    assert any("attn_pdrop = 0.1" in note for note in done.notes)
    assert "attention masks (4)" in done.notes
    assert (our_logits(tmp_path / "ours", tokens()) - their_logits(model, tokens())).abs().max() <= 1e-4
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "back" / "config.json").read_text())["bos_token_id"] == 5


def test_deepseek_leaves_out_the_layers_that_look_further(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["deepseek"])
    found = tensors(tmp_path / "hf")
    found["model.layers.2.eh_proj.weight"] = torch.zeros(3)
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(found, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    notes = from_hf(tmp_path / "hf", tmp_path / "ours").notes
    assert set(notes) == {
        "tensors of layers that predict further tokens (1)",
        "tables of rotary frequencies (1)",
    }


def test_deepseek_with_halves_for_pairs(tmp_path: Path) -> None:
    model = save(tmp_path / "hf", "DeepseekV3", LATENT | {"rope_interleave": False})
    from_hf(tmp_path / "hf", tmp_path / "ours")
    theirs = their_logits(model, tokens())
    assert (our_logits(tmp_path / "ours", tokens()) - theirs).abs().max() <= 1e-4
    to_hf(tmp_path / "ours", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    torch.testing.assert_close(their_logits(again, tokens()), theirs, atol=1e-5, rtol=0)


def test_fp8_blocks_are_dequantized(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["deepseek"])
    dequantized = tensors(tmp_path / "hf")
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in dequantized.items():
        if not name.endswith("proj.weight"):
            quantized[name] = tensor
            continue
        rows, columns = (-(-n // 16) for n in tensor.shape)
        scale = torch.rand(rows, columns) + 0.5
        scales = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
        quantized[name] = (tensor / scales).to(torch.float8_e4m3fn)
        quantized[f"{name}_scale_inv"] = scale
        dequantized[name] = (quantized[name].float() * scales).bfloat16()
    save_file(quantized, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path / "hf", quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    from_hf(tmp_path / "hf", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert back.keys() == dequantized.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in dequantized.items())


def test_a_copy_of_the_tied_embedding(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["qwen2"])
    found = tensors(tmp_path / "hf")
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    save_file(found, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (note,) = from_hf(tmp_path / "hf", tmp_path / "ours").notes
    assert "lm_head.weight" in note
    found["lm_head.weight"][0, 0] += 1
    save_file(found, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        from_hf(tmp_path / "hf", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_wrong_tensors_are_reported_all_at_once(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["mixtral"])
    found = tensors(tmp_path / "hf")
    del found["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    found["model.norm.weight"] = torch.ones(31)
    found["model.layers.0.self_attn.sinks"] = torch.ones(4)
    save_file(found, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError) as caught:
        from_hf(tmp_path / "hf", tmp_path / "ours")
    text = str(caught.value)
    assert "missing: model.layers.1.block_sparse_moe.experts.3.w2.weight" in text
    assert "model.norm.weight is [31] and should be [32]" in text
    assert "does not have: model.layers.0.self_attn.sinks" in text
    assert list(tmp_path.iterdir()) == [tmp_path / "hf"]


def test_folders_that_are_taken(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["gpt2"])
    (tmp_path / "taken").mkdir()
    from_hf(tmp_path / "hf", tmp_path / "taken")  # an empty one is free
    with pytest.raises(UserError, match="not empty"):
        from_hf(tmp_path / "hf", tmp_path / "taken")
    with pytest.raises(UserError, match="not empty"):
        to_hf(tmp_path / "taken", tmp_path / "hf")
    with pytest.raises(UserError, match="is a file"):
        from_hf(tmp_path / "hf", tmp_path / "hf" / "config.json")
    with pytest.raises(UserError, match="from-hf"):
        to_hf(tmp_path / "hf", tmp_path / "new")
    with pytest.raises(UserError, match="no such folder"):
        from_hf(tmp_path / "nowhere", tmp_path / "new")
    with pytest.raises(UserError, match="holds no config"):
        from_hf(tmp_path / "taken", tmp_path / "new")


def test_a_draft_of_another_process_stays(tmp_path: Path) -> None:
    """Two containers that convert into the same folder may have the same process id; so may a killed one and its successor."""
    with new_folder(tmp_path / "out") as first:
        (first / "weights").write_text("1")
        with new_folder(tmp_path / "out") as second:
            assert second != first
        assert (first / "weights").is_file()
        shutil.rmtree(tmp_path / "out")
    assert (tmp_path / "out" / "weights").is_file()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_power_failure_leaves_no_empty_file(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["llama2"])
    (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
    with flushes_watched() as unflushed:
        from_hf(tmp_path / "hf", tmp_path / "ours")
        to_hf(tmp_path / "ours", tmp_path / "back")
        assert unflushed(tmp_path / "ours") + unflushed(tmp_path / "back") == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise.cli.main import run_command

    save(tmp_path / "hf", *MODELS["qwen3-moe"])
    assert run_command(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in said
    assert f"left out: a tokenizer, for {tmp_path / 'hf'} has no tokenizer.json" in said
    command = ["convert", "to-hf", str(tmp_path / "ours"), str(tmp_path / "back"), "--dtype", "bfloat16"]
    assert run_command(command) == 0
    assert {t.dtype for t in tensors(tmp_path / "back").values()} == {torch.bfloat16}
    with safe_open(tmp_path / "back" / "model.safetensors", framework="pt") as f:
        assert f.metadata() == {"format": "pt"}
    with pytest.raises(UserError, match=r"train\.steps"):
        run_command([*command, "--train.steps=3"])


MEASURE = """
import re, sys
from shardwise.checkpoint.huggingface import from_hf, to_hf
from shardwise.checkpoint.weights import state_shapes
from shardwise.run import ModelConfig
state_shapes(ModelConfig(kv_heads=4, head_dim=64, ffn=64))  # loads the parts of torch that this needs
def mebibytes(what):
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
open("/proc/self/clear_refs", "w").write("5")  # the peak counts anew from here
start = mebibytes("VmRSS")
from_hf(sys.argv[1], sys.argv[2], file_bytes=32_000_000)
to_hf(sys.argv[2], sys.argv[3], file_bytes=32_000_000)
print(mebibytes("VmHWM") - start)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read as Linux tells it")
@pytest.mark.drawn(group="resharding")
def test_memory_stays_near_one_shard(tmp_path: Path) -> None:
    keys = {"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1024, "vocab_size": 1000}
    config = transformers.MixtralConfig(**GROUPED | keys | {"num_local_experts": 8})
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "hf", max_shard_size="16MB")
    shards = [file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")]
    assert len(shards) >= 8
    folders = [str(tmp_path / name) for name in ("hf", "ours", "back")]
    environment = {"PYTHONPATH": str(Path(shardwise.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, *folders]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    print(f"{len(shards)} shards, {sum(shards) / 1e6:.0f} MB, {float(result.stdout):.1f} MiB more at the peak")
    assert float(result.stdout) < 32
    readers = [open_checkpoint(tmp_path / name) for name in ("hf", "back")]
    assert sorted(readers[0].names) == sorted(readers[1].names)
