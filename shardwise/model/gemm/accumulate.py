"""Fuses additions into GEMMs: a GEMM whose result is added to another tensor accumulates onto that tensor (beta = 1) instead of
leaving the sum to an elementwise kernel.

Such sums are the residual stream, where attention and feed-forward layers end, and the gradient of an input that several matrices
read. The sum is rounded once instead of twice. This is a graph pass over a compiled layer, forward and backward together; the
layer's own code does not change, and without the pass the compiler makes the additions as usual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import (  # a documented pass, loaded with the compiler
    CustomGraphPass,
    get_hash_for_files,
)
from torch.fx import Graph, Node

from shardwise.model.gemm import tuned

aten = torch.ops.aten
SUMS: dict[Any, Any] = {
    tuned.gemm: tuned.gemm_onto,
    tuned.fp8_gemm: tuned.fp8_gemm_onto,
}
"""Each GEMM operator, with the one that accumulates."""
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class Accumulate(CustomGraphPass):
    """The graph pass."""

    def __call__(self, graph: Graph) -> None:
        order = {node: number for number, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if node.target is not aten.add.Tensor or node.kwargs:
                continue
            # Where both sides are GEMMs the later one accumulates: the other's result exists by then.
            one, two = node.args
            sides = [(one, two), (two, one)] if one is not two else []
            behind = [(gemm, other) for mine, other in sides if (gemm := _gemm_of(mine)) is not None]
            behind = [(gemm, other) for gemm, other in behind if _alike(other, node) and _of_kind(gemm, node)]
            if behind:
                gemm, other = max(behind, key=lambda one: order[one[0]])
                _add_in(graph, node, gemm, other)
        graph.eliminate_dead_code()

    def uuid(self) -> object:
        """A hash of the pass and of the operators it puts into graphs, for the compiler's cache."""
        return get_hash_for_files((__file__, tuned.__file__))


ACCUMULATE = Accumulate()
"""One instance for all layers; otherwise each layer would be compiled separately."""


def _gemm_of(node: object) -> Node | None:
    """The GEMM that a value is a view of, if nothing else uses it."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node.target in SUMS:
            return node
        if node.target not in VIEWS:
            return None
        node = node.args[0]
    return None


def _alike(other: object, node: Node) -> bool:
    """Whether one side of a sum is contiguous and of the sum's shape, and that shape is static."""
    if not isinstance(other, Node):
        return False
    mine, whole = other.meta["val"], node.meta["val"]
    known = all(isinstance(size, int) for size in whole.shape)
    return known and bool(mine.shape == whole.shape and mine.is_contiguous()) and _of_kind(other, node)


def _of_kind(one: Node, other: Node) -> bool:
    """Whether two nodes have the same dtype and numel."""
    mine, theirs = one.meta["val"], other.meta["val"]
    return bool(mine.dtype == theirs.dtype and mine.numel() == theirs.numel())


def _add_in(graph: Graph, node: Node, gemm: Node, other: object) -> None:
    assert isinstance(other, Node)
    flat = gemm.meta["val"]
    with graph.inserting_before(node):
        base = graph.call_function(aten.view.default, (other, list(flat.shape)))
        out = graph.call_function(SUMS[gemm.target], (*gemm.args, base))
        whole = graph.call_function(aten.view.default, (out, list(node.meta["val"].shape)))
    for new, value in ((base, other.meta["val"].view(flat.shape)), (out, flat), (whole, node.meta["val"])):
        new.meta = {**node.meta, "val": value}
        new.meta.pop("tensor_meta", None)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
