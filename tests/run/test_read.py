"""Reading a run: every mistake at once with its place, presets under overrides, resolved runs that read back as themselves."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.run import PRESETS, Run, TrainConfig, UserError, read_planned, read_run, run_from_dict, to_dict, to_toml
from shardwise.run.config import SECTIONS, all_keys
from shardwise.run.derive import compiles, planned_on_gpu, replays
from shardwise.run.write import schema


def problems(path: Path | None = None, *overrides: str) -> list[tuple[str, str, str]]:
    with pytest.raises(UserError) as caught:
        read_run(path, overrides)
    return [(p.where, p.key, p.message) for p in caught.value.problems]


def test_keys_that_are_gone_are_read_where_they_change_nothing() -> None:
    assert run_from_dict(dict(layout=dict(compress_frozen=False))) == run_from_dict({})
    with pytest.raises(UserError, match="no such key"):
        run_from_dict(dict(layout=dict(compress_frozen=True)))


def test_all_mistakes_are_reported_at_once_with_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'speed = 3\n[model]\nheadz = 3\nlayers = "many"\nheads = 6\nkv_heads = 4\nhidden = 384\n'
        "[layuot]\nx = 1\n[train]\nlr = -1\ntensor = 2\ndtype = 'bfloat61'\n"
    )
    found = {key: (where, message) for where, key, message in problems(file, "--layout.shard=two", "--train.seed=-1")}
    assert set(found) == {
        "speed", "model.headz", "model.layers", "model.kv_heads", "layuot.x", "train.lr", "train.tensor", "train.dtype",
        "layout.shard", "train.seed",
    }  # fmt: skip
    assert found["model.headz"][0] == str(file)
    assert "model.heads" in found["model.headz"][1]
    assert "[layuot]" in found["layuot.x"][1]
    assert "layout" in found["layuot.x"][1]
    assert "layout.tensor" in found["train.tensor"][1]
    assert "bfloat16" in found["train.dtype"][1]
    assert found["layout.shard"][0] == "command line"
    assert "above 0" in found["train.lr"][1]


LATENT = ("model.attention=latent", "model.kv_rank=8", "model.nope_dim=8", "model.v_dim=8")
MIXTURE = ("model.experts=4", "model.experts_per_token=1")
TOPK = ("layout.compress=topk", "layout.replicate=2")
OPTIMAL = ("layout.recompute=optimal", "layout.recompute_budget=1")
ELASTIC = "layout.sync_elastic=true"
RARELY = ("layout.replicate=2", "layout.sync_every=4")
LOSSLESS = ("memory.lossless=true", "model.activation=relu2")
SECONDARY = ("layout.shard=4", "layout.secondary_shard=2")
QUANTIZED = ("layout.compress_weights=int8", "layout.shard=2")
DUALPIPE = ["layout.pipeline=2", "layout.schedule=dualpipe"]
ONEBIT = ("layout.compress=onebit", "layout.replicate=2", "layout.compress_warmup=2")


@pytest.mark.parametrize(
    ("overrides", "key", "phrase"),
    [
        (["model.heads=3"], "model.heads", "do not divide hidden = 256"),
        (["model.kv_heads=3"], "model.kv_heads", "1, 2, 4 would do"),
        (["model.head_dim=31"], "model.head_dim", "odd"),
        (["model.attention=latent"], "model.kv_rank", "needs this size"),
        ([*LATENT, "model.rope_dim=7"], "model.rope_dim", "odd"),
        (["model.experts=4"], "model.experts_per_token", "between 1 and experts = 4"),
        (["model.experts=4", "model.experts_per_token=5"], "model.experts_per_token", "between 1 and"),
        ([*MIXTURE, "model.router_groups=3"], "model.router_groups", "do not divide"),
        ([*MIXTURE, "model.router_top_groups=2"], "model.router_top_groups", "more than"),
        (
            ["model.experts=4", "model.experts_per_token=2", "model.router_groups=4", "model.router_top_groups=1"],
            "model.experts_per_token",
            "more than the 1 x 1 experts",
        ),
        ([*MIXTURE, "model.activation=gelu"], "model.experts", "swiglu"),
        ([*MIXTURE, "model.dense_layers=9"], "model.dense_layers", "more than layers"),
        (["model.shared_experts=1"], "model.shared_experts", "no meaning"),
        (["model.position=alibi", "serve.kv_dtype=fp8"], "serve.kv_dtype", "cannot hold the positions"),
        (["model.position=learned", "model.max_positions=100"], "train.seq_len", "longer than the learned table"),
        (["train.beta1=1"], "train.beta1", "below 1"),
        (["train.muon_momentum=1"], "train.muon_momentum", "below 1"),
        (["adapter.kind=lora", "adapter.targets=q,gat"], "adapter.targets", '"gat" is not a matrix of a layer'),
        (["adapter.kind=lora", "adapter.targets=kv_down"], "adapter.targets", "no layer of this model has such"),
        (["adapter.kind=lora", "adapter.rank=300"], "adapter.rank", "300 is larger than the smallest side"),
        (["adapter.kind=lora", "train.optimizer=muon"], "train.optimizer", "does not train adapters; use adamw"),
        (["adapter.kind=lora", "train.fp8=rowwise", "train.dtype=bfloat16"], "train.fp8", "frozen weights"),
        (["adapter.kind=qlora", "model.ffn=400"], "adapter.kind", "not a multiple of 64"),
        (["adapter.kind=qlora", "layout.tensor=4", "model.kv_heads=2"], "layout.tensor", "a whole key/value head"),
        (["adapter.kind=qlora", "layout.tensor=4", "model.ffn=640"], "layout.tensor", "blocks of 64 weights"),
        (
            ["adapter.kind=qlora", "model.experts=4", "model.experts_per_token=1", "model.expert_ffn=96"],
            "adapter.kind",
            "ffn.experts.down",
        ),
        (["adapter.kind=qlora", "layout.async_tensor=true"], "layout.async_tensor", "does not support async_tensor"),
        (["adapter.kind=qlora", "train.compile=true"], "train.compile", "use auto"),
        (["adapter.kind=lora", "train.invariant=true"], "train.invariant", "does not support adapters"),
        (["layout.tensor=3"], "layout.tensor", "does not divide model.heads"),
        (["layout.shard=4", "train.global_batch=4", "cluster.nodes=3"], "cluster.nodes", "cannot be spread evenly over 3 nodes"),
        (["model.heads=8", "model.kv_heads=4", "layout.tensor=8", "model.ffn=4"], "layout.tensor", "feed-forward"),
        (["model.heads=12", "model.head_dim=8", "model.kv_heads=4", "layout.tensor=6"], "layout.tensor", "divide each other"),
        (["layout.tensor=4", "train.seq_len=510"], "train.seq_len", "not a multiple of layout.tensor"),
        (["layout.context=3"], "train.seq_len", "2 x layout.context = 6"),
        (["layout.pipeline=7"], "layout.pipeline", "each stage needs a layer"),
        (["layout.pipeline=4", "layout.schedule=zb-v"], "layout.pipeline", "4 ranks with 2 stages each"),
        ([*DUALPIPE, "layout.pipeline=3"], "layout.pipeline", "must be even; it is 3"),
        ([*DUALPIPE, "train.global_batch=3", "train.microbatch=1"], "layout.schedule", "needs an even number; it has 3"),
        ([*DUALPIPE, "layout.offload=true"], "layout.schedule", "use 1f1b or dualpipe-v"),
        ([*DUALPIPE, "layout.stages=1,1,1,1"], "layout.stages", "must be 2 numbers above 0"),
        (["layout.pipeline=2", "layout.stages=1,2"], "layout.stages", "add up to model.layers = 4"),
        (["layout.pipeline=3", "layout.stages=2,0,2"], "layout.stages", "above 0"),
        (["layout.pipeline=2", "layout.stages=5,-1"], "layout.stages", "above 0"),
        (["layout.context=8", "layout.context_method=ulysses"], "layout.context", "needs whole heads"),
        (["layout.recompute=operations"], "layout.recompute_operations", "name parts"),
        (["layout.recompute=operations", "layout.recompute_operations=nrom"], "layout.recompute_operations", "name parts"),
        (["layout.recompute=budget"], "layout.recompute_budget", "above 0"),
        (["layout.recompute_budget=1"], "layout.recompute_budget", "0 otherwise"),
        (["memory.activation_bits=4", "layout.recompute=full"], "memory.activation_bits", "saves little"),
        (["memory.activation_bits=4", "train.compile=true"], "memory.activation_bits", "compiled layers"),
        (["memory.activation_bits=2", "adapter.kind=lora"], "memory.activation_bits", "little to save"),
        (["memory.lossless=true"], "memory.lossless", "relu2, which saves a ReLU and its square"),
        ([*LOSSLESS, "layout.recompute=full"], "memory.lossless", "saves little of it"),
        ([*LOSSLESS, "memory.activation_bits=4"], "memory.lossless", "use one of them"),
        ([*LOSSLESS, "layout.pipeline=2", "layout.schedule=zb-h1"], "memory.lossless", "would keep it longer"),
        ([*LOSSLESS, "layout.pipeline=2", "layout.schedule=bpipe"], "layout.schedule", "memory.lossless stores some differently"),
        ([*LOSSLESS, "adapter.kind=lora"], "memory.lossless", "little to save"),
        ([*LOSSLESS, "train.compile=true"], "memory.lossless", "compiled layers"),
        (["memory.activations=disk"], "memory.folder", "needs a folder"),
        (["memory.activations=host", "layout.recompute=full"], "memory.activations", "chooses for each tensor"),
        (["memory.activations=host", "memory.activation_bits=4"], "memory.activations", "use one of the two"),
        ([*OPTIMAL, "layout.pipeline=2", "layout.schedule=bpipe"], "layout.schedule", "stores some differently"),
        ([*OPTIMAL, "train.fp8=rowwise", "cluster.chip=h100"], "train.fp8", "recomputes 16-bit inputs"),
        ([*OPTIMAL, "adapter.kind=lora"], "adapter.kind", "adapters do not go with"),
        ([*OPTIMAL, "layout.pipeline=2", "layout.schedule=zb-h1"], "layout.schedule", "deferred weight gradients"),
        (["layout.offload=true", "train.device=cpu"], "layout.offload", "without a GPU turn it off"),
        (["layout.compress=int8"], "layout.compress", "layout.replicate is 1"),
        (["layout.compress=onebit", "layout.replicate=2"], "layout.compress_warmup", "needs a warm-up"),
        ([*ONEBIT, "train.optimizer=muon"], "layout.compress", "sends Adam's momentum"),
        ([*ONEBIT, "train.dtype=float16"], "layout.compress", "changes their scale"),
        ([*ONEBIT, "train.guard=skip"], "layout.compress", "when train.guard"),
        ([*ONEBIT, "layout.offload=true"], "layout.compress", "on the host"),
        (["layout.sync_every=2"], "layout.sync_every", "only one replica"),
        (["layout.sync_overlap=2"], "layout.sync_overlap", "no effect"),
        ([*RARELY, "layout.sync_fragments=5"], "layout.sync_fragments", "5 fragments"),
        ([*RARELY, "layout.sync_overlap=4"], "layout.sync_overlap", "must be less than layout.sync_every = 4"),
        ([*RARELY, "layout.compress=powersgd"], "layout.compress", "is for gradients"),
        (["layout.sync_elastic=true"], "layout.sync_elastic", "none can be missing"),
        ([*RARELY, ELASTIC, "layout.compress_warmup=2"], "layout.compress_warmup", "a separate run"),
        ([*RARELY, ELASTIC, "layout.sync_fragments=2", "layout.sync_overlap=2"], "layout.sync_overlap", "must be less than 2"),
        ([*RARELY, ELASTIC, "train.checkpoint_every=6"], "train.checkpoint_every", "a multiple of layout.sync_every = 4"),
        ([*RARELY, ELASTIC, "train.elastic=true"], "train.elastic", "use one of the two"),
        (
            [*RARELY, ELASTIC, "layout.pipeline=2", "layout.schedule=pipedream"],
            "layout.schedule",
            "this schedule overlaps them",
        ),
        (
            ["objective.kind=grpo", "objective.rewards=a.py:f", "objective.pack=true", "train.global_batch=64", "train.clip=0",
             "layout.pipeline=2", "layout.schedule=pipedream"],
            "layout.schedule",
            "pipedream does not go with objective.pack: its updates count microbatches",
        ),
        ([*RARELY, "layout.offload=true"], "layout.sync_every", "on the host"),
        ([*RARELY, "train.dtype=float16"], "layout.sync_every", "its own loss scale"),
        ([*RARELY, "train.guard=rollback"], "layout.sync_every", "a rollback needs all"),
        ([*RARELY, *MIXTURE, "model.router=sigmoid"], "layout.sync_every", "biases of a sigmoid router"),
        (["layout.compress_weights=int8"], "layout.compress_weights", "is for replicas"),
        (["layout.shard=4", "layout.secondary_shard=3"], "layout.secondary_shard", "3 must divide"),
        (["layout.shard=4", "layout.secondary_shard=4"], "layout.secondary_shard", "and be smaller"),
        ([*SECONDARY, "layout.zero=2"], "layout.secondary_shard", "needs layout.zero = 3"),
        ([*SECONDARY, "adapter.kind=qlora"], "layout.secondary_shard", "in 4 bits"),
        ([*SECONDARY, "train.dtype=bfloat16", "train.fp8=rowwise"], "layout.secondary_shard", "gathers matrices in fp8"),
        (["layout.compress_shards=int4", "layout.shard=2", "layout.offload=true"], "layout.compress_shards", "on the host"),
        ([*QUANTIZED, "train.dtype=bfloat16", "train.fp8=rowwise"], "layout.compress_weights", "already gathers matrices in fp8"),
        ([*QUANTIZED, "adapter.kind=qlora"], "layout.compress_weights", "in 4 bits"),
        (["layout.zero=4"], "layout.zero", "not one of 1, 2, 3"),
        ([*MIXTURE, "layout.tensor=4", "model.expert_ffn=6", "layout.expert_tensor=true"], "layout.expert_tensor", "not divide"),
        (["layout.expert=2", "layout.shard=2"], "layout.expert", "the model has none"),
        ([*MIXTURE, "layout.expert=2"], "layout.expert", "regroup"),
        ([*MIXTURE, "layout.expert=3", "layout.shard=3", "train.global_batch=33"], "layout.expert", "whole experts"),
        (["train.global_batch=10", "train.microbatch=4"], "train.global_batch", "not a multiple"),
        (["layout.replicate=3", "layout.shard=2"], "train.global_batch", "5 x 3 x 2 = 30"),
        (["cluster.nodes=2", "cluster.devices_per_node=8"], "cluster.devices_per_node", "not the 1 rank of"),
        (["train.warmup=2000"], "train.warmup", "more than train.steps"),
        (["data.sets=a,b", "data.weights=1"], "data.weights", "1 weight for 2 sets"),
        (["data.sets=a,b", "data.weights=0,0"], "data.weights", "must not be negative"),
        (["name=a/b"], "name", "name of a folder"),
        (["train.lr=nan"], "train.lr", "finite"),
        (["train.lr"], "train.lr", "has no value"),
        (["train.steps=1e30"], "train.steps", "not a whole number"),
        (["train.steps=99999999999999999999"], "train.steps", "too large"),
        (["data.holdout=0.9"], "data.holdout", "at most 0.5"),
        (["train.cuda_graph=true", "layout.shard=2"], "train.cuda_graph", "the layout has 2 ranks"),
        (["train.cuda_graph=true", "train.device=cpu"], "train.cuda_graph", "only a GPU's"),
        (["train.cuda_graph=true", "train.dtype=float16"], "train.cuda_graph", "float16"),
        (["train.tune_products=true", "train.dtype=bfloat16", "layout.shard=2"], "train.tune_products", "only on one GPU"),
        (["train.tune_products=true", "train.dtype=bfloat16", "train.device=cpu"], "train.tune_products", "only on one GPU"),
        (["train.tune_products=true"], "train.tune_products", "16 bits"),
    ],
)  # fmt: skip
def test_each_rule_refuses_with_its_reason(overrides: list[str], key: str, phrase: str) -> None:
    found = problems(None, *overrides)
    assert [m for _, k, m in found if k == key and phrase in m], found


@pytest.mark.parametrize("saves", [LOSSLESS, OPTIMAL, ("memory.activation_bits=4",), ("memory.activations=host",)])
def test_one_rank_has_nobody_to_hand_saved_tensors_to(saves: tuple[str, ...]) -> None:
    assert read_run(None, [*saves, "layout.schedule=bpipe"]).layout.schedule == "bpipe"


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("true", True), ("false", False), ('"auto"', "auto")])
def test_a_switch_may_be_left_to_decide_for_itself(text: str, value: str | bool, tmp_path: Path) -> None:
    run = read_run(None, [f"--train.compile={text}"])
    assert run.train.compile is value or run.train.compile == value == "auto"
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    assert read_run(file).train.compile == value
    for wrong in ("1", "yes"):
        ((_, key, message),) = problems(None, f"--train.compile={wrong}")
        assert (key, "auto, true, false" in message) == ("train.compile", True)


H200 = ("cluster.chip=h200", "train.dtype=bfloat16")


@pytest.mark.parametrize(
    ("overrides", "compiled", "replayed"),
    [
        (H200, True, True),
        (["train.device=cuda", "train.dtype=bfloat16"], True, True),
        (["train.dtype=bfloat16"], False, False),  # this machine, as far as it says a CPU
        ([*H200, "layout.shard=2"], True, False),
        ([*H200, "layout.shard=2", "train.compile=false"], False, False),
        ([*H200, "layout.pipeline=2"], True, False),
        ([*H200, "layout.pipeline=2", "layout.schedule=zb-h1"], False, False),
        ([*H200, "train.compile=false", "train.cuda_graph=false"], False, False),
        (["cluster.chip=h200"], False, True),
        (["cluster.chip=h200", "train.dtype=float16"], True, False),
        ([*H200, "layout.recompute=attention"], False, True),
        ([*H200, "layout.recompute=full"], True, True),
        ([*H200, *LOSSLESS], False, True),
        ([*H200, "memory.activation_bits=4"], False, True),
        ([*H200, *MIXTURE], True, True),
        ([*H200, *MIXTURE, "model.expert_capacity=1.5"], True, False),
    ],
)
def test_what_gpus_do_without_being_asked(overrides: list[str], compiled: bool, replayed: bool) -> None:
    run = read_run(None, overrides)
    gpu = planned_on_gpu(run)
    assert (compiles(run, gpu=gpu), replays(run, gpu=gpu)) == (compiled, replayed)


def test_a_rule_is_silent_while_its_keys_cannot_be_read() -> None:
    assert [k for _, k, _ in problems(None, "model.heads=x", "model.kv_heads=3")] == ["model.heads"]


def test_a_preset_lies_under_the_keys_beside_it() -> None:
    run = read_run(None, ["model.preset=llama3-8b", "model.layers=2"])
    assert (run.model.layers, run.model.hidden, run.model.vocab) == (2, 4096, 128256)
    assert "llama3-8b" in problems(None, "model.preset=lama3-8b")[0][2]


def test_derived_keys_are_filled_in() -> None:
    run = read_run(None, ["model.hidden=192", "model.heads=6", "layout.shard=4"])
    assert (run.model.kv_heads, run.model.head_dim, run.model.ffn) == (6, 32, 512)
    assert run.train.microbatch == 8
    assert run.accumulation == 1
    assert run.cluster.devices_per_node == 4


def test_command_line_values_are_typed_by_their_key() -> None:
    run = read_run(
        None,
        [
            "train.steps=1e3",
            "train.lr=1",
            "data.sets=['a','b']",
            "data.weights=1,2",
            "model.qk_norm=true",
            "name=7",
        ],
    )
    assert (run.train.steps, run.train.lr, run.data.sets, run.data.weights) == (
        1000,
        1.0,
        ("a", "b"),
        (1.0, 2.0),
    )
    assert run.model.qk_norm is True
    assert run.name == "7"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_resolved_run_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    run = read_run(None, [f"model.preset={name}", "train.seq_len=1024", "name=x"])
    (tmp_path / "x.toml").write_text(to_toml(run))
    assert read_run(tmp_path / "x.toml") == run
    assert run_from_dict(json.loads(json.dumps(to_dict(run)))) == run


@given(st.text(max_size=30), st.floats(1e-12, 1e12), st.lists(st.text(min_size=1, max_size=10), max_size=3))
def test_any_text_and_number_survives_toml(text: str, number: float, names: list[str]) -> None:
    import tomllib

    run = Run(train=TrainConfig(lr=number, wandb=text))
    run = replace(run, data=replace(run.data, sets=tuple(names)))
    back = tomllib.loads(to_toml(run))
    assert back["train"]["lr"] == number
    assert back["train"]["wandb"] == text
    assert back["data"]["sets"] == names


@pytest.mark.parametrize(
    ("content", "phrase"),
    [(b"[model", "not valid TOML"), (b"\xff\xfe", "not UTF-8"), (b"model = 3\n", "is a section"), (b"a = " + b"[" * 3000, "TOML")],
)  # fmt: skip
def test_files_that_are_no_runs_get_a_sentence(tmp_path: Path, content: bytes, phrase: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    try:
        found = problems(file)
    except RecursionError:
        pytest.fail("a traceback instead of a sentence")
    assert found[0][0] == str(file)
    assert phrase in found[0][2] or "nested too deeply" in found[0][2]
    assert "cannot be read" in problems(tmp_path / "absent.toml")[0][2]
    assert problems(tmp_path)[0][2] == "is a folder; a run is a TOML file"
    (tmp_path / "run.toml").touch()
    assert problems(tmp_path)[0][2] == f"is a folder; a run is a TOML file, such as {tmp_path / 'run.toml'}"


def test_numbers_beyond_any_computer_get_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "huge.toml"
    file.write_text("[train]\nlr = 1" + "0" * 400 + "\n")
    ((where, key, message),) = problems(file)
    assert (where, key) == (str(file), "train.lr")
    assert message == "a number of 1329 bits is too large"
    file.write_text("[train]\nsteps = " + "9" * 5000 + "\n")
    assert problems(file) == [(str(file), "", "has a number with too many digits")]
    ((where, key, message),) = problems(None, "--train.steps=" + "9" * 5000)
    assert (where, key) == ("command line", "train.steps")
    assert message == f"{'9' * 20}… has too many digits"


def test_a_mark_before_the_text_is_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "marked.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\nsteps = 7\n")
    assert read_run(file).train.steps == 7


def test_the_schema_lists_every_declared_key_with_a_meaning() -> None:
    listed = {entry["key"] for entry in schema()}
    declared = {f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in fields(cls)} | {"name"}
    assert listed == declared == set(all_keys())
    assert all(len(entry["meaning"]) > 5 and entry["type"] for entry in schema())


@pytest.mark.parametrize(
    "text", ["model = 3", "[model]\nheads = 0", "[model]\nhidden = 'wide'", f"[model]\nx = {'[' * 9999}"]
)
def test_a_model_to_guess_with_whose_file_is_broken_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    overrides = ["serve.concurrency=1", "serve.speculate=draft", f"serve.draft={tmp_path}"]
    with pytest.raises(UserError, match=r"serve\.draft: .* cannot be read: "):
        read_planned(None, overrides)
