"""Splits a batch into microbatches on the device, each with this context rank's shard of every sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.model.varlen import cu_seqlens_of, has_flash
from shardwise.parallel.context import zigzag_positions
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch
from shardwise.run import Run
from shardwise.run.derive import uses_varlen_attention


def on_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, from pinned memory: otherwise the host would wait for all work queued on the GPU."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value


def stream_of(run: Run, device: torch.device) -> Tensor:
    """An empty tensor with the shape and dtype of the activations that one microbatch sends between stages."""
    length = run.train.seq_len // (run.layout.context * run.layout.tensor)
    dtype: torch.dtype = getattr(torch, run.train.dtype)
    return torch.empty(run.train.microbatch, length, run.model.hidden, dtype=dtype, device=device)


def cut(batch: Batch, of_tokens: dict[str, np.ndarray], run: Run, mesh: Mesh, device: torch.device) -> list[Microbatch]:
    """Cut a batch into microbatches: its tokens, their positions and documents, and the further per-token arrays `of_tokens` [rows,
    length, ...]."""
    size, length = run.train.microbatch, batch.tokens.shape[1]
    places = zigzag_positions(length, run.layout.context, mesh.index("context"))
    positions = batch.positions if batch.positions is not None else np.arange(length)[None]
    as_mask = cu_seqlens_of if uses_varlen_attention(run, gpu=has_flash(device)) else np.asarray

    def moved(array: np.ndarray) -> Tensor:
        return on_device(torch.from_numpy(np.ascontiguousarray(array)), device)

    made: list[Microbatch] = []
    for start in range(0, len(batch.tokens), size):
        rows = slice(start, start + size)
        own = positions[rows] if len(positions) > 1 else positions
        every = {"tokens": batch.tokens} | of_tokens
        microbatch: Microbatch = {name: moved(array[rows][:, places]) for name, array in every.items()}
        microbatch["positions"] = moved(own[:, places])
        # Attention needs the documents of the whole row, not only of this context rank's shard.
        if batch.documents is not None:
            microbatch["documents"] = moved(as_mask(batch.documents[rows]))
        made.append(microbatch)
    return made
