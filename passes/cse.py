"""Common subexpression elimination: one node where the graph computes the same thing twice.

Legality: two pure calls of one operator with identical arguments give identical bits, so the second may be
replaced by the first. *Identical* is meant literally: ``0.0``, ``-0.0``, ``0`` and ``False`` are equal in
Python and different to a kernel, so constants are compared by type and ``repr``. Random and writing calls are
never merged. A value that leaves the graph, or that shares memory with one that does, is left alone: the
caller may write into it, and the two results were separate tensors in the model.

(``torch._functorch.compile_utils.fx_graph_cse`` merges ``randn_like`` calls and mixes up the zeros, which is
why it is not used here.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from .context import PassContext
from .effects import effect, storage_owner


def call_key(node: fx.Node, spell: Callable[[fx.Node], Hashable] = lambda n: n) -> Hashable:
    """A key that two calls share only if a kernel cannot tell them apart; ``spell`` stands for the nodes they read."""

    def key(argument: Any) -> Hashable:
        if isinstance(argument, fx.Node):
            return spell(argument)
        if isinstance(argument, (list, tuple)):
            return tuple(map(key, argument))
        if isinstance(argument, dict):
            return tuple((k, key(v)) for k, v in sorted(argument.items()))
        return type(argument), repr(argument)

    return node.target, key(node.args), key(node.kwargs)


def _mergeable(node: fx.Node) -> bool:
    # Uninitialised memory is no value: two of them are two buffers.
    empty = getattr(node.target, "overloadpacket", None) in (torch.ops.aten.empty, torch.ops.aten.empty_like)
    return node.op == "call_function" and not empty and effect(node) is None


def eliminate_common_subexpressions(gm: fx.GraphModule, context: PassContext) -> int:
    """Merge equal calls in place. Returns how many nodes went."""
    (output,) = gm.graph.find_nodes(op="output")
    leaving = {storage_owner(node) for node in output.all_input_nodes}
    seen: dict[Hashable, fx.Node] = {}
    merged = 0
    for node in list(gm.graph.nodes):
        if not _mergeable(node) or storage_owner(node) in leaving:
            continue
        first = seen.setdefault(call_key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            merged += 1
    return merged
