"""Varlen attention: attention inside packed documents, and with a sliding window, without a dense mask.

A dense mask holds a value for every pair of positions, most of them False, and PyTorch's kernels compute all pairs. On a GPU in 16
bits, flash attention (Dao 2023) takes `cu_seqlens` and the window instead, and computes only the pairs they allow.
`varlen_attention_reference` computes the same with a dense mask.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shardwise.torch_private import flash_attention_forward


class VarlenMask(NamedTuple):
    """Queries attend to their own document up to their own position, or to its last `window` positions."""

    cu_seqlens: Tensor | None
    """Where each document begins in the concatenated rows, followed, once or more, by the end of all; int32, on the device. None:
    each row is one document."""
    window: int
    """0: no window."""


Mask = Tensor | VarlenMask | None
"""Which keys a query attends to: a boolean for every pair, or the bounds of documents and the window; None: causal attention."""


def cu_seqlens_of(documents: NDArray[np.int32]) -> NDArray[np.int32]:
    """`cu_seqlens` of documents numbered [rows, length]. Its length is a power of two plus one, so that batches seldom differ in
    shape; unused entries repeat the end. (For each entry the backward pass holds 128 rows of queries in float32.)"""
    first = np.ones(documents.shape, bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = np.flatnonzero(first)
    cu_seqlens = np.full((1 << (len(found) - 1).bit_length()) + 1, documents.size, np.int32)
    cu_seqlens[: len(found)] = found
    return cu_seqlens


def has_flash(device: torch.device) -> bool:
    """Whether this GPU has flash attention: it needs an Ampere or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, varlen: VarlenMask, scale: float) -> Tensor:
    """Attention of heads [rows, length, heads, width]."""
    if not q.is_cuda:
        return varlen_attention_reference(q, k, v, varlen, scale)
    (rows, length), cu_seqlens = q.shape[:2], varlen.cu_seqlens
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
    window = (varlen.window - 1, 0) if varlen.window else (None, None)
    out, *_ = flash_attention_forward(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, cu_seqlens, length, length, 0.0, True, False,
        scale=scale, window_size_left=window[0], window_size_right=window[1],
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2])


def varlen_attention_reference(q: Tensor, k: Tensor, v: Tensor, varlen: VarlenMask, scale: float) -> Tensor:
    """The same attention, with a dense mask."""
    return dense_attention(q, k, v, dense_mask(varlen, q.shape[0], q.shape[1], q.device), scale)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of heads [rows, length, heads, width] by a boolean for every pair, or causal where the mask is None."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def attention_mask(length: int, documents: Tensor | None, window: int, device: torch.device) -> Tensor:
    """Which keys each query attends to, [rows or 1, 1, length, length]. `documents` [rows, length] numbers the document of each
    position; attention stays inside a document."""
    key = torch.arange(length, device=device)
    query = key[:, None]
    mask = key <= query
    if window:
        mask = mask & (query - key < window)
    mask = mask[None, None]
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask


def dense_mask(varlen: VarlenMask, rows: int, length: int, device: torch.device) -> Tensor:
    """The same for documents that are given by where they begin."""
    documents = None
    if varlen.cu_seqlens is not None:
        position = torch.arange(rows * length, device=device)
        documents = torch.searchsorted(varlen.cu_seqlens, position, right=True).view(rows, length)
    return attention_mask(length, documents, varlen.window, device)
