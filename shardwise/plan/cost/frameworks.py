"""How a training framework executes a layout: the facts about software that change what a step costs.

A layout says where things are; a framework says what the program that runs it saves, fuses, overlaps and recomputes. The first one
is Shardwise; the others are the programs whose published measurements the planner is validated against. What a program does is a
fact and is listed here. How well it does it is fitted, and is in `fitted.json` under the framework's `family`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Framework:
    """One program, or one era of it."""

    name: str
    family: str
    """Frameworks of a family have the same fitted constants."""
    attention: Literal["unfused", "flash1", "flash2", "flash3"] = "flash2"
    kernels: Literal["eager", "jit", "compiled"] = "compiled"
    """How elementwise work is fused: not at all, a few kernels by hand, or by a compiler."""
    sequence_parallel: bool = True
    waits_to_regather: bool = False
    """Whether the step waits where the sequence is gathered again for the backward pass, rather than overlapping that with the GEMM
    of the input gradient."""
    dropout: bool = False
    parameter_bytes: float = 4.0
    """Bytes of a parameter as it is held, before it is all-gathered or cast."""
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    """Moments, and a float32 copy of the parameters where they are held in 16 bits."""
    update_bytes: float = 40.0
    """Bytes that AdamW reads and writes for each parameter: gradient, master copy and moments in float32, the norm's pass over the
    gradients, their zeroing, and the parameter written in 16 bits."""
    gather_bytes: float = 2.0
    reduce_bytes: float = 4.0
    """Bytes of a gradient element on the wire."""
    accumulate_bytes: float = 12.0
    """Bytes moved per element to accumulate a weight gradient over microbatches; 0 where it is reduced every time instead."""
    reduce_every_microbatch: bool = True
    """ZeRO-2 and 3: whether gradients are reduced after every microbatch or once a step."""
    tensor_overlap: float = 0.0
    """Share of tensor traffic that can overlap with GEMMs."""
    gradients_overlap: bool = True
    """Whether gradients are reduced while the last backward pass still runs."""
    gather_overlap: bool = True
    """Whether updated parameters are gathered while the first forward pass runs."""
    pipeline_blocks: bool = False
    """Whether a stage waits for its transfers where it could compute."""
    zero_overlap: float = 1.0
    """Share of ZeRO-3's traffic that can overlap with the passes."""
    tensors_apart: bool = False
    """ZeRO: whether each tensor is a message of its own, rather than a layer or a bucket."""
    expert_overlap: float = 0.0
    """Share of the experts' all-to-all that can overlap with another microbatch's work."""
    expert_once: bool = False
    """Whether a token is sent to a machine once, however many of its experts are there."""
    dispatcher: str = "alltoall"
    """How tokens reach their experts: `alltoall`, `allgather`, or a dedicated library: `deepep`, `hybridep`, `flex`."""
    drops_tokens: bool = False
    """Whether an expert takes no more than its capacity, so that the host need not wait for the token counts."""
    fp8_recipe: str = ""
    """How values are scaled to 8 bits: `tensorwise`, `delayed`, `rowwise`, `blockwise`, `mxfp8`; empty where not stated."""
    host: float = 1.0
    """Host time of a kernel launch, relative to plain PyTorch: autograd functions written in Python, forks of the RNG state."""
    collective_host: float = 1.0
    """Host time of a collective, in kernel launches."""
    checkpoint_host: float = 0.0
    """Likewise, of each layer that is recomputed: its RNG state is saved and restored."""
    expert_host: float = 0.0
    """Likewise, of the GEMM of each expert, where the grouped GEMM is a loop over experts."""
    sync_host: float = 0.0
    """Likewise, of the host sync for the token counts of the experts."""
    graphed: float = 0.0
    """Share of the launches that CUDA graphs take over."""
    rotary_bytes: float = 4.0
    """Bytes that rope moves for each element of a query or key, forward; the default is one pass in 16 bits."""
    casts_weights: bool = False
    """Whether matrices that are not sharded are cast where they are used, and their gradients cast back, in every microbatch."""
    loss_bytes: float = 16.0
    """Bytes moved for each logit, forward and backward together."""
    logit_bytes: float = 6.0
    """Bytes held for each logit at the peak."""
    chunked_loss: bool = False
    """Whether the loss runs over chunks of tokens and computes its gradients in the forward pass."""
    fully_shard: bool = False
    """Whether PyTorch's `fully_shard` casts and copies sharded matrices, and accumulates their gradients (`time/copies.py`)."""
    gathers_in_place: bool = False
    """Likewise, whether it gathers parameters where they are read, without those copies (`parallel/in_place.py`)."""
    exchanges_gradients: bool = False
    """Likewise, whether shards in one machine send each other gradients as they are and add them up, where the layout allows it."""
    keeps_compute_copies: bool = False
    """Whether the layers' matrices stay cast from step to step, and their gradients are never cast."""
    replays: bool = False
    """Whether the passes are replayed as a CUDA graph where the host would launch them more slowly than they run."""
    runs_ahead: bool = False
    """Whether a step is launched while the previous one still runs, so that the host's work between them takes no time."""
    early_stop: bool = True
    """Whether recomputation stops after the last tensor that the backward pass needs."""
    recompute_selective: tuple[str, ...] = ("attention",)
    """What the layout's `attention` mode recomputes: names of ops, `attention` for all of its core."""
    recompute_gemms: float = 0.0
    """Share of the GEMMs that this mode recomputes besides."""
    recompute_saves: tuple[float, float, float] | None = None
    """What this mode saves: elements a token, in units of hidden, kv and ffn width; None where that follows from the ops."""
    bucket_bytes: float = 0.0
    """Bytes of the buffers in which gradients and parameters are collected for sending."""
    context_gib: float = 1.0
    """GiB held by the driver, its libraries and the communicators, beside the program's tensors."""
    fragmentation: float = 0.05
    """Memory that the allocator wastes, as a share of the memory that comes and goes within a step."""


