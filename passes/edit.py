"""Building nodes whose metadata is as complete as that of traced ones."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx.node import map_arg


def fake_value(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of ``target`` on the arguments' fake tensors: shapes, strides and dtype without data."""
    fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode([n.meta["val"] for n in _nodes(args, kwargs)])
    if mode is None:
        return target(*fake_args, **fake_kwargs)
    with mode:
        return target(*fake_args, **fake_kwargs)


def _nodes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[fx.Node]:
    found: list[fx.Node] = []

    def visit(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    map_arg((args, kwargs), visit)
    return found


def call(like: fx.Node, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` before ``like``, with ``like``'s source location and a fake value."""
    graph = like.graph
    with graph.inserting_before(like):
        node = graph.call_function(target, args, kwargs)
    node.meta = {k: like.meta[k] for k in ("stack_trace", "nn_module_stack") if k in like.meta}
    node.meta["val"] = fake_value(target, args, kwargs)
    return node


def same_layout(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors agree in shape, stride, dtype and device, so that one may stand for the other."""
    x, y = a.meta["val"], b.meta["val"]
    return (
        x.dtype == y.dtype
        and x.device == y.device
        and tuple(x.shape) == tuple(y.shape)
        and tuple(x.stride()) == tuple(y.stride())
    )
