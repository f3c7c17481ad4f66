"""The memory of a serving device by owner, and how many KV cache pages fit besides the rest. The engine sizes its page pool with
this file, so it gets exactly what the plan says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwise.hardware.chips import CHIPS, Chip
from shardwise.hardware.engine_facts import engine_facts
from shardwise.plan.cost.stages import layers_of_stages
from shardwise.run import LayoutConfig, ModelConfig, Run
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.parameters import Parameter, first_parameters, last_parameters, layer_parameters
from shardwise.run.ranks.served import ServingRank
from shardwise.run.second_models.draft import draft_model, drafts
from shardwise.run.weights import QUANTIZED, is_reduced, parameter_bytes

PROMPT_ROWS = 256
"""Tokens whose logits are made at once where logprobs of a prompt are asked for."""


@dataclass(frozen=True)
class ServingMemory:
    """Bytes on one device."""

    weights: int
    activations: int
    """Of the largest step while it runs."""
    libraries: int
    page: int
    """One page of all layers on this device, including those of a draft model."""
    pages: int
    draft: int = 0
    """Weights of the draft model, on the device that holds it."""

    @property
    def cache(self) -> int:
        """All pages."""
        return self.page * self.pages

    @property
    def total(self) -> int:
        """The sum of all owners."""
        return self.weights + self.draft + self.activations + self.libraries + self.cache


def token_elements(model: ModelConfig, tensor: int = 1) -> int:
    """Elements that one layer caches per token on a rank."""
    if model.attention == "latent":
        return model.kv_rank + model.rope_dim
    return max(1, model.kv_heads // tensor) * (model.key_dim + model.head_dim)


def kv_dtype(run: Run) -> str:
    """The dtype of the KV cache."""
    return run.train.dtype if run.serve.kv_dtype == "auto" else run.serve.kv_dtype


def served_layers(run: Run) -> list[range]:
    """The layers of every stage."""
    layout = run.layout
    stages = layout.stages if len(layout.stages) == layout.pipeline else ()
    return layers_of_stages(replace(run, layout=LayoutConfig(pipeline=layout.pipeline, stages=stages)))


def weight_bytes(run: Run, stage: int = 0) -> int:
    """Bytes of the weights of a stage, on the rank that holds the most of it."""
    model, layout = run.model, run.layout
    stages = layout.pipeline
    # Shards are rounded up, so that the first rank has the largest.
    rank = ServingRank(layout, (stages - 1 - stage) * (layout.world // stages))

    def held(entries: Iterable[Parameter]) -> int:
        kept = (run.serve.weights, run.train.dtype)
        return sum(parameter_bytes(entry, *kept, rank.box(entry)[1], run.serve.head) for entry in entries)

    total = sum(held(layer_parameters(model, model.is_moe(layer))) for layer in served_layers(run)[stage])
    if stage == 0:
        total += held(first_parameters(model))
    if stage == stages - 1:
        total += held(last_parameters(model))
        if model.tied_embeddings and stages > 1:
            total += held(first_parameters(model)[:1])
    return total


def activation_bytes(run: Run, stage: int = 0, packed: bool = False) -> int:
    """Peak bytes of the largest step besides weights and pages: the residual stream and the widest part of a layer, or behind the
    last layer the logits of some prompt tokens, whose logprobs are computed in float32; on the stage that samples, the logits of
    every sequence, all-gathered over tensor ranks, and the copies that sampling makes; and one quantized matrix that is
    dequantized for its GEMM."""
    model, serve, layout = run.model, run.serve, run.layout
    tokens, each, tensor = serve.max_step_tokens, DTYPE_BYTES[run.train.dtype], layout.tensor
    wide = max(2 * model.ffn, model.heads * model.key_dim + token_elements(model))
    if model.experts:
        wide = max(wide, model.experts_per_token * (model.hidden + 2 * model.expert_ffn))
    layer = tokens * (3 * model.hidden + 1.5 * wide / tensor) * each
    if serve.invariant and layout.world > layout.replicate * layout.pipeline:  # partial sums, and each expert's output
        apart = tensor * (tensor > 1) + (model.experts_per_token if model.experts else 0)
        layer += tokens * model.hidden * apart * each
    gathered = 2 * each / tensor if tensor > 1 else 0
    logits = min(serve.max_sequences * (1 + drafts(run)), tokens) * model.vocab * (each + 4 + gathered)
    if stage == layout.pipeline - 1:
        copies = 20 if serve.invariant else 8  # an invariant order of the vocabulary is a sort
        prompts = min(PROMPT_ROWS, tokens) * model.vocab * (each + copies + gathered)
        layer = max(layer, 2 * tokens * model.hidden * each + prompts)
    unpacked = 0.0
    if packed or serve.weights in QUANTIZED:
        kinds = {model.is_moe(layer) for layer in range(model.layers)}
        entries = [entry for moe in kinds for entry in layer_parameters(model, moe) if is_reduced(entry)]
        unpacked = max(entry.numel for entry in entries) * each / tensor * (2 if model.gated else 1)
    if serve.head in QUANTIZED and stage == layout.pipeline - 1:
        unpacked = max(unpacked, model.vocab * model.hidden * each / tensor)
    return int(layer + (logits if stage == layout.pipeline - 1 else 0) + unpacked)


def draft_run(run: Run) -> Run | None:
    """The draft model as a served run: unsharded, on the device of the last stage, which samples; None where there is no draft
    model. Its weights are kept in the compute dtype, its KV cache in the dtype of the large model's."""
    model = draft_model(run)
    if model is None:
        return None
    serve = replace(
        run.serve, weights="auto", head="auto", speculate="none", draft="", invariant=False
    )  # it only drafts
    return replace(run, model=model, layout=LayoutConfig(), serve=serve)


