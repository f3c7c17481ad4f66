"""Keys and values kept from earlier tokens, so that generating the next token costs one token's work."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """What one attention layer keeps: tensors [batch, sequence, ...], room for `length` positions taken at first use."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.used = 0
        self.kept: list[Tensor] = []

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append along the sequence and return everything so far."""
        if not self.kept:
            self.kept = [t.new_empty(t.shape[0], self.length, *t.shape[2:]) for t in new]
        start, self.used = self.used, self.used + new[0].shape[1]
        for kept, t in zip(self.kept, new, strict=True):
            kept[:, start : self.used] = t
        return tuple(kept[:, : self.used] for kept in self.kept)


class Cache:
    """One `LayerCache` a layer, and the document number of every cached position."""

    def __init__(self, layers: int, batch: int, length: int, device: torch.device | str = "cpu") -> None:
        self.layers = [LayerCache(length) for _ in range(layers)]
        self.documents = torch.zeros(batch, length, dtype=torch.int32, device=device)
        self.used = 0
        self.separate = False

    def begin(self, documents: Tensor | None, new: int) -> Tensor | None:
        """Note the documents of `new` positions about to be computed; gives those of all positions so far, or None
        while there is but one document."""
        if documents is not None:
            self.separate = True
            self.documents[:, self.used : self.used + new] = documents
        self.used += new
        return self.documents[:, : self.used] if self.separate else None
