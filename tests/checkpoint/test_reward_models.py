"""Reward models as `AutoModelForSequenceClassification` has them: a text's score is that of its last token, there and back; with
adapters, merged or in peft's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import MODELS, NO_TOKENS, assert_same_tensors, edit_config, tokens, transformers

from shardwise.checkpoint.huggingface import from_hf, to_hf
from shardwise.checkpoint.huggingface.peft import WEIGHTS, from_peft, to_peft
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.weights import load_model
from shardwise.data.build import build
from shardwise.data.chat.job import ChatOptions
from shardwise.run import UserError, read_run, run_from_dict
from shardwise.train import loop
from shardwise.train.progress.metrics import read_metrics


def save(folder: Path, kind: str, settings: dict[str, Any], labels: int = 1) -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**settings, **NO_TOKENS | {"pad_token_id": 0}, num_labels=labels)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1 if "norm" in name or ".ln_" in name else 0, 0.2)
    model.save_pretrained(folder)
    return model


def our_scores(folder: Path, given: torch.Tensor) -> torch.Tensor:
    model, run = load_model(folder, torch.float32)
    assert run.objective.kind == "reward"
    with torch.no_grad():
        return model(given).result[:, -1]


def their_scores(model: Any, given: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(given.clamp(min=1)).logits


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2", "qwen3-moe", "mixtral"])
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = save(tmp_path / "hf", *MODELS[name])
    from_hf(tmp_path / "hf", tmp_path / "ours")
    given, want = tokens().clamp(min=1), their_scores(model, tokens())
    assert want.shape == (2, 1)
    torch.testing.assert_close(our_scores(tmp_path / "ours", given), want, atol=1e-4, rtol=1e-4)
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    edit_config(tmp_path / "back", pad_token_id=0)
    again, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert type(again) is type(model)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(their_scores(again, tokens()), want, atol=1e-6, rtol=0)


def test_a_model_of_several_labels_is_refused(tmp_path: Path) -> None:
    for labels in (2, 3):
        save(tmp_path / f"{labels}", *MODELS["llama2"], labels=labels)
        with pytest.raises(UserError, match=rf"is of {labels} labels"):
            from_hf(tmp_path / f"{labels}", tmp_path / "ours")


def language_model(folder: Path) -> Any:
    torch.manual_seed(6)
    kind, settings = MODELS["llama3"]
    config = getattr(transformers, f"{kind}Config")(
        **settings | {"vocab_size": 257, "max_position_embeddings": 128}, **NO_TOKENS
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "language")
    from_hf(folder / "language", folder / "base")
    return model


@pytest.mark.drawn(group="resharding")
def test_adapters_of_a_reward_model_are_merged_resumed_and_written_for_peft(tmp_path: Path) -> None:
    """The head begins anew beside a language model, whose own is tied, and is learned whole."""
    language_model(tmp_path)
    pairs = [{"prompt": f"{n}?", "chosen": "yes" * n, "rejected": "no"} for n in range(1, 9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    build([tmp_path / "pairs.jsonl"], tmp_path / "set", workers=1, chat=ChatOptions())
    model = read_run(tmp_path / "base" / "run.toml").model
    train = dict(
        steps=3,
        global_batch=2,
        microbatch=1,
        seq_len=64,
        eval_every=0,
        device="cpu",
        lr=0.02,
        warmup=0,
        dtype="float32",
    )

    def run(steps: int) -> Any:
        sections = dict(model={k: v for k, v in vars(model).items() if k != "scores"}, objective=dict(kind="reward"))
        more = dict(weights=str(tmp_path / "base"), checkpoint_every=2, steps=steps, schedule="constant")
        return run_from_dict(
            sections
            | dict(adapter=dict(kind="lora", rank=4), data=dict(sets=[str(tmp_path / "set")]), train=train | more)
        )

    loop.train(run(3), tmp_path / "run")
    for steps in (2, 3):
        loop.train(run(steps), tmp_path / "again")
    losses = [[r["loss"] for r in read_metrics(tmp_path / name) if "loss" in r] for name in ("run", "again")]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    held = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert "head.weight" in held
    given = torch.randint(1, 256, (2, 20), generator=torch.Generator().manual_seed(3))
    want = our_scores(tmp_path / "run", given)
    to_hf(tmp_path / "run", tmp_path / "merged", merge=True)
    edit_config(tmp_path / "merged", pad_token_id=0)
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(their_scores(merged, given), want, atol=1e-5, rtol=1e-5)

    to_peft(tmp_path / "run", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert torch.equal(load_file(tmp_path / "peft" / WEIGHTS)["base_model.model.score.weight"], held.get("head.weight"))
    from_peft(tmp_path / "peft", tmp_path / "back", tmp_path / "base")
    torch.testing.assert_close(our_scores(tmp_path / "back", given), want, atol=0, rtol=0)

    peft = pytest.importorskip("peft", reason="peft is not installed: `pip install peft` brings this comparison")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "language", num_labels=1, pad_token_id=0
    )
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    torch.testing.assert_close(their_scores(theirs, given), want, atol=1e-5, rtol=1e-5)
    theirs.save_pretrained(tmp_path / "written")
    from_peft(tmp_path / "written", tmp_path / "read", tmp_path / "base")
    torch.testing.assert_close(our_scores(tmp_path / "read", given), want, atol=0, rtol=0)
