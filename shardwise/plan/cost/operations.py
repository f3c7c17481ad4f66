"""Every operation of a layer, of the embedding and of the head, for one microbatch on one rank, as closed forms.

An `Op` holds FLOPs, bytes moved, seconds on the job's chip and saved activations, forward, backward for its input and backward
for its weights. With T tokens of a microbatch on a rank, widths h (hidden), q, kv (all query, all key heads), f (feed-forward) and
t tensor ranks:

    qkv       T x (q+2kv)/t from h      attention   T x s scores of q/t, half of them when causal
    out       T x h from q/t            up, gate    T x f/t from h         down   T x h from f/t
    experts   as up, gate and down on T k/t rows spread over the rank's experts        head   T x V/t from h

The backward pass of a GEMM costs twice its forward pass: once for the input, once for the weights. For this trainer the FLOPs are
those that `trainer/work.py` counts rank by rank; tests/plan/test_operations.py compares the two.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwise.plan.cost.attention import attention_core, context_traffic
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.ops import ByPass, Op, OpList, regroups_tensor, span
from shardwise.plan.cost.parameters import at_least_one
from shardwise.run import ModelConfig
from shardwise.run.saved_tensors import GROUP, quantized_bytes, quantized_tensors

TILE = 128.0
"""Rows of a grouped GEMM that are computed together, in most of its kernels."""
HALVES = (2.1, 2.4)
"""How many times as long gated experts' activation takes, forward and backward, where PyTorch's own kernels run over gate and up as
halves of one GEMM's rows: rows that are not contiguous are not read in vectors. On an H200, 32768 rows of 2 x 2048: SiLU 185 µs
instead of 78, its gradient 214 instead of 106, a product 185 instead of 101; and the gradients are joined."""
NORM_BACKWARD = {"eager": 2.6, "compiled": 1.35}
"""How many times as long as its bytes need this trainer's backward pass of a norm takes. On an H200, 16384 rows of 2304: two of
PyTorch's kernels, 74 and 72 µs instead of 57; compiled with the residual's sum, 115 instead of 95."""
CHUNKED_BYTES = 6.0
"""Bytes moved for each 16-bit logit of a chunked loss besides its GEMMs: read for the sum, read and written as a gradient."""


def _gather_sequence(ops: OpList, part: str, *, again: Number = 1.0, gathered: bool = False) -> None:
    """All-gathers the sequence before matrices cut by columns; backward, sums the gradients of their common input. `again`: 1 where
    the backward pass needs the sequence; `gathered`: whether it was gathered for others, with whose gradients these are summed."""
    job = ops.job
    size = job.rows * job.model.hidden * job.width
    if job.framework.sequence_parallel:
        regathers = again * job.framework.waits_to_regather
        ops.collective(part, "tensor", "all_gather", size, (1.0 - gathered, regathers, 0.0))
        ops.collective(part, "tensor", "reduce_scatter", size, (0.0, 1.0 - gathered, 0.0))
    else:
        ops.collective(part, "tensor", "all_reduce", size, (0.0, 1.0, 0.0))


def _scatter_sequence(ops: OpList, part: str, *, width: Number = None, early_stop: bool = False) -> None:
    """Sums the partial outputs of matrices cut by rows, and leaves each rank its slice of the sequence; `width`: bytes of an
    element, if not those of an activation."""
    job = ops.job
    size = job.rows * job.model.hidden * (job.width if width is None else width)
    if job.framework.sequence_parallel:
        ops.collective(part, "tensor", "reduce_scatter", size, (1.0, 0.0, 0.0), early_stop=early_stop)
        ops.collective(part, "tensor", "all_gather", size, (0.0, 1.0, 0.0))
    else:
        ops.collective(part, "tensor", "all_reduce", size, (1.0, 0.0, 0.0), early_stop=early_stop)


def residual_tokens(job: Job) -> Number:
    """Tokens of the residual stream on a rank, between the GEMMs."""
    return job.rows / job.layout.tensor if job.framework.sequence_parallel else job.rows


def residual_bytes(job: Job) -> Number:
    """Bytes of the residual stream on a rank."""
    return residual_tokens(job) * job.model.hidden * job.width


def _norm(ops: OpList, tokens: Number, width: Number = 0) -> None:
    size = tokens * (width or ops.job.model.hidden) * ops.job.width
    own = ops.job.framework.family == "shardwise"
    longer = NORM_BACKWARD[ops.job.framework.kernels] if own else 1.0
    ops.elementwise("norm", "norm", 2 * size, 3 * size, saved=size, longer=(1.0, longer))


def _residual(ops: OpList, part: str, *, early_stop: bool = False) -> None:
    """The sum with the residual stream, and dropout where there is any."""
    job = ops.job
    numel, dropout = residual_tokens(job) * job.model.hidden, job.framework.dropout
    mask = numel * 1.0 if dropout else 0.0
    eager = 2.0 if dropout and job.framework.kernels == "eager" else 1.0
    moved = 3 * job.width * numel * eager + mask, 2 * job.width * numel + mask
    ops.elementwise("residual", part, *moved, saved=mask, early_stop=early_stop)


def _attention(ops: OpList) -> None:
    """Norm, attention and its sum with the residual stream."""
    job = ops.job
    m, t, rows = job.model, job.layout.tensor, job.rows
    _norm(ops, residual_tokens(job))
    _gather_sequence(ops, "attention")
    saved = residual_bytes(job)  # of the common input: gathered again for the backward pass
    if m.attention == "latent":
        heads, kv_heads, head_dim, v_dim = m.heads / t, m.heads / t, m.head_dim, m.v_dim
        if m.q_rank:
            ops.gemm("q_down", "attention", rows, m.q_rank, m.hidden, saved=saved)
            _norm(ops, rows, m.q_rank)
        ops.gemm("q_up", "attention", rows, heads * head_dim, m.q_rank or m.hidden)
        ops.gemm("kv_down", "attention", rows, m.kv_rank + m.rope_dim, m.hidden, saved=0.0)
        _norm(ops, rows, m.kv_rank)
        ops.gemm("kv_up", "attention", rows, heads * (m.nope_dim + v_dim), m.kv_rank)
    else:
        heads, head_dim, v_dim = m.heads / t, m.head_dim, m.head_dim
        kv_heads = at_least_one(m.kv_heads / t)  # where there are fewer heads than ranks, heads are replicated
        each = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        ops.gemm("qkv", "attention", rows, (heads + 2 * kv_heads) * head_dim, m.hidden, saved=saved, parts=each)
    numel = rows * (heads + kv_heads) * head_dim
    key_dim = head_dim
    if m.position == "alibi" and job.framework.family == "shardwise":  # others add biases inside of their kernels
        key_dim = m.key_dim
        moved = numel * (1 + key_dim / head_dim) * job.width
        ops.elementwise("alibi", "attention", moved, moved)
    elif m.position == "rotary":
        moved = numel * job.framework.rotary_bytes
        ops.elementwise("rotary", "attention", moved, moved)
    elif job.framework.kernels != "compiled":  # heads are transposed for the kernels
        ops.elementwise("heads apart", "attention", 2 * numel * job.width, 2 * numel * job.width)
    context_traffic(ops, heads, kv_heads, key_dim, v_dim)
    attention_core(ops, heads, kv_heads, key_dim, v_dim)
    ops.gemm("out", "attention", rows, m.hidden, heads * v_dim)
    _scatter_sequence(ops, "attention")
    _residual(ops, "attention")


def _activation(ops: OpList, part: str, numel: Number) -> None:
    """The activation function of a feed-forward layer, gated or not."""
    eager, size = ops.job.framework.kernels == "eager", numel * ops.job.width
    if ops.job.model.gated:
        own = part == "experts" and ops.job.framework.family == "shardwise"
        apart = own & (np.asarray(ops.job.layout.expert) > 1)  # experts that other ranks send rows to are not compiled
        plain = 1.0 * (eager | apart)
        halves = eager and own
        ops.elementwise(
            "activation", part, (3.0 + 2.0 * plain) * size, (5.0 + 3.0 * plain) * size, saved=(2.0 + plain) * size,
            longer=HALVES if halves else (1.0, 1.0),
        )  # fmt: skip
    else:
        remade = ops.job.memory.lossless  # the square is recomputed instead of saved
        ops.elementwise("activation", part, 2 * size, (5 if remade else 3) * size, saved=0.0 if remade else size)


def _feed_forward(ops: OpList, width: int, *, early_stop: bool = False, gathered: bool = False) -> None:
    """A dense feed-forward layer: the matrices, and the collectives around them; `gathered`: the sequence was gathered for others,
    and is gathered here for the backward pass alone."""
    job, part = ops.job, "ffn"
    own = width / job.layout.tensor
    _gather_sequence(ops, part, gathered=gathered)
    saved = residual_bytes(job) * job.model.has_ffn_norm  # without a norm of its own, the input is attention's
    ops.gemm("up", part, job.rows, own * (2 if job.model.gated else 1), job.model.hidden, saved=saved)
    _activation(ops, part, job.rows * own)
    ops.gemm("down", part, job.rows, job.model.hidden, own, early_stop=early_stop)
    _scatter_sequence(ops, part, early_stop=early_stop)


def _sent_once(job: Job) -> Number:
    """Share of the rows that are sent when a token goes to a machine once, however many of its experts are there; within one
    fast-link domain, to a rank once. Routing by groups of experts bounds the number of machines."""
    if not job.framework.expert_once:
        return 1.0
    m, k = job.model, job.model.experts_per_token
    machines, ranks = job.cluster.spans(*span(job, "expert")), job.layout.expert
    most: Number = np.inf
    if m.router_groups > 1:
        most = m.router_top_groups * np.maximum(machines / m.router_groups, 1.0)
    reached: Number = np.where(machines > 1, np.minimum(_places(machines, k), most), _places(ranks, k))
    return reached / k


def _busiest(job: Job, rows: Number) -> tuple[Number, Number]:
    """Rows of the busiest expert rank, where the mean is `rows`, and the factor by which GEMMs are longer because experts have
    uneven shares. Several ranks wait for the busiest one, which has all rows at most. A single rank has all rows, however they are
    routed; there the last tile of each expert is half full on average."""
    alone = np.asarray(job.layout.expert) == 1
    uneven = 1.0 + (alone & (job.imbalance > 1.0)) * TILE / 2 * job.model.experts / np.maximum(rows, 1.0)
    return rows * np.minimum(job.imbalance, job.layout.expert), uneven


def _places(places: Number, choices: int) -> Number:
    """The mean number of different places that this many random choices fall on."""
    return places * (1.0 - (1.0 - 1.0 / places) ** choices)


def _permutations(job: Job) -> Number:
    """How often all rows are sorted on their way to the experts. This trainer sorts them by expert before sending, and again after
    receiving. Megatron's all-to-all sorts them by rank, and by expert only where a rank has several
    (`MoEAlltoAllTokenDispatcher`). DeepEP's kernels send tokens unsorted, and received rows are sorted. HybridEP's kernels write
    rows where their experts read them."""
    if job.framework.family == "shardwise":
        return 1.0 + (np.asarray(job.layout.expert) > 1)
    several = (np.asarray(job.layout.expert) > 1) & (job.model.experts / job.layout.expert > 1)
    return {"alltoall": 1.0 + several, "hybridep": 1.0 * (np.asarray(job.layout.expert) == 1)}.get(
        job.framework.dispatcher, 1.0
    )


def _moe(ops: OpList) -> None:
    """Router, routed experts and shared experts."""
    job = ops.job
    m, lay = job.model, job.layout
    whole, own = lay.expert_tensor and job.framework.sequence_parallel, job.framework.family == "shardwise"
    tokens = job.rows if whole else job.rows / lay.tensor
    routed = job.rows / lay.tensor if own else tokens  # this trainer gathers the sequence behind the router
    ops.gemm("router", "router", routed, m.experts, m.hidden, high_precision=True, saved=0.0)
    waits = 0.0 if job.framework.drops_tokens else job.framework.sync_host
    ops.elementwise("choose", "router", routed * m.experts * 16, routed * m.experts * 16, launches=(6.0 + waits, 4.0))
    gathers = whole and own
    if gathers:
        _gather_sequence(ops, "experts", again=0.0)
    rows, uneven = _busiest(job, tokens * m.experts_per_token)
    size = rows * m.hidden * job.width
    sorted_bytes = 2 * size * _permutations(job)
    # This trainer's kernels read a token once for its k rows, whose sum they write; backward they read rows for weights too.
    first, weighed = (1.0 + 1.0 / m.experts_per_token - 2.0, 1.0) if own else (0.0, 0.0)
    to, back = sorted_bytes + first * size, sorted_bytes + (first + weighed) * size
    ops.elementwise("to experts", "experts", to, to, launches=(2.0, 2.0))
    sent, others = size * _sent_once(job), regroups_tensor(job)
    ops.collective("experts", "expert", "all_to_all", sent, (1.0, 1.0, 0.0))
    width = m.expert_ffn / lay.tensor if lay.expert_tensor else m.expert_ffn
    held = m.experts / lay.expert
    ops.grouped_gemm("expert up", rows, 2 * width, m.hidden, held, uneven)
    if own:  # two matrices in 16 bits have a gradient each for their input
        ops.elementwise(
            "expert inputs added", "experts", 0.0, 3.0 * size * (np.asarray(lay.world) > 1), launches=(0.0, 1.0)
        )
    _activation(ops, "experts", rows * width)
    ops.grouped_gemm("expert down", rows, m.hidden, width, held, uneven)
    # The backward pass does not need the experts' combined outputs: recomputation that stops early skips the combine.
    ops.collective("experts", "expert", "all_to_all", sent, (1.0, 1.0, 0.0), early_stop=others)
    ops.elementwise("from experts", "experts", to, back, saved=size, launches=(2.0, 2.0), early_stop=others)
    if gathers:
        _scatter_sequence(ops, "experts", early_stop=not m.shared_experts)
    if m.shared_experts:
        _feed_forward(ops, m.expert_ffn * m.shared_experts, gathered=gathers)


def quantized(m: ModelConfig, *, routed: bool) -> frozenset[str]:
    """The saved tensors of a layer that may be kept in few bits."""
    return quantized_tensors(routed=routed, parallel_block=m.parallel_block, gated=m.gated, activation=m.activation)


def _quantized_activations(ops: OpList, *, routed: bool) -> None:
    """Packing and unpacking saved tensors in few bits, each by a kernel."""
    job, m = ops.job, ops.job.model
    words = quantized(m, routed=routed)
    wide, kernels = len(words & {"gate", "up", "function", "inner"}), float(len(words))
    values = (len(words) - wide) * residual_tokens(job) * m.hidden + wide * job.rows * m.ffn / job.layout.tensor
    few = quantized_bytes(GROUP, job.memory.activation_bits) / GROUP
    moved, spared = (
        values * (job.width + few),
        values * (job.width - few),
    )  # each way reads one form and writes the other
    ops.elementwise("quantized activations", "norm", moved, moved, saved=-spared, launches=(kernels, kernels))


def layer(job: Job, *, routed: bool) -> OpList:
    """One decoder layer, MoE or dense."""
    ops = OpList(job)
    if job.memory.activation_bits:
        _quantized_activations(ops, routed=routed)
    _attention(ops)
    if job.model.has_ffn_norm:
        _norm(ops, residual_tokens(job))
    if routed:
        _moe(ops)
    else:
        _feed_forward(ops, job.model.ffn, early_stop=True)
    _residual(ops, "experts" if routed else "ffn", early_stop=True)
    return ops


def embedding(job: Job) -> OpList:
    """Looks the tokens up, and leaves each rank its slice of the sequence."""
    ops = OpList(job)
    size = residual_bytes(job)
    mask = residual_tokens(job) * job.model.hidden if job.framework.dropout else 0.0
    ops.elementwise("embedding", "embedding", 2 * size + 3 * mask, 4 * size + 3 * mask, saved=mask)
    looked_up = job.width
    if (
        job.framework.family == "shardwise" and not job.adapter.used
    ):  # in the dtype it is held in, if nothing gathers it
        looked_up = job.width + (max(4.0, job.width) - job.width) * (1.0 - job.fully_sharded[0])
    _scatter_sequence(ops, "embedding", width=looked_up)
    if job.model.embedding_norm:
        _norm(ops, residual_tokens(job))
    return ops


def head(job: Job) -> OpList:
    """Final norm, logits and loss."""
    ops, columns = OpList(job), job.model.head_rows / job.layout.tensor
    _norm(ops, residual_tokens(job))
    chunked = 1.0 * job.framework.chunked_loss
    _gather_sequence(ops, "head", again=1.0 - chunked)
    start = len(ops)
    ops.gemm("head", "head", job.rows, columns, job.model.hidden, high_precision=True, saved=residual_bytes(job))
    moved = job.rows * columns * (chunked * CHUNKED_BYTES + (1.0 - chunked) * job.framework.loss_bytes)
    ops.elementwise("loss", "loss", 0.45 * moved, 0.55 * moved, launches=(6.0, 4.0))
    if job.logprobs:  # which have their gradients in the backward pass, where the logits are recomputed
        logits = ops[start]
        ops[start] = replace(logits, seconds=_once_more(logits.seconds), flops=_once_more(logits.flops))
    elif chunked:
        ops[start:] = [_all_in_forward(op) for op in ops[start:]]
    ops.collective("loss", "tensor", "all_reduce", job.rows * 4.0, (3.0, 0.0, 0.0))
    return ops


def _once_more(passes: ByPass) -> ByPass:
    """The passes of a GEMM whose forward pass is recomputed in the backward pass."""
    forward, to_input, to_weight = passes
    return forward, to_input + forward, to_weight


def _all_in_forward(op: Op) -> Op:
    """An op whose backward pass is done in the forward pass."""

    def moved(passes: ByPass) -> ByPass:
        return sum(passes), 0.0, 0.0

    return replace(op, seconds=moved(op.seconds), flops=moved(op.flops), bytes=moved(op.bytes))
