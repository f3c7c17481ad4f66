"""The network on one device, its initial weights, and generation."""

import platform

import torch

from shardwise.model.initialize import initialize
from shardwise.model.transformer import Output, Transformer
from shardwise.torch_private import has_mkldnn_bf16

__all__ = ["Output", "Transformer", "initialize"]

if platform.machine() in ("aarch64", "arm64") and not has_mkldnn_bf16():
    # On an ARM core without bf16 instructions oneDNN refuses every bf16 matmul with a warning before PyTorch falls back.
    torch.backends.mkldnn.set_flags(False)
