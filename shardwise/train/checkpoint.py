"""Saving a training run and taking it up again, on the same layout or another.

A checkpoint is a folder `checkpoints/step-00000100` of plain files: the resolved run, weights and optimizer state as
safetensors, counters as JSON, the tokenizer. It is written under another name and renamed when complete, so a folder with
a step's name is whole. Nothing in it can execute code when it is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shardwise.data.tokenizer import Tokenizer
from shardwise.run import Problem, Run, UserError, read_run, to_dict, to_toml
from shardwise.train.loss_scale import LossScale
from shardwise.train.state import collect, restore
from shardwise.train.step import Trainee
from shardwise.train.watch.guard import History

FORMAT = 1


def folder_of_step(out: Path, step: int) -> Path:
    """Where a run folder keeps the checkpoint of a step."""
    return out / "checkpoints" / f"step-{step:08d}"


def complete_checkpoints(out: Path) -> list[Path]:
    """A run folder's checkpoints, oldest first."""
    return sorted(p for p in (out / "checkpoints").glob("step-*") if p.is_dir())


def newest_step(out: Path) -> int:
    """The step of the newest checkpoint, -1 when there is none."""
    saved = complete_checkpoints(out)
    return int(saved[-1].name.removeprefix("step-")) if saved else -1


def save(trainee: Trainee, out: Path, tokenizer: Tokenizer, fingerprint: str) -> Path:
    """Write a checkpoint of the current step and drop the oldest beyond `train.keep`. Every rank must call it."""
    target = folder_of_step(out, trainee.step)
    whole = collect(trainee)
    if whole is None:
        return target
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for kind in ("model", "optimizer"):
        tensors = {name.removeprefix(f"{kind}/"): t for name, t in whole.items() if name.startswith(f"{kind}/")}
        save_file(tensors, draft / f"{kind}.safetensors")
    (draft / "run.toml").write_text(to_toml(trainee.run))
    tokenizer.save(draft)
    state = dict(
        format=FORMAT,
        step=trainee.step,
        tokens=trainee.tokens,
        loss_scale=asdict(trainee.loss_scale),
        history=asdict(trainee.history),
        data=fingerprint,
    )
    (draft / "state.json").write_text(json.dumps(state, indent=1) + "\n")
    for path in draft.iterdir():
        with path.open("rb") as f:
            os.fsync(f.fileno())
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    for old in complete_checkpoints(out)[: -trainee.run.train.keep]:
        shutil.rmtree(old)
    return target


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys of a section that changed, as `key: before -> now`."""
    return [f"{k}: {before[k]!r} -> {now[k]!r}" for k in now if k in before and before[k] != now[k]]


def check_same_job(checkpoint: Path, run: Run) -> None:
    """Refuse to go on from a checkpoint of another model; the rest of the run may change."""
    before = to_dict(read_run(checkpoint / "run.toml"))["model"]
    now = to_dict(run)["model"]
    changed = [d for d in differences(before, now) if not d.startswith("preset:")]
    if changed:
        reason = (
            "holds another model: " + "; ".join(changed) + ". Give --out another folder, or restore the model's keys"
        )
        raise UserError(Problem(reason, where=str(checkpoint)))


def load(trainee: Trainee, checkpoint: Path, fingerprint: str) -> None:
    """Bring a freshly built trainee to the state of a checkpoint."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        if state["format"] > FORMAT:
            reason = f"was written by a newer version (format {state['format']}; this one reads up to {FORMAT})"
            raise UserError(Problem(reason, where=str(checkpoint)))
        whole = {
            f"{kind}/{name}": tensor
            for kind in ("model", "optimizer")
            for name, tensor in load_file(checkpoint / f"{kind}.safetensors").items()
        }
    except (OSError, ValueError, KeyError, SafetensorError) as e:
        raise UserError(Problem(f"is not a whole training checkpoint: {e}", where=str(checkpoint))) from None
    if state["data"] != fingerprint:
        reason = "was trained on other data than the run now names (or the built-in corpus of another Python version)"
        raise UserError(Problem(reason, key="data.sets", where=str(checkpoint)))
    restore(trainee, whole)
    trainee.loss_scale = LossScale(**state["loss_scale"])
    trainee.history = History(**state.get("history", {}))
    trainee.step, trainee.tokens = state["step"], state["tokens"]
