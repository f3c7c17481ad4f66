"""`shardwise quantize` as a user meets it: a folder that is a checkpoint and a Hugging Face folder, figures, and sentences for
mistakes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.weights import load_model
from shardwise.cli.main import main
from shardwise.model import Transformer, initialize
from shardwise.model.quantized.model import layer_matrices, put_matrix, quantize_model, use_quantized_gemms
from shardwise.quantize.quantize import of_one_group
from shardwise.run import ModelConfig
from shardwise.run.derive import derive_model
from shardwise.run.weights import QUANTIZED
from shardwise.run.write import sections_to_toml

GPT = dict(norm="layernorm", activation="gelu", bias="all")
NEOX = GPT | dict(parallel_block=True, parallel_norms=2, rope_share=0.5)
BLOOM = GPT | dict(position="alibi", embedding_norm=True, tied_embeddings=True)
TEXT = "".join(f"line {n} of a text that is long enough to be cut into sequences\n" for n in range(40))


def checkpoint_of(folder: Path, **model: object) -> Path:
    config = derive_model(ModelConfig(layers=2, hidden=32, heads=4, vocab=257, **model), 64)  # type: ignore[arg-type]
    network = Transformer(config)
    initialize(network, config, 0)
    folder.mkdir()
    save_file(network.state_dict(), folder / "model.safetensors")
    sections = {"name": "tiny", "model": asdict(config), "train": {"seq_len": 32, "dtype": "float32"}}
    (folder / "run.toml").write_text(sections_to_toml(sections))
    (folder / "shardwise_tokenizer.json").write_text('{"kind": "byte"}')
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


def run(*arguments: object) -> int:
    return main(["quantize", *map(str, arguments)])


def test_a_folder_has_groups_of_one_size(tmp_path: Path) -> None:
    """Its config names one, with which others read every matrix."""
    source = checkpoint_of(tmp_path / "tiny", ffn=80)
    options = ("--weights", "int4", "--group", 32, "--method", "round", "--set", tmp_path / "text.txt")
    assert run(source, tmp_path / "out", *options) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    size = config["config_groups"]["group_0"]["weights"]["group_size"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = {name: tensor for name, tensor in stored.items() if name.endswith("weight_scale")}
    assert len(scales) == 14
    for name, scale in scales.items():
        columns = int(stored[name.replace("weight_scale", "weight_shape")][1])
        assert scale.shape[1] * size == columns, name


@pytest.mark.parametrize(
    ("weights", "method"), [("int4", "gptq"), ("int4", "awq"), ("int8", "smoothquant"), ("fp8", "round")]
)
@pytest.mark.drawn(2)
def test_a_checkpoint_is_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str, method: str) -> None:
    source = checkpoint_of(tmp_path / "tiny")
    options = ("--weights", weights, "--method", method, "--set", tmp_path / "text.txt", "--sequences", 8)
    assert run(source, tmp_path / "out", *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity_after"] == pytest.approx(found["perplexity_before"], rel=0.05)
    assert found["bytes_after"] < found["bytes_before"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in stored.values()) == found["bytes_after"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    name = "model.layers.0.mlp.down_proj." + ("weight_packed" if weights == "int4" else "weight")
    assert stored[name].dtype == {"int4": torch.int32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[weights]
    assert main(["generate", str(tmp_path / "out"), "--prompt", "line", "--max-tokens", "3", "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    "model",
    [
        dict(kv_heads=2),
        GPT | dict(position="learned", tied_embeddings=True),
        NEOX,
        BLOOM,
        dict(experts=4, experts_per_token=2, qk_norm=True),
        dict(attention="latent", kv_rank=16, nope_dim=16, rope_dim=8, v_dim=8, experts=4, experts_per_token=2, router="sigmoid",
             shared_experts=1, dense_layers=1),
        dict(parallel_block=True, activation="geglu"),
    ],
    ids=["llama", "gpt2", "neox", "bloom", "qwen3-moe", "deepseek", "parallel"],
)  # fmt: skip
@pytest.mark.parametrize("weights", ["int4", "fp8"])
@pytest.mark.drawn(4, "weights")
def test_what_is_written_is_what_is_read(tmp_path: Path, model: dict[str, object], weights: str) -> None:
    source = checkpoint_of(tmp_path / "tiny", **model)
    options = ("--method", "round", "--set", tmp_path / "text.txt", "--eval-sequences", 1)
    assert run(source, tmp_path / "out", "--weights", weights, *options) == 0
    wanted, _ = load_model(source)
    quantize_model(wanted, of_one_group(QUANTIZED[weights], {m.shape[-1] for _, m in layer_matrices(wanted)}))
    found, _ = load_model(tmp_path / "out", torch.float32)
    use_quantized_gemms(found)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).result, wanted(tokens).result, rtol=1e-5, atol=1e-5)


def test_inputs_stay_whole_where_only_weights_are_rounded(tmp_path: Path) -> None:
    """The folder says so to other readers too; the bytes of weights are those of fp8 with rounded inputs."""
    source = checkpoint_of(tmp_path / "tiny")
    options = ("--weights", "fp8", "--method", "round", "--set", tmp_path / "text.txt", "--eval-sequences", 1)
    assert run(source, tmp_path / "both", *options) == 0
    assert run(source, tmp_path / "out", *options, "--weight-only") == 0
    stored, both = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "both"))
    assert stored.keys() == both.keys()
    assert all(torch.equal(stored[name].view(torch.uint8), both[name].view(torch.uint8)) for name in stored)
    schemes = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
        for name in ("out", "both")
    ]
    assert schemes[0]["input_activations"] is None
    assert schemes[1]["input_activations"]["strategy"] == "token"
    whole, _ = load_model(source)
    found, _ = load_model(tmp_path / "out", torch.float32)
    for name, matrix in list(layer_matrices(found)):
        put_matrix(whole, name, matrix.to(torch.float32))
    use_quantized_gemms(found)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).result, whole(tokens).result, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [NEOX, BLOOM], ids=["neox", "bloom"])
def test_queries_keys_and_values_stand_head_by_head_as_in_the_unpacked_folder(
    tmp_path: Path, model: dict[str, object]
) -> None:
    source = checkpoint_of(tmp_path / "tiny", **model)
    options = ("--method", "round", "--set", tmp_path / "text.txt", "--eval-sequences", 1)
    assert run(source, tmp_path / "out", "--weights", "fp8", *options) == 0
    assert main(["convert", "to-hf", str(source), str(tmp_path / "plain")]) == 0
    packed, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "plain"))
    names = [name for name in plain if name.endswith("query_key_value.weight")]
    assert len(names) == 2
    for name in names:
        found = packed[name].float() * packed[f"{name}_scale"].float()
        torch.testing.assert_close(found, plain[name], rtol=0.07, atol=1e-3)


def test_mistakes_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint_of(tmp_path / "tiny")
    out, text = tmp_path / "out", tmp_path / "text.txt"

    def sentence(*arguments: object) -> str:
        assert run(*arguments) == 2
        return capsys.readouterr().err

    assert "8 bits" in sentence(source, out, "--weights", "int4", "--method", "smoothquant")
    assert "--weight-only" in sentence(source, out, "--weights", "fp8", "--method", "smoothquant", "--weight-only")
    assert "multiple of 8" in sentence(source, out, "--weights", "int4", "--group", 12)
    assert "no such file" in sentence(source, out, "--weights", "int4", "--set", tmp_path / "nothing")
    assert "neither" in sentence(source, out, "--weights", "int4", "--set", source)
    (tmp_path / "short.txt").write_text("short")
    assert "tokens" in sentence(source, out, "--weights", "int4", "--set", tmp_path / "short.txt")
    assert "not empty" in sentence(source, source, "--weights", "int4", "--set", text)
    assert "no such folder" in sentence(tmp_path / "gone", out, "--weights", "int4")
    assert not out.exists()
    assert run(source, out, "--weights", "int8", "--set", text, "--eval-sequences", 1) == 0
    assert "packed" in sentence(out, tmp_path / "again", "--weights", "int4", "--set", text)