QLORA_HOST = 3.78
"""`host` of our own trainer with 4-bit matrices, whose layers are not compiled: measured with Llama 3 8B on an H200, launched
kernel by kernel (benchmarks/gpu/RESULTS.md, "Tuning", says what makes such a launch expensive)."""

_OWN = Framework(
    "shardwise",
    "shardwise",
    attention="flash3",  # what PyTorch prefers: cuDNN's kernels, where there are any
    waits_to_regather=True,
    kernels="eager",
    rotary_bytes=88.0,  # seven kernels in float32 that move 52; those that broadcast or join halves take twice as long
    casts_weights=True,
    fully_shard=True,
    update_bytes=33.0,  # one kernel that moves 28, and the norm; gradients are not zeroed
    loss_bytes=34.0,  # logits cast, normalised, and their gradient cast back
    logit_bytes=12.0,
)
_MEGATRON = Framework(
    "megatron",
    "megatron",
    attention="unfused",
    kernels="jit",
    sequence_parallel=False,
    dropout=True,
    parameter_bytes=2.0,
    gradient_bytes=2.0,
    optimizer_bytes=12.0,
    reduce_bytes=2.0,
    accumulate_bytes=6.0,
    reduce_every_microbatch=False,
    gradients_overlap=False,
    gather_overlap=False,
    early_stop=False,
    pipeline_blocks=True,
    loss_bytes=44.0,
    logit_bytes=10.0,
    host=1.5,
    collective_host=4.0,
    checkpoint_host=40.0,
    sync_host=10.0,
)
_NEMO = replace(
    _MEGATRON,
    name="nemo",
    family="nemo",
    attention="flash3",
    kernels="compiled",
    dropout=False,
    gradient_bytes=4.0,
    accumulate_bytes=4.0,  # the GEMM itself accumulates in float32
    tensor_overlap=0.5,
    gradients_overlap=True,
    gather_overlap=True,
    pipeline_blocks=False,
    loss_bytes=20.0,
    logit_bytes=6.0,
    expert_host=0.3,
)
_FSDP = Framework(
    "fsdp",
    "fsdp",
    kernels="eager",
    loss_bytes=36.0,
    logit_bytes=14.0,
    accumulate_bytes=0.0,
    collective_host=4.0,
    checkpoint_host=40.0,
    sync_host=10.0,
)

FRAMEWORKS: dict[str, Framework] = {
    s.name: s
    for s in (
        _OWN,
        replace(_OWN, name="shardwise-compiled", kernels="compiled", rotary_bytes=4.0),
        _MEGATRON,
        replace(_MEGATRON, name="megatron-bf16", gradient_bytes=6.0,
                optimizer_bytes=16.0, reduce_bytes=4.0, accumulate_bytes=12.0, bucket_bytes=3e9),
        # Gradients are copied to float32 for the step; buckets of 500 million elements, two to reduce, one to gather.
        # Its pipeline engine splits its messages over the tensor ranks (`PartitionedTensor`).
        replace(_MEGATRON, name="megatron-deepspeed", optimizer_bytes=16.0, bucket_bytes=3e9),
        # Since 2022 the GEMM itself accumulates into the gradient, which reads it once more.
        replace(_MEGATRON, name="megatron-2022", accumulate_bytes=2.0),
        replace(_MEGATRON, name="megatron-ddp", gradients_overlap=True),
        replace(_MEGATRON, name="megatron-flash1", attention="flash1", dropout=False),
        _NEMO,
        replace(_NEMO, name="nemo-plain", tensor_overlap=0.0, gradients_overlap=False, gather_overlap=False, pipeline_blocks=True),
        replace(_NEMO, name="jax", reduce_every_microbatch=True, early_stop=True),
        _FSDP,
        replace(_FSDP, name="fsdp-flash1", attention="flash1"),
        replace(_FSDP, name="fsdp-pure-flash1", attention="flash1", reduce_bytes=2.0),
        # Every second GEMM is recomputed, and every op that is neither a GEMM nor attention.
        replace(_FSDP, name="torchtitan", loss_bytes=24.0, logit_bytes=12.0, recompute_gemms=0.5,
                recompute_selective=("norm", "activation", "rotary", "residual"), recompute_saves=(4.0, 1.0, 1.0)),
        # Parameters in 16 bits. Autograd hooks gather each tensor and reduce each gradient by itself, and the host
        # waits for it: early ZeRO-3 (Rajbhandari et al. 2021) hid little of its traffic.
        replace(_FSDP, name="deepspeed-2021", family="deepspeed-2021", attention="unfused", kernels="jit", parameter_bytes=2.0,
                gradient_bytes=2.0, optimizer_bytes=12.0, reduce_bytes=2.0, dropout=True, loss_bytes=44.0,
                gradients_overlap=False, gather_overlap=False, zero_overlap=0.0, tensors_apart=True),
        replace(_FSDP, name="deepspeed", parameter_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=12.0, reduce_bytes=2.0),
        # FairScale's FSDP, or code of that time: parameters sharded, elementwise kernels fused by hand.
        replace(_FSDP, name="fairscale", kernels="jit", reduce_bytes=2.0, loss_bytes=44.0),
        replace(_FSDP, name="colossalai", parameter_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=12.0, reduce_bytes=2.0,
                logit_bytes=8.0),
        replace(_MEGATRON, name="internevo", family="internevo", attention="flash1", dropout=False, gradient_bytes=4.0,
                optimizer_bytes=20.0, gradients_overlap=True),
    )
}  # fmt: skip
