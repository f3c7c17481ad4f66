"""The time of attention in one fused kernel (FlashAttention), which never writes the attention scores to memory.

Queries are split into blocks that loop over the keys; blocks are distributed over the chip's units. Three things cost speed:
the start and end of each block and the half-empty tiles on the diagonal of a causal mask (modelled as some extra keys); the
tail, when the last blocks run and other units idle; and too few blocks to fill the chip. Keys and values of a very long sequence
do not stay in the L2 cache from one block to the next. With one query per sequence, as in decode, the time is that of reading them.

Sources of the model: FlashAttention (Dao et al. 2022), FlashAttention-2 (Dao 2023), FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

from shardwise.hardware.chips import ITEM_BYTES, Chip
from shardwise.hardware.efficiency import constants

Kernel = Literal["flash1", "flash2", "flash3"]
Direction = Literal["forward", "backward"]

BLOCK = 128  # rows of a block of queries (forward) or keys (backward)
KEYS = 64  # widths of keys beyond a block's are padded to multiples of this (`benchmarks/gpu/attention_widths.py`)
# How much slower blocks get for each L2 cache that the keys and values of a head fill, beyond the share that stays
# cached besides everything else: an H200 loses nothing with 65,536 keys of 128 at its highest clock
# (`benchmarks/gpu/cool_kernels.py`), and 8% in training steps of 131,072 (RESULTS.md). Nothing longer was measured.
SPILL, STAYS, MOST_SPILLED = 0.13, 0.5, 1.2
# GEMMs: the forward has two, the backward recomputes one and adds four.
BACKWARD_FLOPS = 2.5
# The backward reads queries, keys, values, output and its gradient, and writes three gradients.
BACKWARD_BYTES = 2.5


def attention_flops(
    batch: Any,
    heads: Any,
    queries: Any,
    keys: Any,
    head_dim: Any,
    v_dim: Any = None,
    causal: bool = True,
    direction: Direction = "forward",
) -> Any:
    """FLOPs without the query-key pairs that a causal mask hides. The queries are the last positions of the keys."""
    width = np.asarray(head_dim, dtype=float) + (head_dim if v_dim is None else v_dim)
    visible = _visible_keys(np.asarray(queries, dtype=float), np.asarray(keys, dtype=float), causal)
    flops = 2.0 * width * batch * heads * queries * visible
    return flops * BACKWARD_FLOPS if direction == "backward" else flops


def attention_seconds(
    chip: Chip,
    batch: Any,
    heads: Any,
    queries: Any,
    keys: Any,
    head_dim: Any,
    v_dim: Any = None,
    causal: bool = True,
    kernel: Kernel = "flash2",
    direction: Direction = "forward",
    dtype: str = "bfloat16",
    sustained: Any = 1.0,
    kv_heads: Any = None,
    fitted: dict[str, Any] | None = None,
) -> Any:
    """Device time of attention over `batch` sequences and `heads` query heads.

    `kv_heads` is the number of heads of the keys and values (default: `heads`). "flash3" is FlashAttention-3 or cuDNN. `fitted`
    are other constants than the chip's: those that a fit tries.
    """
    if fitted is None:
        kernel = kernel_on(chip, kernel)
        fitted = constants("attention", chip)[kernel][direction]["constants"]
    v_dim = head_dim if v_dim is None else v_dim
    kv_heads = heads if kv_heads is None else kv_heads
    batch, heads, queries, keys = (np.asarray(value, dtype=float) for value in (batch, heads, queries, keys))
    # cuDNN computes with keys of 192 or 256 where they are wider than 128; the shares tell of narrower ones.
    pads = (kernel == "flash3") & (np.asarray(head_dim) > BLOCK)
    width = np.add(np.where(pads, KEYS * np.ceil(np.divide(head_dim, KEYS)), head_dim), v_dim, dtype=float)
    backward = direction == "backward"
    share = np.interp(width / 2, fitted["head_dims"], fitted["shares"])
    speed = chip.speed(dtype) * share * np.asarray(sustained)
    flops = 2.0 * width * (BACKWARD_FLOPS if backward else 1.0)  # per pair of query and key

    idle_keys = fitted["extra"] + (fitted["diagonal"] if causal else 0.0)
    total = flops * batch * heads * queries * (_visible_keys(queries, keys, causal) + idle_keys) / speed
    # The longest block, on one unit: the last queries attend to all keys.
    longest = flops * np.minimum(queries, BLOCK) * (keys + idle_keys) / (speed / chip.units)
    blocks = batch * heads * np.ceil(queries / BLOCK)
    computing = np.where(blocks <= chip.units, np.maximum(longest, total), total + fitted["tail"] * longest)
    held = np.where(queries > 1, ITEM_BYTES[dtype] * keys * width / chip.l2, 0.0)
    computing = computing * (1.0 + SPILL * np.clip(held - STAYS, 0.0, MOST_SPILLED - STAYS))

    moved = (
        ITEM_BYTES[dtype] * batch * width * (heads * queries + kv_heads * keys) * (BACKWARD_BYTES if backward else 1.0)
    )
    moving = moved / (chip.hbm * fitted["memory"])
    norm = fitted["norm"]
    seconds = fitted["floor"] + (computing**norm + moving**norm) ** (1 / norm)
    seconds = seconds if seconds.ndim else float(seconds)
    if chip.profile is not None:
        labels, sizes = (kernel, direction, dtype, causal), (batch, heads, queries, keys, head_dim)
        model = partial(attention_seconds, causal=causal, kernel=kernel, direction=direction, dtype=dtype)
        seconds = seconds * chip.profile.factor("attention", labels, chip, sizes, model)
    return seconds


def kernel_on(chip: Chip, kernel: Kernel) -> Kernel:
    """The kernel that runs on a chip: the requested one, or FlashAttention-2 where it is not supported."""
    return kernel if kernel in constants("attention", chip) else "flash2"


def _visible_keys(queries: Any, keys: Any, causal: bool) -> Any:
    """Keys that a query attends to, on average; with a causal mask the queries are the last positions of the keys."""
    return keys - np.minimum(queries, keys) / 2 if causal else keys
