"""Folders in the forms of compressed-tensors, AutoAWQ and GPTQ, packed here by plain loops, compute what `transformers` computes
with the weights that they stand for, and keep their precision; others are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, save, their_logits, tokens

from shardwise.checkpoint.huggingface import from_hf
from shardwise.checkpoint.weights import load_model
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.model import layer_matrices, use_quantized_gemms
from shardwise.run import UserError

Parts = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]


def grouped(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers 0 to 15, scales and zero points of each group, in float16 as published scales are."""
    rows, columns = weight.shape
    by_group = weight.double().numpy().reshape(rows, columns // group, group)
    if symmetric:
        scale, zero = np.abs(by_group).max(-1) / 7.5, np.full(by_group.shape[:2], 8.0)
    else:
        low, high = np.minimum(by_group.min(-1), 0), np.maximum(by_group.max(-1), 0)
        scale = (high - low) / 15
        zero = np.clip(np.round(-low / scale), 1, 15)
    scale = scale.astype(np.float16).astype(np.float64)
    integers = np.clip(np.round(by_group / scale[..., None]) + zero[..., None], 0, 15)
    return integers.reshape(rows, columns).astype(np.int64), scale, zero.astype(np.int64)


def stands_for(integers: np.ndarray, scale: np.ndarray, zero: np.ndarray, index: np.ndarray) -> torch.Tensor:
    values = np.empty(integers.shape)
    for column, group in enumerate(index):
        values[:, column] = (integers[:, column] - zero[:, group]) * scale[:, group]
    return torch.from_numpy(values)


def words(integers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours of a row to an int32; bits 4i hold neighbour order[i]."""
    rows, columns = integers.shape
    packed = np.zeros((rows, -(-columns // 8)), np.int64)
    for row in range(rows):
        for column in range(columns):
            packed[row, column // 8] |= int(integers[row, column]) << 4 * order.index(column % 8)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def awq(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    integers, scale, zero = grouped(weight, 16, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words(integers.T, order),
        "qzeros": words(zero.T, order),
        "scales": torch.from_numpy(scale.T.copy()).half(),
    }
    return parts, stands_for(integers, scale, zero, np.arange(weight.shape[1]) // 16)


def gptq(
    weight: torch.Tensor, less: int = 1, shuffled: bool = False, symmetric: bool = False
) -> tuple[Parts, torch.Tensor]:
    columns = weight.shape[1]
    index, order = np.arange(columns) // 16, np.arange(columns)
    if shuffled:
        order = np.random.default_rng(0).permutation(columns)
    integers, scale, zero = grouped(weight[:, order], 16, symmetric)
    place = np.argsort(order)
    integers, index = integers[:, place], index[place]
    parts = {
        "qweight": words(integers).t().contiguous(), "qzeros": words(zero.T - less),
        "scales": torch.from_numpy(scale.T.copy()).half(), "g_idx": torch.from_numpy(index.astype(np.int32)),
    }  # fmt: skip
    return parts, stands_for(integers, scale, zero, index)


def compressed_int4(weight: torch.Tensor, group: int = 16, symmetric: bool = True) -> tuple[Parts, torch.Tensor]:
    group = group or weight.shape[1]
    integers, scale, zero = grouped(weight, group, symmetric)
    parts = {
        "weight_packed": words(integers), "weight_scale": torch.from_numpy(scale).half(),
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    if not symmetric:
        parts["weight_zero_point"] = words(zero.T).t().contiguous()
    return parts, stands_for(integers, scale, zero, np.arange(weight.shape[1]) // group)


def compressed_int8(weight: torch.Tensor, packed: bool = False) -> tuple[Parts, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round()
    parts: Parts = {"weight": values.to(torch.int8), "weight_scale": scale}
    if packed:
        by_word = (values.numpy() + 128).astype(np.int64).reshape(len(weight), -1, 4)
        whole = sum(by_word[..., n] << 8 * n for n in range(4)).astype(np.uint32).view(np.int32)
        parts = {
            "weight_packed": torch.from_numpy(whole),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
    return parts, values.double() * scale.double()


def compressed_fp8(weight: torch.Tensor, by_channel: bool = True) -> tuple[Parts, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) if by_channel else weight.abs().max()[None]) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.double() * scale.double()


def config_of(kind: str, bits: int, strategy: str, group: int | None = None, symmetric: bool = True) -> dict[str, Any]:
    weights = dict(type=kind, num_bits=bits, strategy=strategy, group_size=group, symmetric=symmetric, dynamic=False)
    groups = {"group_0": dict(targets=["Linear"], weights=weights, input_activations=None, output_activations=None)}
    return dict(quant_method="compressed-tensors", config_groups=groups, ignore=["lm_head"], format="any")


FORMS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=16, zero_point=True, version="gemm")),
    "gptq": (gptq, dict(quant_method="gptq", bits=4, group_size=16, desc_act=False, sym=False)),
    "gptq symmetric": (lambda w: gptq(w, symmetric=True), dict(quant_method="gptq", bits=4, group_size=16, sym=True)),
    "gptq v2": (
        lambda w: gptq(w, 0),
        dict(quant_method="gptq", bits=4, group_size=16, checkpoint_format="gptq_v2"),
    ),
    "gptq act-order": (
        lambda w: gptq(w, shuffled=True),
        dict(quant_method="gptq", bits=4, group_size=16, desc_act=True),
    ),
    "w4a16": (compressed_int4, config_of("int", 4, "group", 16)),
    "w4a16 asymmetric": (lambda w: compressed_int4(w, 16, False), config_of("int", 4, "group", 16, symmetric=False)),
    "w4a16 by channel": (lambda w: compressed_int4(w, 0), config_of("int", 4, "channel")),
    "w8a16": (lambda w: compressed_int8(w, True), config_of("int", 8, "channel")),
    "int8": (compressed_int8, config_of("int", 8, "channel")),
    "fp8": (compressed_fp8, config_of("float", 8, "channel")),
    "fp8 by tensor": (lambda w: compressed_fp8(w, False), config_of("float", 8, "tensor")),
}


def packed_folder(folder: Path, family: str, form: str) -> Any:
    """A folder of a tiny model with its layers' matrices packed, and the model with the weights that they stand for."""
    kind, settings = MODELS[family]
    model = save(folder, kind, settings)
    pack, config = FORMS[form]
    state = load_file(folder / "model.safetensors")
    made: Parts = {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        whole = (
            "layers." not in name
            or tensor.ndim < 2
            or name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight"))
        )
        if whole:
            made[name] = tensor
            continue
        parts, values = pack(tensor)
        made |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
        state[name] = values.to(tensor.dtype)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return model, state


def our_logits(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, set[str]]:
    model, _ = load_model(folder, dtype)
    use_quantized_gemms(model)
    kinds = {
        matrix.form.kind if isinstance(matrix, QuantizedMatrix) else "whole" for _, matrix in layer_matrices(model)
    }
    with torch.no_grad():
        return model(tokens()).result, kinds


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.drawn(6)
def test_a_packed_folder_is_what_it_stands_for(tmp_path: Path, form: str) -> None:
    model, state = packed_folder(tmp_path / "theirs", "qwen2", form)
    model.load_state_dict(state, strict=False)
    done = from_hf(tmp_path / "theirs", tmp_path / "ours")
    assert done.architecture == "Qwen2ForCausalLM"
    found, kinds = our_logits(tmp_path / "ours")
    torch.testing.assert_close(found, their_logits(model, tokens()), rtol=2e-4, atol=2e-4)
    assert kinds == {"fp8" if "fp8" in form else "int8" if "8" in form else "int4"}


@pytest.mark.parametrize("family", ["llama3", "qwen3-moe", "deepseek"])
def test_every_layout_of_tensors_is_packed(tmp_path: Path, family: str) -> None:
    """Experts by themselves, rotary rows interleaved, a router that stays whole."""
    kind, settings = MODELS[family]
    save(tmp_path / "theirs", kind, settings)
    from_hf(tmp_path / "theirs", tmp_path / "plain")
    _, state = packed_folder(tmp_path / "theirs", family, "int8")
    from_hf(tmp_path / "theirs", tmp_path / "ours")
    whole = {name: tensor.contiguous() for name, tensor in state.items()}
    (tmp_path / "unpacked").mkdir()
    save_file(whole, tmp_path / "unpacked" / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "unpacked" / "config.json").write_text(json.dumps(values))
    from_hf(tmp_path / "unpacked", tmp_path / "wanted")
    found, kinds = our_logits(tmp_path / "ours")
    assert kinds == {"int8"}
    torch.testing.assert_close(found, our_logits(tmp_path / "wanted")[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "words_of_it"),
    [
        (dict(quant_method="bitsandbytes"), "bitsandbytes"),
        (dict(quant_method="awq", bits=4, version="gemv"), "gemv"),
        (dict(quant_method="gptq", bits=3), "bits"),
        (dict(quant_method="gptq", bits=4, checkpoint_format="marlin"), "marlin"),
        (config_of("float", 4, "group", 16), "float4"),
        (config_of("int", 8, "channel", symmetric=False), "asymmetric"),
        (config_of("int", 4, "group", 16) | dict(kv_cache_scheme=dict(num_bits=8)), "kv_cache_scheme"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], words_of_it: str) -> None:
    kind, settings = MODELS["llama2"]
    save(tmp_path / "theirs", kind, settings)
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": changes}))
    with pytest.raises(UserError, match=words_of_it):
        from_hf(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    packed_folder(tmp_path / "theirs", "llama2", "int8")
    file = tmp_path / "theirs" / "model.safetensors"
    state = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    save_file(state | {name: state[name][:-1].contiguous()}, file, {"format": "pt"})
    from_hf(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        load_model(tmp_path / "ours")
    with pytest.raises(UserError, match="already"):
        load_model(tmp_path / "ours", weights="int4")
