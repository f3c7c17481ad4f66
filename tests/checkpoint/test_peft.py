"""Adapters against `peft`, where it is installed: forward and gradients in float64, and folders read both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.folder import complete
from shardwise.checkpoint.huggingface import from_peft, to_hf, to_peft
from shardwise.checkpoint.huggingface.peft import CONFIG, WEIGHTS
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.resume import load_weights
from shardwise.checkpoint.weights import load_model
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.model.adapters import LowRank
from shardwise.model.layers import Linear
from shardwise.run import AdapterConfig, UserError, run_from_dict
from shardwise.train.step import TrainState

# transformers computes norms and rotations in float32 whatever the model's dtype; GPT-2 has neither.
CLOSE = {"gpt2": 1e-9, "qwen3": 1e-4, "llama": 1e-4, "deepseek": 1e-4}
MODELS = {
    "gpt2": cases.MODELS["tied"] | dict(kv_heads=4, position_offset=0),
    "qwen3": cases.DENSE,
    "llama": cases.DENSE | dict(qk_norm=False),
    "deepseek": cases.MIXTURE | cases.LATENT | dict(kv_heads=0),
}  # fmt: skip


def begun(tmp_path: Path, model: dict[str, Any], adapter: dict[str, Any]) -> TrainState:
    """A train state of adapters that are not zero, beside weights that are saved as a checkpoint and as a Hugging Face folder."""
    train = dict(seq_len=cases.LENGTH, global_batch=2, dtype="float64", device="cpu")
    base = run_from_dict(dict(model=model | dict(layers=2, init_std=0.3), train=train))
    checkpoint_cases.train_and_save(
        0, replace(base, train=replace(base.train, global_batch=8, microbatch=8)), tmp_path / "base", 0
    )
    to_hf(tmp_path / "base", tmp_path / "hf")
    state = TrainState(
        run_from_dict(
            dict(model=model | dict(layers=2), adapter=adapter, train=train | dict(weights=str(tmp_path / "base")))
        )
    )
    load_weights(state, ByteTokenizer(), print)
    generator = torch.Generator().manual_seed(1)
    for held in state.parallel.parameters:
        if not held.entry.frozen:
            held.parameter.data.copy_(torch.randn(held.parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return state


def saved(state: TrainState, out: Path) -> Path:
    saver = checkpoint_cases.saver_of(state, out)
    saver.save(state)
    assert saver.finish() == ""
    return complete(out)[0]


def tokens() -> Tensor:
    return torch.from_numpy(cases.batch(3, False).tokens[:2])


@pytest.mark.parametrize(
    ("kind", "rank_stabilized"), [("lora", False), ("lora", True), ("dora", False)], ids=["lora", "rslora", "dora"]
)
def test_a_layer_computes_what_peft_computes(kind: str, rank_stabilized: bool) -> None:
    """In float64, to 1e-9: a matrix with its adapter, its output, and the gradients of its input and of A and B."""
    peft = pytest.importorskip("peft", reason="peft is not installed: `pip install peft` brings this comparison")
    ours, adapter = Linear(24, 40, dtype=torch.float64), AdapterConfig(kind, 4, 6.0, rank_stabilized=rank_stabilized)
    theirs = torch.nn.ModuleDict({"q": torch.nn.Linear(24, 40, dtype=torch.float64)})
    theirs["q"].load_state_dict(ours.state_dict())
    dora, given = kind == "dora", dict(target_modules=["q"], init_lora_weights=False)
    settings = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=rank_stabilized, use_dora=dora, **given)
    layer = peft.get_peft_model(theirs, settings).base_model.model["q"].double()
    ours.lora = LowRank(24, 40, adapter).double()
    ours.lora.A.load_state_dict(layer.lora_A["default"].state_dict())
    ours.lora.B.load_state_dict(layer.lora_B["default"].state_dict())
    if dora:
        magnitude = layer.lora_magnitude_vector["default"].weight
        magnitude.data.mul_(1.3)
        ours.lora.magnitude.data.copy_(magnitude)
    given, weight = torch.randn(3, 5, 24, dtype=torch.float64), torch.randn(3, 5, 40, dtype=torch.float64)
    results: list[Any] = []
    for network in (ours, layer):
        x = given.clone().requires_grad_()
        out = network(x)
        (out * weight).sum().backward()
        results.append((out, x.grad))
    results = [
        (*results[0], ours.lora.A.weight.grad, ours.lora.B.weight.grad),
        (*results[1], layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad),
    ]
    if dora:
        results[0] += (ours.lora.magnitude.grad,)
        results[1] += (magnitude.grad,)
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < 1e-9 * other.abs().max()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_forward_and_gradients_are_those_of_peft(tmp_path: Path, model: str, kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: `pip install peft` brings this comparison")
    transformers = pytest.importorskip("transformers")
    targets = {"gpt2": ["out", "up", "down"], "deepseek": ["q", "out", "q_down", "kv_down", "kv"]}.get(model, ["all"])
    adapter = dict(kind=kind, rank=4, alpha=6.0, targets=targets, rank_stabilized=kind == "lora")
    state = begun(tmp_path, MODELS[model], adapter)
    to_peft(saved(state, tmp_path / "run"), tmp_path / "peft")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft", is_trainable=True)
    ours = state.parallel.models[0]
    one, other = ours(tokens()).result, theirs(tokens()).logits
    assert (one - other).abs().max() < CLOSE[model] * other.abs().max()
    weight = torch.randn(one.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (one * weight).sum().backward()
    (other * weight).sum().backward()
    of_theirs = {
        name.replace(".default", "").replace("vector.weight", "vector"): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    # Written once more, the gradients are in the names and the order of rows that peft has.
    for held in state.parallel.parameters:
        if not held.entry.frozen:
            assert held.grad is not None
            held.parameter.data.copy_(held.grad)
    to_peft(saved(state, tmp_path / "gradients"), tmp_path / "written")
    reader = open_checkpoint_file(tmp_path / "written")
    assert set(reader) == set(of_theirs)
    for name, gradient in reader.items():
        worst = (gradient - of_theirs[name]).abs().max() / of_theirs[name].abs().max()
        assert worst < CLOSE[model], (name, worst)


def open_checkpoint_file(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS)


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: `pip install peft` brings this comparison")
    transformers = pytest.importorskip("transformers")
    begun(tmp_path, MODELS["llama"], dict(kind="lora"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    matrices = ["q_proj", "down_proj"]
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=matrices, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(theirs, settings)
    theirs.save_pretrained(tmp_path / "theirs")
    for base in (tmp_path / "base", ""):  # the checkpoint, or the folder that the adapters name
        from_peft(tmp_path / "theirs", tmp_path / f"ours{bool(base)}", base)
        model, _ = load_model(tmp_path / f"ours{bool(base)}")
        with torch.no_grad():
            want = theirs(tokens()).logits
            assert (model(tokens()).result - want).abs().max() < CLOSE["llama"] * want.abs().max()


@pytest.mark.parametrize(
    "adapter", [dict(kind="dora", targets=["q", "kv_down", "out"]), dict(kind="lora")], ids=["dora", "experts"]
)
def test_it_comes_back_bit_for_bit(tmp_path: Path, adapter: dict[str, Any]) -> None:
    state = begun(tmp_path, MODELS["deepseek"], dict(rank=4) | adapter)
    source = saved(state, tmp_path / "run")
    to_peft(source, tmp_path / "peft")
    from_peft(tmp_path / "peft", tmp_path / "back", tmp_path / "base")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "back")
    assert set(before.names) == set(after.names)
    for name in before.names:
        assert torch.equal(before.get(name), after.get(name)), name


EXPERTS = {
    "qwen3_moe": cases.MIXTURE | dict(shared_experts=0, router="softmax", qk_norm=True, dense_layers=1),
    "mixtral": cases.MIXTURE | dict(shared_experts=0, router="softmax", dense_layers=0),
    "deepseek": MODELS["deepseek"] | dict(dense_layers=1),
}


def of_transformers(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)


@pytest.mark.parametrize(
    ("model", "targets", "rank_stabilized"),
    [
        ("qwen3_moe", ["all"], True),
        ("mixtral", ["q", "gate", "up", "down"], False),
        ("deepseek", ["all"], False),
        ("mixtral", ["up"], False),
        ("mixtral", ["down"], False),
    ],
    ids=["qwen3_moe", "mixtral", "deepseek", "up alone", "down alone"],
)
def test_adapters_of_experts_are_those_of_peft(
    tmp_path: Path, model: str, targets: list[str], rank_stabilized: bool
) -> None:
    """As peft loads them, stacked, with those of shared experts and dense layers beside them; and they come back."""
    peft = pytest.importorskip("peft", reason="peft is not installed: `pip install peft` brings this comparison")
    adapter = dict(kind="lora", rank=4, alpha=6.0, targets=targets, rank_stabilized=rank_stabilized, dropout=0.1)
    state = begun(tmp_path, EXPERTS[model], adapter)
    source = saved(state, tmp_path / "run")
    assert "dropout" in to_peft(source, tmp_path / "peft").notes[0]
    theirs = of_transformers(tmp_path / "hf")
    plain = theirs(tokens()).logits
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    network, want = state.parallel.models[0].eval(), theirs(tokens()).logits
    with torch.no_grad():
        assert (network(tokens()).result - want).abs().max() < 1e-4 * want.abs().max()
    assert (plain - want).abs().max() > 1e-2 * want.abs().max()
    from_peft(tmp_path / "peft", tmp_path / "back", tmp_path / "base")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "back")
    if targets != ["up"]:  # peft's one adapter of gate and up comes back as two
        assert set(before.names) == set(after.names)
        assert all(torch.equal(before.get(name), after.get(name)) for name in before.names)
    with torch.no_grad():
        found = load_model(tmp_path / "back")[0](tokens()).result
        assert (found - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("qwen3_moe", dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
        ("mixtral", dict(target_modules=["q_proj", "w1", "w2", "w3"])),
        ("mixtral", dict(target_modules=["o_proj"], target_parameters=["experts.down_proj"])),
    ],
    ids=["parameters", "modules of transformers 4", "down alone"],
)
def test_adapters_of_experts_that_peft_trained_are_read(tmp_path: Path, model: str, given: dict[str, Any]) -> None:
    """Whose B has no zeros, and whose gate and up have one adapter, of its rank or of twice that of the others."""
    peft = pytest.importorskip("peft", reason="peft is not installed: `pip install peft` brings this comparison")
    begun(tmp_path, EXPERTS[model] | dict(dense_layers=0), dict(kind="lora"))
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, init_lora_weights=False, task_type="CAUSAL_LM", **dict(target_modules=[]) | given
    )
    theirs = peft.get_peft_model(of_transformers(tmp_path / "hf"), settings)
    theirs.save_pretrained(tmp_path / "theirs")
    from_peft(tmp_path / "theirs", tmp_path / "ours", tmp_path / "base")
    network, _ = load_model(tmp_path / "ours")
    with torch.no_grad():
        want = theirs(tokens()).logits
        assert (network(tokens()).result - want).abs().max() < 1e-4 * want.abs().max()


def test_what_peft_has_otherwise_is_refused(tmp_path: Path) -> None:
    state = begun(tmp_path, MODELS["deepseek"], dict(kind="dora", rank=4))
    with pytest.raises(UserError, match="no DoRA for stacked experts"):
        to_peft(saved(state, tmp_path / "run"), tmp_path / "peft")
    with pytest.raises(UserError, match="no adapters"):
        to_peft(tmp_path / "base", tmp_path / "peft")
    with pytest.raises(UserError, match="no folder of peft adapters"):
        from_peft(tmp_path / "base", tmp_path / "out")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / WEIGHTS).write_bytes(b"")
    (tmp_path / "odd" / CONFIG).write_text('{"peft_type": "IA3", "r": 8, "lora_alpha": 8, "bias": "all"}')
    with pytest.raises(UserError, match=r"only LORA is read[\s\S]*only 'none' is read"):
        from_peft(tmp_path / "odd", tmp_path / "out")
