"""Building nodes whose metadata is as complete as that of traced ones, and parts of graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg


def call(like: fx.Node, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` before ``like``, with ``like``'s source location and a fake value."""
    graph = like.graph
    with graph.inserting_before(like):
        node = graph.create_node("call_function", target, args, kwargs, name=target.overloadpacket.__name__)
    node.meta = {k: like.meta[k] for k in ("stack_trace", "nn_module_stack") if k in like.meta}
    fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
    # The mode comes from ``like``: a creator has no tensor argument to bring one.
    with detect_fake_mode([like.meta["val"]]) or contextlib.nullcontext():
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def size_inputs(graph: fx.Graph) -> dict[str, fx.Node]:
    """Graph inputs that hold a dynamic size, by the symbol they hold."""
    return {
        str(node.meta["val"]): node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.SymInt)
    }


def shape_of(sizes: Sequence[Any], inputs: dict[str, fx.Node]) -> list[int | fx.Node] | None:
    """``sizes`` as arguments of a call, given :func:`size_inputs`; ``None`` if one of them is no input."""
    shape = [size if isinstance(size, int) else inputs.get(str(size)) for size in sizes]
    return None if None in shape else [size for size in shape if size is not None]


def placeholder_for(node: fx.Node, graph: fx.Graph) -> fx.Node:
    """An input of ``graph`` that stands for ``node``, under its very name (``Graph.placeholder`` may respell it)."""
    placeholder = graph.create_node("placeholder", node.name, name=node.name)
    placeholder.meta = dict(node.meta)
    return placeholder


def same_layout(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors agree in shape, stride, dtype and device, so that one may stand for the other."""
    x, y = a.meta["val"], b.meta["val"]
    same = x.dtype == y.dtype and x.device == y.device
    return same and same_sizes(x.shape, y.shape) and same_sizes(x.stride(), y.stride())


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to agree. Of sizes that depend on data nobody asks more than that."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph in nodes of its own; constants are shared."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    name = type(gm).__name__  # A captured lambda's is no name Python could read back.
    return fx.GraphModule(gm, graph, class_name=name if name.isidentifier() else "Graph")


def needed_nodes(outputs: list[fx.Node], external: set[fx.Node]) -> set[fx.Node]:
    """Everything ``outputs`` read, up to graph inputs and the ``external`` values, these included."""
    needed: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in external:
                stack.extend(node.all_input_nodes)
    return needed
