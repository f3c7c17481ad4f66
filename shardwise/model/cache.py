"""The KV cache: the keys and values, or latents, of earlier tokens, so that generating the next token costs one token's work.

A cache owns attention. A layer passes it the queries, keys and values of new tokens and gets the output of attention over all
tokens. So the storage format and the kernel that reads it are the cache's business alone (`paged.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class LayerCache(ABC):
    """The cache of one attention layer."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor | None, scale: float) -> Tensor:
        """Store the keys and values [1, tokens, heads, width] of new tokens, and attend to all stored tokens. Without values, the
        first part of a key is its value, and the result is as wide as that part (latent attention)."""


class Cache(ABC):
    """One `LayerCache` for each layer of a model; it knows which sequences the tokens of a forward pass belong to."""

    layers: Sequence[LayerCache]
