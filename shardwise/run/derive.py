"""Fills in the keys that a user may leave to be derived, so that everything downstream reads plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from shardwise.run.config import ModelConfig, Run
from shardwise.run.sections.layout import LayoutConfig
from shardwise.run.sections.objective import facts_of


def derive_model(model: ModelConfig, seq_len: int) -> ModelConfig:
    """The model with every derived key filled in."""
    if model.attention == "latent":
        head_dim = model.nope_dim + model.rope_dim
    else:
        head_dim = model.head_dim or model.hidden // model.heads
    ffn = model.ffn
    if not ffn:
        ffn = -(-8 * model.hidden // 3 // 64) * 64 if model.gated else 4 * model.hidden
    positions = model.max_positions or seq_len
    return replace(
        model,
        kv_heads=model.kv_heads or model.heads,
        head_dim=head_dim,
        ffn=ffn,
        max_positions=positions,
        rope_original=model.rope_original or positions,
        expert_ffn=(model.expert_ffn or ffn) if model.experts else 0,
    )


REPEATS_PARTS = ("attention", "operations", "optimal")
"""Modes that recompute parts of a layer; a compiled layer can only be recomputed in full."""

JOINED = 2**22
"""Values of the largest gradients that tensor ranks all-reduce together with others, in one buffer."""

CHUNK_BYTES = 2**31
"""Bytes of logits that a chunked loss holds at a time. Of the sizes tried on an H200, GEMMs lose least at this one: smaller
chunks add to the head's weight gradient more often, larger ones do not fit the cache."""


LINE, VECTOR = 64, 8
"""Elements of 16 bits in a line of a GPU's memory, and in what it loads at once."""


