"""Graphs as short readable text, for the report, error messages and golden tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._dtype_abbrs import dtype_abbrs


def format_value(value: Any) -> str:
    """``f32[2, 3]`` for a tensor, a tuple of these for several, the expression of a dynamic size."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_abbrs[value.dtype]}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(format_value(v) for v in value)})"
    return str(value)


def _format_target(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def format_node(node: fx.Node) -> str:
    """One line: ``add: f32[2] = aten.add.Tensor(x, 1)``."""
    if node.op == "output":
        return f"return {node.args[0]}"
    value = f": {format_value(node.meta['val'])}" if node.meta.get("val") is not None else ""
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name}{value} = {node.op}"
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    return f"{node.name}{value} = {_format_target(node.target)}({', '.join(arguments)})"


def format_graph(gm: fx.GraphModule) -> str:
    """All nodes of a graph, one line each."""
    return "\n".join(format_node(node) for node in gm.graph.nodes)
