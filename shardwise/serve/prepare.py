"""Prepares an engine: the memory for its pages, as planned, and its runner. Runs that no engine can serve are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from shardwise.hardware import CHIPS, chip_of_driver_name
from shardwise.hardware.engine_facts import LENDER
from shardwise.model.invariant.network import make_invariant
from shardwise.model.transformer import Transformer
from shardwise.plan.serving.pool import ServingMemory, device_bytes, draft_run, kv_dtype, serving_memory
from shardwise.run import PRESETS, Problem, Run, UserError
from shardwise.run.rules.second_models import speculation_rules
from shardwise.run.second_models.draft import drafts
from shardwise.run.weights import head_rule
from shardwise.serve.runner import Runner

if TYPE_CHECKING:
    from shardwise.parallel.inference import Peers

Made = TypeVar("Made", bound=Runner)


def check_served(run: Run) -> None:
    """Raise every setting of a run that no engine supports."""
    problems = []
    if run.model.scores:
        problems.append(Problem("is a reward model, which gives a score and no tokens", "model.scores"))
    if run.serve.invariant and run.serve.weights not in ("auto", run.train.dtype):
        reason = "goes with weights as they were trained: their bits would not be those of training; use auto"
        problems.append(Problem(reason, "serve.weights"))
    if run.serve.invariant and run.serve.head != "auto":
        problems.append(Problem("goes with a head as it was trained; use auto", "serve.head"))
    if run.serve.invariant and kv_dtype(run) != run.train.dtype:
        reason = "goes with keys and values as they are computed: training never rounds them; use auto"
        problems.append(Problem(reason, "serve.kv_dtype"))
    rules = (*speculation_rules(run), head_rule(run))
    problems += [Problem(rule.reason(), rule.key) for rule in rules if rule.broken]
    if problems:
        raise UserError(*problems)


def memory_of(run: Run, device: torch.device, sharing: int = 1, weights: int = 0) -> ServingMemory:
    """The planned memory of a rank on a device that `sharing` ranks share. `weights`: the bytes of all weights if some are
    quantized, otherwise 0."""
    chip, total = CHIPS["cpu"], device_bytes(CHIPS["cpu"])
    if device.type == "cuda":
        chip = chip_of_driver_name(torch.cuda.get_device_name(device)) or CHIPS[LENDER]
        total = torch.cuda.get_device_properties(device).total_memory
    total //= sharing
    memory = serving_memory(run, chip, total, weights)
    if memory.pages < 2:
        weights = memory.weights + memory.draft
        raise UserError(
            f"{weights / 2**30:.1f} GiB of weights and {memory.activations / 2**30:.1f} GiB of activations leave no room "
            f"for keys and values in {total / 2**30:.1f} GiB; use a larger device or a smaller serve.max_step_tokens"
        )
    return memory


def load_draft(run: Run, device: torch.device) -> Transformer | None:
    """The draft model with its weights; None if the run has none."""
    if run.serve.speculate != "draft":
        return None
    if run.serve.draft in PRESETS:
        reason = f'"{run.serve.draft}" is a preset, which has no weights: a server needs a checkpoint'
        raise UserError(Problem(reason, "serve.draft"))
    from shardwise.checkpoint.weights import load_model

    dtype = getattr(torch, run.train.dtype)
    model, _ = load_model(run.serve.draft, dtype, device)
    model.dtype = dtype
    return model.requires_grad_(False)


def draft_runner_of(model: Transformer | None, run: Run, pages: int, longest: int = 0) -> Runner | None:
    """A runner for the draft model: unsharded on this device, with as many pages and slots as the large model."""
    draft = draft_run(run)
    if model is None or draft is None:
        return None
    longest = longest or run.model.max_positions
    if model.config.position == "learned" and longest > model.config.max_positions:
        reason = (
            f"has {model.config.max_positions} learned positions, and sequences may have {longest} tokens; use another"
        )
        raise UserError(Problem(reason, "serve.draft"))
    return runner_of(
        model, draft, pages, longest, guesses=1
    )  # it computes the accepted tokens that are new to it, often two


def runner_of(
    model: Transformer, run: Run, pages: int, longest: int = 0, peers: Peers | None = None, guesses: int = 0
) -> Runner:
    """A runner for a model in memory. Sequences have at most as many tokens as the model has positions, or `longest`: rotary
    positions go on beyond the trained length."""
    return runner_of_kind(Runner, model, run, pages, longest, peers, guesses)


def runner_of_kind(
    kind: type[Made], model: Transformer, run: Run, pages: int, longest: int, peers: Peers | None, guesses: int = 0
) -> Made:
    """The same, for a given class of runner."""
    if run.serve.invariant and not model.invariant:
        make_invariant(model)
    dtypes = {"fp8": torch.float8_e4m3fn}
    dtype = dtypes.get(kv_dtype(run)) or getattr(torch, kv_dtype(run))
    sequences = min(run.serve.max_sequences, run.serve.max_step_tokens)
    longest = longest or run.model.max_positions
    return kind(model, pages, run.serve.page_tokens, sequences, longest, dtype, peers, guesses or drafts(run))