def chunk_rows(tokens: int, row_bytes: int, most: int = CHUNK_BYTES) -> int:
    """Tokens whose logits a chunked loss holds at a time: all chunks have the same size, so that their GEMMs have one shape."""
    chunks = -(-tokens // max(1, most // row_bytes))
    return -(-tokens // max(1, chunks))


def logit_columns(columns: Any) -> Any:
    """Columns of a loss's logits, those beyond the vocabulary zero: a multiple of 16 bytes, and of whole lines where that adds less
    than a hundredth. GEMMs run at a sixth of their speed otherwise (`alignment` in `hardware/gemm.py`): GPT-2 has 50,257 tokens."""
    unit = VECTOR + (LINE - VECTOR) * (columns >= 100 * LINE)
    return columns + (-columns % unit) * (columns % VECTOR != 0)


def chunk_bytes(run: Run) -> int:
    """Bytes of logits that a run's chunked loss holds at a time: fewer with 4-bit weights, which are used to save memory."""
    return CHUNK_BYTES // 8 if run.adapter.kind == "qlora" else CHUNK_BYTES


def forward_passes(run: Run) -> tuple[int, int]:
    """Extra forward passes of a step that are not trained on: of a frozen network, and of the trained one. With adapters a network
    is its own reference: the same network with its adapters off."""
    facts = facts_of(run.objective)
    own = run.adapter.used and not run.objective.reference and not facts.teacher
    return (0, facts.reference + facts.forward_only) if own else (facts.reference, facts.forward_only)


def planned_on_gpu(run: Run) -> bool:
    """Whether a run is meant for GPUs, judged by its device or its cluster's chip."""
    device, chip = run.train.device, run.cluster.chip
    return chip not in ("", "cpu") if device == "auto" else device == "cuda"


def chunks_loss(run: Run, *, gpu: bool) -> bool:
    """Whether the loss is computed in chunks of tokens, with its gradients computed in the forward pass."""
    if run.train.invariant:  # it uses the loss head that computes logprobs
        return False
    if run.train.loss != "auto":
        return run.train.loss == "chunked"
    low = run.train.dtype in ("bfloat16", "float16")
    return gpu and low


def compiles(run: Run, *, gpu: bool) -> bool:
    """Whether layers and the norm in front of the head are compiled."""
    if run.train.invariant:  # a compiler may change the order of sums
        return False
    if run.train.compile != "auto":
        return run.train.compile
    if run.memory.replaces_saved:  # the compiler decides what a compiled layer saves
        return False
    if run.adapter.kind == "qlora":  # its matrices are dequantized for each GEMM, which leaves little to fuse
        return False
    low = run.train.dtype in ("bfloat16", "float16")
    return gpu and low and run.layout.recompute not in REPEATS_PARTS and not run.layout.splits_backward


def recomputes_in_graph(run: Run, *, gpu: bool) -> bool:
    """Whether compiled layers that are recomputed are one graph with their recomputation, so that nothing is recomputed beyond what
    the backward pass needs."""
    whole = compiles(run, gpu=gpu) and run.layout.recompute in ("full", "budget")
    return whole and bool(compiled_as_one(run.model, run.layout))


def compiled_as_one(model: ModelConfig, layout: LayoutConfig) -> Any:
    """Whether a layer that is compiled is one graph, for sizes that are numbers or arrays. Those with experts, with attention over
    blocks of other ranks, and with GEMMs between asynchronous collectives are cut into several."""
    whole = not model.experts and not layout.async_tensor and not layout.offload
    return whole & ((layout.context == 1) | (layout.context_method == "ulysses"))


def uses_varlen_attention(run: Run, *, gpu: bool) -> bool:
    """Whether attention takes cu_seqlens and the window, and needs no mask."""
    model = run.model
    if run.train.invariant:
        return True
    low = run.train.dtype in ("bfloat16", "float16")
    fits = model.key_dim == model.value_dim and model.head_dim % 8 == 0 and model.head_dim <= 256
    return gpu and low and fits and (run.layout.context == 1 or run.layout.context_method == "ulysses")


def keeps_compute_copies(run: Run, *, gpu: bool) -> bool:
    """Whether 16-bit copies of the layers' matrices are kept between steps. This is for one GPU, where all of them would be alive
    until the backward pass anyway, and where no gradient is accumulated or inspected by itself."""
    train, layout = run.train, run.layout
    if run.memory.hosts_optimizer:  # the parameters themselves are in host memory
        return True
    alone = layout.world == 1 and not layout.offload and layout.recompute == "none"
    plain = train.dtype == "bfloat16" and train.fp8 == "none" and train.optimizer == "adamw" and not train.recheck_every
    once = train.microbatch > 0 and run.accumulation == 1  # 0: a search has not chosen it yet
    return gpu and alone and plain and once and not run.adapter.used  # adapters leave little to cast


def gathers_in_place(run: Run, *, gpu: bool) -> bool:
    """Whether ZeRO's all-gathers write where the passes read (`parallel/in_place.py`); those that change what is sent do not."""
    layout = run.layout
    changed = layout.compress_weights != "none" or layout.secondary_shard > 1 or layout.offload or layout.asynchronous
    return gpu and run.train.backend != "gloo" and not changed


def gathers_embedding_apart(run: Run, *, frozen: bool = False) -> bool:
    """Whether the embedding is gathered by itself, and freed once a microbatch's tokens are embedded: the backward pass does not
    read it. A `frozen` network is sharded as by ZeRO-3. In a pipeline no other parameters outside of the layers are beside it."""
    sharded = run.layout.gathers_each_pass or frozen
    return sharded and run.layout.pipeline == 1 and not run.model.tied_embeddings


def gathers_head_apart(run: Run, *, gpu: bool, frozen: bool = False) -> bool:
    """Whether, besides, the head is gathered and its gradient reduced by itself, first of all. That is done where gradients are
    exchanged: in the dtype of the sum, it would take more memory than there is while all activations are saved."""
    near = bool(fresh_and_near(replace(run.layout, zero=3), run.cluster.devices_per_node))
    return gathers_embedding_apart(run, frozen=frozen) and near and may_exchange(run, gpu=gpu)


def reduces_in_place(run: Run, *, gpu: bool) -> bool:
    """Whether gradients, of fewer bits than their sum, are sent without `fully_shard`'s copies too. It keeps those that replicas
    add up afterwards, or that are sent in fewer bits."""
    layout = run.layout
    whole = layout.compress_shards == "none" and (layout.replicate == 1 or layout.replicas_apart)
    return may_exchange(run, gpu=gpu) and whole


def exchanges_gradients(run: Run, *, gpu: bool) -> bool:
    """Whether ranks that share a machine send each other gradients of 16 bits and add them up, instead of a reduce-scatter in the
    dtype of the sum. Gradients that are added up before they are sent, or over replicas afterwards, have that dtype."""
    return may_exchange(run, gpu=gpu) and bool(fresh_and_near(run.layout, run.cluster.devices_per_node))


def may_exchange(run: Run, *, gpu: bool) -> bool:
    """The part of that which is not about sizes: gradients have fewer bits than their sum."""
    low = run.train.dtype in ("bfloat16", "float16") and run.train.reduce_dtype == "float32"
    return gathers_in_place(run, gpu=gpu) and low


def fresh_and_near(layout: LayoutConfig, devices_per_node: Any) -> Any:
    """The part that is, for sizes that are numbers or arrays. Split backward passes add up gradients under any stage."""
    near = layout.tensor * layout.shard * layout.context <= devices_per_node
    fresh = layout.zero >= 2 and layout.compress_shards == "none"
    return near & fresh & ((layout.replicate == 1) | layout.replicas_apart)


def tunes_gemms(run: Run, *, gpu: bool) -> bool:
    """Whether large GEMMs use the algorithm that was fastest in a trial."""
    low = run.train.dtype in ("bfloat16", "float16")
    return gpu and low and run.train.tune_products is not False and not run.train.invariant


def must_launch(run: Run, *, gpu: bool) -> str:
    """Why the passes of a step can't be captured in a CUDA graph; empty if they can."""
    model, train, layout = run.model, run.train, run.layout
    if not gpu:
        return "only a GPU's kernels are recorded"
    if layout.world > 1:
        return f"only steps of one GPU are, and the layout has {layout.world} ranks"
    if layout.offload:
        return "not with layout.offload, which moves parameters while it computes"
    if run.memory.hosts_optimizer:
        return "not with memory.optimizer = host, to which gradients go as they are made"
    if run.objective.kind == "grpo" and run.objective.pack:
        return "not with objective.pack, with which every step has another number of rows"
    if train.dtype == "float16":
        return "not in float16, whose loss scale changes from step to step"
    if model.experts and (train.dtype != "bfloat16" or model.expert_capacity > 0):
        return "experts with a capacity, or in another dtype than bfloat16, wait for the host"
    return ""


def replays(run: Run, *, gpu: bool) -> bool:
    """Whether the passes of a step may be captured in a CUDA graph and replayed."""
    return bool(run.train.cuda_graph) and not must_launch(run, gpu=gpu)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic, which pushes singular values towards 1 fastest (Jordan et al. 2024)."""
NEWTON_SCHULZ_ITERATIONS = 5
"""Iterations of the quintic in Muon."""

FP8_ALIGNMENT = 16
"""The sides of an fp8 GEMM must be multiples of this."""


def uses_fp8_gemm(run: Run, rows: int, columns: int) -> bool:
    """Whether a layer's matrix, in the shape that a rank holds, is multiplied in fp8."""
    tokens = run.train.microbatch * run.train.seq_len // run.layout.context
    return run.train.fp8 != "none" and all(side and side % FP8_ALIGNMENT == 0 for side in (tokens, rows, columns))


def uses_fp8_all_gather(run: Run, rows: int, columns: int, ranks: int) -> bool:
    """Whether the shards of such a matrix over `ranks` ranks are gathered in fp8."""
    even = run.train.fp8 == "tensorwise" or rows % ranks == 0
    return uses_fp8_gemm(run, rows, columns) and even and not run.layout.offload


def shard_dim(experts: Sequence[int], ranks: int) -> int:
    """The dimension along which matrices [experts, rows, columns] are sharded over `ranks`: the first that `ranks` divides.

    Sharded by expert, fewer experts than ranks would leave most ranks with only padding. `fully_shard` pads only the first
    dimension, so that one is used if no dimension is divisible.
    """
    return next((dim for dim, length in enumerate(experts) if length % ranks == 0), 0)


def derive(run: Run) -> Run:
    """The run with every derived key filled in."""
    if run.objective.kind == "reward":  # a reward model has its own head
        run = replace(run, model=replace(run.model, scores=True, tied_embeddings=False))
    train, cluster = run.train, run.cluster
    if run.layout.auto:  # the search divides batch and devices
        return replace(run, model=derive_model(run.model, train.seq_len))
    if not train.microbatch:
        train = replace(train, microbatch=max(1, train.global_batch // run.layout.data_ranks))
    if not cluster.devices_per_node:
        cluster = replace(cluster, devices_per_node=-(-run.layout.world // cluster.nodes))
    return replace(run, model=derive_model(run.model, train.seq_len), train=train, cluster=cluster)


def expert_capacity(model: ModelConfig, length: int) -> int:
    """Choices that each expert accepts from a sequence of that length."""
    return ceil(model.expert_capacity * length * model.experts_per_token / model.experts)


def accepted_choices(model: ModelConfig, length: int) -> int:
    """Choices that the experts accept from such a sequence when the router's load is even."""
    choices = length * model.experts_per_token
    return min(choices, model.experts * expert_capacity(model, length)) if model.expert_capacity else choices
