"""The choice of the compute device, and recovery after a CUDA graph could not be captured."""

from __future__ import annotations

import os

import torch

from shardwise.run import UserError
from shardwise.torch_private import end_allocating_to_pool


def choose_device(wanted: str) -> torch.device:
    """The device a run asks for, or an error when this machine does not have it."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'train.device: "cuda" was asked for, but PyTorch sees no GPU on this machine; use "auto" or "cpu"'
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    use_expandable_segments()
    return torch.device("cuda", torch.cuda.current_device())


def use_expandable_segments() -> None:
    """Let PyTorch's memory on GPUs grow in place, unless the user chose otherwise: else the first steps fragment memory, and large
    blocks no longer fit. PyTorch reads this once, when a process first uses a GPU, so it is called before that."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def recover_from_capture(stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
    """Undo a failed capture: PyTorch is still on its stream, the random generator and the allocator are still in capture mode, and
    its memory pool is still reserved."""
    torch.cuda.set_stream(stream)
    device = stream.device_index
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    end_allocating_to_pool(device, pool)
