"""Copy elimination: a tensor stands for a copy of itself.

Two copies that models make without meaning to: ``clone``, which is what dropout in eval mode leaves in the graph
(eager code gets the very same tensor back), and ``cat`` of the consecutive slices of one tensor (blocks that take two
streams apart at their end and join them again at the next one's beginning).

Legality: in a graph that writes none of its tensors, a value and its copy can only be told apart by the caller, so a
copy that leaves the graph stays. The original must have the copy's layout, down to the offset in its memory, and be
made in the graph: how an input lies in memory is not known, and kernels may round by it. Complex and lazily negated
tensors are left alone, because their layout does not tell how they are read. Slices are recognised by where
they lie: pieces of one tensor's memory, with its strides, each beginning where the last one ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from .context import PassContext
from .edit import same_layout
from .effects import is_view, storage_owner, writes_argument

aten = torch.ops.aten


def eliminate_copies(gm: fx.GraphModule, context: PassContext) -> int:
    """Let originals stand for their copies, in place. Returns how many copies went."""
    if any(map(writes_argument, gm.graph.nodes)):
        return 0
    (output,) = gm.graph.find_nodes(op="output")
    leaving = {storage_owner(node) for node in output.all_input_nodes}
    eliminated = 0
    for node in list(gm.graph.nodes):
        original = _original(node)
        if original is not None and node not in leaving and storage_owner(original).op == "call_function":
            node.replace_all_uses_with(original)
            gm.graph.erase_node(node)
            eliminated += 1
    return eliminated


def _original(node: fx.Node) -> fx.Node | None:
    """The tensor ``node`` is a copy of, in the same layout."""
    if node.target is aten.clone.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source if _same_place(source, node) else None
    if node.target is aten.cat.default:
        pieces = node.all_input_nodes  # Each once: had one come twice, they would not add up.
        dim = node.args[1] if len(node.args) > 1 else 0
        assert isinstance(dim, int)
        for whole in _viewed(pieces[0]):
            if _same_place(whole, node) and _covers(whole, pieces, dim % node.meta["val"].ndim):
                return whole
    return None


def _same_place(original: fx.Node, copy: fx.Node) -> bool:
    a, b = original.meta["val"], copy.meta["val"]
    if _reads_otherwise(a) or _reads_otherwise(b):
        return False
    known = all(isinstance(n, int) for n in (*a.shape, *b.shape, a.storage_offset()))
    return known and same_layout(original, copy) and a.storage_offset() == b.storage_offset()


def _reads_otherwise(value: torch.Tensor) -> bool:
    """Whether what is read may not be what lies in memory: a conjugate or a negative made by its readers."""
    return value.is_complex() or value.is_neg()


def _viewed(node: fx.Node) -> Iterator[fx.Node]:
    """What ``node`` is a view of, nearest first."""
    while is_view(node):
        node = node.all_input_nodes[0]
        if isinstance(node.meta["val"], torch.Tensor):
            yield node


def _covers(whole: fx.Node, pieces: list[fx.Node], dim: int) -> bool:
    """Whether ``pieces`` are ``whole``, taken apart along ``dim``."""
    x, position = whole.meta["val"], whole.meta["val"].storage_offset()
    for piece in pieces:
        value = piece.meta["val"]
        if value.ndim != x.ndim or value.dtype != x.dtype or _reads_otherwise(value):
            return False
        same = storage_owner(piece) is storage_owner(whole) and value.stride() == x.stride()
        rest = [(s, r) for d, (s, r) in enumerate(zip(value.shape, x.shape, strict=True)) if d != dim]
        if not same or value.storage_offset() != position or any(s != r for s, r in rest):
            return False
        position += value.shape[dim] * x.stride(dim)
    return bool(sum(p.meta["val"].shape[dim] for p in pieces) == x.shape[dim])
