"""Tensors of a layer that are recomputed in the backward pass instead of saved, each by its own operation (`layout.recompute =
optimal`; `plan/cost/rematerialization.py` chooses them), that are squares of saved tensors (`memory.lossless`), or that are kept in
another form (`memory.activation_bits`).

The modules of a layer are wrapped so that `saving.py` knows their outputs and the inputs of these. Nothing else changes: autograd
records the same operations, and recomputed tensors have the same bits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import relu

from shardwise.model.attention import GroupedAttention
from shardwise.model.layers import FeedForward
from shardwise.model.layers import gated as plain_product
from shardwise.model.rope import Rope
from shardwise.model.transformer import Block
from shardwise.parallel.activations.saving import Form, note, note_form, noted_afterwards

Note = Callable[[Tensor, Sequence[Tensor], Callable[..., Tensor]], None]
"""Notes a tensor, its inputs, and the function that computes it from them."""


def keep_in_form(block: Block, words: Iterable[str], form: Form) -> None:
    """Let these tensors of a layer be kept in another form."""

    def instead(x: Tensor, inputs: Sequence[Tensor], make: Callable[..., Tensor]) -> None:
        note_form(x, form)

    words = frozenset(words)
    if "middle" in words and block.ffn_norm is not None:

        def noting(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            note_form(x, form)
            return forward(x)

        _wrapped(block.ffn_norm, noting)
    rematerialize(block, words - {"middle"}, instead)


def rematerialize(block: Block, words: Iterable[str], note: Note = note) -> None:
    """Let these tensors of a layer be recomputed, or pass them to another `note`."""
    words = frozenset(words)
    if "attention_norm" in words:
        _note_output(block.attention_norm, note)
    if words & {"heads", "attended", "middle"}:
        assert isinstance(block.attention, GroupedAttention)
        _Attention(block, block.attention, words, note).watch()
    if "ffn_norm" in words:
        assert block.ffn_norm is not None
        _note_output(block.ffn_norm, note)
    if isinstance(block.ffn, FeedForward):
        _feed_forward(block.ffn, words, note)


def _wrapped(module: nn.Module, around: Callable[..., Any]) -> None:
    """Wrap a module's forward in a function, which gets the forward as its first argument."""
    module.forward = functools.wraps(module.forward)(functools.partial(around, module.forward))


def _note_output(module: nn.Module, note: Note) -> None:
    def noting(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = forward(x)
        note(out, (x,), module)
        return out

    _wrapped(module, noting)


def _feed_forward(ffn: FeedForward, words: frozenset[str], note: Note) -> None:
    for word, matrix in (("gate", ffn.gate), ("up", ffn.up)):
        if word in words and matrix is not None:
            _note_output(matrix, note)
    function, gated = ffn.function, ffn.gated
    if ffn.gate is None:
        if "inner" in words:
            ffn.function = _noting(function, note)
        return
    # A product of another kind chooses its kernel by the function, so it needs the function itself. It saves only gate and up.
    # Several sets of words may wrap it, one after the other.
    whole = inspect.unwrap(gated) is not plain_product

    def product(function: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        if whole:
            out = gated(function, gate, up)
            if "inner" in words:
                note(out, (gate, up), functools.partial(gated, function))
            return out
        made: list[Tensor] = []

        def noting(x: Tensor) -> Tensor:
            made.append(_noting(function, note)(x) if "function" in words else function(x))
            return made[-1]

        out = gated(noting, gate, up)
        if "inner" in words:
            note(out, (*made, up), lambda f, up: f * up)
        return out

    if words & {"function", "inner"}:
        ffn.gated = functools.wraps(gated)(product)


def rematerialize_squares(block: Block) -> None:
    """Recompute the square of a ReLU from the ReLU, which is saved for its own gradient: the matrix after it needs the square's
    values, and these have no smaller lossless form than the ReLU (Gist, Jain et al. 2018)."""

    def squared(x: Tensor) -> Tensor:
        root = relu(x)
        out = root.square()
        note(out, (root,), Tensor.square)
        return out

    for module in block.modules():
        if isinstance(module, FeedForward) and module.gate is None:
            module.function = squared


def _noting(function: Callable[[Tensor], Tensor], note: Note) -> Callable[[Tensor], Tensor]:
    def noting(x: Tensor) -> Tensor:
        out = function(x)
        note(out, (x,), function)
        return out

    return noting


class _Attention:
    """The tensors of a layer's attention that are recomputed; during a forward pass, their inputs."""

    def __init__(self, block: Block, attention: GroupedAttention, words: frozenset[str], note: Note) -> None:
        self.block, self.attention, self.words, self.note = block, attention, words, note
        self.stream: Tensor | None = None
        self.normed: Tensor | None = None
        self.rope: Rope | None = None
        self.attended: Tensor | None = None

    def watch(self) -> None:
        """Wrap the modules."""
        _wrapped(self.block, self._block)
        _wrapped(self.attention, self._attention)
        _wrapped(self.attention.core, self._core)
        if "middle" in self.words:
            assert self.block.ffn_norm is not None
            _wrapped(self.block.ffn_norm, self._ffn_norm)

    def _block(self, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.stream = x
        try:
            return forward(x, *args, **kwargs)
        finally:
            self.stream = self.normed = self.rope = self.attended = None

    def _attention(self, forward: Callable[..., Any], x: Tensor, rope: Rope | None, *args: Any) -> Any:
        self.normed, self.rope = x, rope
        return forward(x, rope, *args)

    def _core(self, forward: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if self.normed is not None and "heads" in self.words:
            for x, matrix, rope in ((q, "q", self.rope), (k, "k", self.rope), (v, "v", None)):
                self.note(x, (self.normed,), functools.partial(self._heads, matrix, rope))
        if "attended" not in self.words:
            self.attended = forward(q, k, v, mask)
            return self.attended
        with noted_afterwards():
            self.attended = forward(q, k, v, mask)
            self.note(self.attended, (q, k, v), lambda q, k, v: self.attention.core(q, k, v, mask))
        return self.attended

    def _heads(self, matrix: str, rope: Rope | None, x: Tensor) -> Tensor:
        heads = getattr(self.attention, matrix)(x).view(*x.shape[:2], -1, self.attention.head_dim)
        return self.attention.add_positions(matrix, heads, rope)

    def _ffn_norm(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.stream is not None and self.attended is not None:
            self.note(x, (self.stream, self.attended), lambda x, attended: x + self.attention.out(attended.flatten(2)))
        return forward(x)