def page_bytes(run: Run, stage: int = 0) -> int:
    """Bytes of one page for the layers of a stage."""
    layers = len(served_layers(run)[stage])
    return int(
        run.serve.page_tokens * layers * token_elements(run.model, run.layout.tensor) * DTYPE_BYTES[kv_dtype(run)]
    )


def device_bytes(chip: Chip) -> int:
    """Memory of a device, as its driver reports it where that was measured. Half of a host's memory is left to other processes."""
    if chip.name == "cpu":
        return CHIPS["cpu"].memory // 2
    facts = engine_facts(chip)
    return int(facts.profile.device_bytes) if facts.own and facts.profile.device_bytes else int(chip.memory)


def serving_memory(run: Run, chip: Chip, total: int = 0, weights: int = 0) -> ServingMemory:
    """The memory of a device, of `total` bytes where the driver reports them. Pages take the memory that is left, but no more than
    all sequences could ever fill. All stages have the same number of pages: that of the stage with the least room. `weights`: the
    bytes of the weights, where the run does not determine how they are stored."""
    of_stages = (stage_memory(run, stage, chip, total, weights) for stage in range(run.layout.pipeline))
    return min(of_stages, key=lambda memory: (memory.pages, -memory.total))


def stage_memory(run: Run, stage: int, chip: Chip, total: int = 0, weights: int = 0) -> ServingMemory:
    """The same for a device of one stage."""
    serve, page, draft_weights = run.serve, page_bytes(run, stage), 0
    activations = activation_bytes(run, stage, weights > 0)
    weights = weights or weight_bytes(run, stage)
    draft = draft_run(run) if stage == run.layout.pipeline - 1 else None
    if draft is not None:  # the two models run in turns
        page += page_bytes(draft)
        draft_weights, activations = weight_bytes(draft), max(activations, activation_bytes(draft))
    libraries = 0 if chip.name == "cpu" else int(engine_facts(chip).profile.library_bytes)
    taken = weights + draft_weights + activations + libraries
    room = int((total or device_bytes(chip)) * (1 - run.cluster.headroom)) - taken
    if serve.memory_gib:
        room = int(serve.memory_gib * 2**30)
    pages = max(0, min(room // max(1, page), most_pages(run)))
    return ServingMemory(weights, activations, libraries, page, pages, draft_weights)


def most_pages(run: Run) -> int:
    """Pages that all sequences could ever fill, and the one that is never given away."""
    return run.serve.max_sequences * -(-run.model.max_positions // run.serve.page_tokens) + 1


def host_pages(run: Run, memory: ServingMemory) -> int:
    """Pages that may be swapped to the host. Those of a stage without layers hold no bytes, and there would be billions."""
    room = int(run.serve.swap_gib * 2**30) // max(1, memory.page)
    return min(room, most_pages(run)) if run.serve.preemption == "swap" else 0
