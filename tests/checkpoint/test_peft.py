"""Adapters against `peft`, where it is installed: forward and gradients in float64, and folders read both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint.folder import complete
from shardwise.checkpoint.huggingface import from_peft, to_hf, to_peft
from shardwise.checkpoint.huggingface.convert import write_run
from shardwise.checkpoint.huggingface.peft import CONFIG, WEIGHTS
from shardwise.checkpoint.huggingface.peft_experts import stacks_of
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.resume import load_weights
from shardwise.checkpoint.weights import load_model, open_weights, state_shapes
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.model.adapters import LowRank
from shardwise.model.layers import Linear
from shardwise.run import AdapterConfig, ModelConfig, UserError, read_run, run_from_dict
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


def base_of(tmp_path: Path, model: dict[str, Any]) -> tuple[Path, ModelConfig]:
    """A checkpoint of random weights."""
    config, folder = run_from_dict({"model": model, "train": {"seq_len": 32}}).model, tmp_path / "base"
    folder.mkdir()
    weights = {name: torch.randn(shape) * 0.1 for name, shape in state_shapes(config).items()}
    save_file(weights, folder / "model.safetensors")
    write_run(folder, folder, config, "float32", "base")
    return folder, config


def adapters(tmp_path: Path, tensors: dict[str, Tensor], **more: Any) -> Path:
    """A folder as peft writes it, of rank 4 unless `more` says otherwise."""
    folder = tmp_path / "theirs"
    folder.mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": values for name, values in tensors.items()}, folder / WEIGHTS)
    settings = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8) | more
    (folder / CONFIG).write_text(json.dumps(settings))
    return folder


SMALL = dict(layers=1, hidden=32, heads=4, kv_heads=4, vocab=64)


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
def test_ranks_and_alphas_of_their_own_are_for_experts_alone(tmp_path: Path, key: str) -> None:
    """Else a scale that peft applies would be left out without a word."""
    base, _ = base_of(tmp_path, SMALL | dict(ffn=64, qk_norm=False))
    down = "model.layers.0.mlp.down_proj"
    tensors = {f"{down}.lora_A.weight": torch.randn(4, 64), f"{down}.lora_B.weight": torch.randn(32, 4)}
    source = adapters(tmp_path, tensors, target_modules=["down_proj"], **{key: {"down_proj": 4}})
    with pytest.raises(UserError, match=rf"{key}: speaks of down_proj; only experts may have their own"):
        from_peft(source, tmp_path / "out", base)
    from_peft(adapters(tmp_path, tensors, target_modules=["down_proj"]), tmp_path / "out", base)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("init_lora_weights", "pissa_niter_4", "the base has other weights too"),
        ("init_lora_weights", "olora", "the base has other weights too"),
        ("alora_invocation_tokens", [1, 2], "only None is read"),
        ("use_qalora", True, "only False is read"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    base, _ = base_of(tmp_path, SMALL | dict(ffn=64, qk_norm=False))
    down = "model.layers.0.mlp.down_proj"
    tensors = {f"{down}.lora_A.weight": torch.randn(4, 64), f"{down}.lora_B.weight": torch.randn(32, 4)}
    with pytest.raises(UserError, match=rf"{key}: .*{reason}"):
        from_peft(adapters(tmp_path, tensors, target_modules=["down_proj"], **{key: value}), tmp_path / "out", base)
    usual = dict(init_lora_weights="gaussian", alora_invocation_tokens=None, use_qalora=False)
    from_peft(adapters(tmp_path, tensors, target_modules=["down_proj"], **usual), tmp_path / "out", base)


MIXED = SMALL | dict(qk_norm=True, experts=4, experts_per_token=2, expert_ffn=16, dense_layers=0)
NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def test_experts_of_a_lower_rank_than_the_rest(tmp_path: Path) -> None:
    base, model = base_of(tmp_path, MIXED)
    q, rows = "model.layers.0.self_attn.q_proj", state_shapes(model)["layers.0.attention.q.weight"][0]
    tensors = {f"{q}.lora_A.weight": torch.randn(8, 32), f"{q}.lora_B.weight": torch.randn(rows, 8)}
    stacks = stacks_of(model, AdapterConfig("lora", targets=("gate", "up", "down")))
    for stack in stacks:
        tensors |= {name: torch.randn(shape) for name, shape in stack.shapes(4).items()}
    patterns = dict(rank_pattern=dict.fromkeys(NAMES, 4), alpha_pattern=dict.fromkeys(NAMES, 8))
    given = dict(r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=NAMES)
    from_peft(adapters(tmp_path, tensors, **given, **patterns), tmp_path / "out", base)
    adapter = read_run(tmp_path / "out" / "run.toml").adapter
    assert (adapter.rank, adapter.alpha) == (8, 16.0)
    name, (of_a, of_b) = stacks[1].matrices["down"], stacks[1].names()
    a = tensors[of_a].unflatten(0, (4, 4))  # experts, rank, columns
    b = tensors[of_b].unflatten(1, (4, 4)).permute(2, 0, 1)  # experts, rows, rank
    change = open_weights(tmp_path / "out", model).get(name) - open_weights(base, model).get(name)
    assert torch.allclose(change, 2 * b @ a, atol=1e-4)


def test_fewer_positions_than_a_run_has_by_default(tmp_path: Path) -> None:
    opt = dict(ffn=64, position="learned", activation="relu", norm="layernorm", bias="all", tied_embeddings=True)
    base, _ = base_of(tmp_path, SMALL | opt | dict(max_positions=128, position_offset=2))
    up = "model.decoder.layers.0.fc1"
    tensors = {f"{up}.lora_A.weight": torch.randn(4, 32), f"{up}.lora_B.weight": torch.randn(64, 4)}
    from_peft(adapters(tmp_path, tensors, target_modules=["fc1"]), tmp_path / "out", base)
    assert read_run(tmp_path / "out" / "run.toml").train.seq_len == 128
