"""Replaces operators in compiled layers by their twins without a gradient (`operator.py`): the graph has the gradient already."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import (  # a documented pass, loaded with the compiler
    CustomGraphPass,
    get_hash_for_files,
)
from torch.fx import Graph

from shardwise.model.operator import COMPILED


class WithoutGradient(CustomGraphPass):
    """The graph pass."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.target in COMPILED:
                node.target = COMPILED[node.target]

    def uuid(self) -> object:
        """A hash of the pass, for the compiler's cache."""
        return get_hash_for_files((__file__,))


WITHOUT_GRADIENT = WithoutGradient()
"""One instance for all layers; otherwise each layer would be compiled separately."""
