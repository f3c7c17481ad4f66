"""The KV cache: what attention keeps of earlier tokens, so that generating the next token costs one token's work.

A cache owns attention. A layer hands it the queries, keys and values of new tokens and gets the result of attention over all
tokens, so how they are stored and which kernel reads them is the cache's business alone (`paged.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class LayerCache(ABC):
    """What one attention layer keeps."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor | None, scale: float) -> Tensor:
        """Keep the keys and values [1, tokens, heads, width] of new tokens, and attend to all that are kept. Without values, the
        first part of a key is its value, and the result as wide as that part (latent attention)."""


class Cache(ABC):
    """One `LayerCache` for each layer of a model; it knows which sequences the tokens of a forward pass belong to."""

    layers: Sequence[LayerCache]
