"""The KV cache: what attention keeps of earlier tokens, so that generating the next token costs one token's work.

A cache owns attention. A layer hands it the queries, keys and values of new tokens and gets the result of attention over all
tokens, so how they are stored (one block here, pages elsewhere) and which kernel reads them is the cache's business alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.model.varlen import Mask

Attend = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
"""Attention of queries to whole keys and values: a layer's `DotProductAttention`."""
Unfold = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Latents and their rotary keys to keys and values of all heads (`LatentAttention`)."""


class LayerCache(ABC):
    """What one attention layer keeps."""

    @abstractmethod
    def attend(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Keep the keys and values of new tokens, and attend to all that are kept."""

    @abstractmethod
    def attend_latent(
        self, attend: Attend, unfold: Unfold, q: Tensor, latent: Tensor, k_rope: Tensor, mask: Mask
    ) -> Tensor:
        """The same of latent attention, which keeps a latent and one rotary key for all heads."""


class Cache(ABC):
    """One `LayerCache` for each layer of a model. `used` counts the tokens of a row that are kept."""

    layers: Sequence[LayerCache]
    used: int

    @abstractmethod
    def begin(self, documents: Tensor | None, new: int) -> Tensor | None:
        """Make room for `new` tokens of each row, of these documents; gives the documents of all tokens so far, or None while
        there is but one."""


class ContiguousLayerCache(LayerCache):
    """Tensors [batch, length, ...], allocated at first use."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.used = 0
        self.stored: list[Tensor] = []

    def attend(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return attend(q, *self._extend(k, v), mask)

    def attend_latent(
        self, attend: Attend, unfold: Unfold, q: Tensor, latent: Tensor, k_rope: Tensor, mask: Mask
    ) -> Tensor:
        return attend(q, *unfold(*self._extend(latent, k_rope)), mask)

    def _extend(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Append along the sequence and return everything so far."""
        new = (first, second)
        if not self.stored:
            self.stored = [t.new_empty(t.shape[0], self.length, *t.shape[2:]) for t in new]
        start, self.used = self.used, self.used + first.shape[1]
        for stored, t in zip(self.stored, new, strict=True):
            stored[:, start : self.used] = t
        return self.stored[0][:, : self.used], self.stored[1][:, : self.used]


class ContiguousCache(Cache):
    """Room for `length` tokens of each row, whether they come or not, and the document of every kept token."""

    def __init__(self, layers: int, batch: int, length: int, device: torch.device | str = "cpu") -> None:
        self.layers = [ContiguousLayerCache(length) for _ in range(layers)]
        self.documents = torch.zeros(batch, length, dtype=torch.int32, device=device)
        self.used = 0
        self.separate = False

    def begin(self, documents: Tensor | None, new: int) -> Tensor | None:
        if documents is not None:
            self.separate = True
            self.documents[:, self.used : self.used + new] = documents
        self.used += new
        return self.documents[:, : self.used] if self.separate else None
