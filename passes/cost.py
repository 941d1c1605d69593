"""What a graph costs: operations, FLOPs, bytes. Exact counts, read off the nodes' fake values."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from .effects import host_read, is_size, is_view, view_base


def is_operation(node: fx.Node) -> bool:
    """Whether the node does work when run: a call that is no view, no unpacking and no size arithmetic."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not is_view(node) and not is_size(node)


def operations(gm: fx.GraphModule) -> int:
    """Number of operations, which in eager mode is the number of kernels launched or more."""
    return sum(is_operation(node) for node in gm.graph.nodes)


def flops(gm: fx.GraphModule) -> int:
    """Floating-point operations of matrix products, convolutions and attention, by PyTorch's own formulas
    (``torch.utils.flop_counter``: a multiply-add counts two). Dynamic sizes count as seen at capture."""
    return sum(node_flops(node) for node in gm.graph.nodes)


def node_flops(node: fx.Node) -> int:
    """:func:`flops` of one node."""
    target = node.target
    if not isinstance(target, OpOverload):
        return 0
    packet = target.overloadpacket
    # PyTorch counts every attention kernel but the CPU's, which takes the same arguments first, as does ours, of which
    # this is the most: what it skips depends on the mask.
    if packet in (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.dithoist.planned_attention):
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _hinted(n.meta["val"]))
    return int(formula(*args, **kwargs, out_val=_hinted(node.meta["val"])))


def _hinted(value: Any) -> Any:
    """``value`` with every dynamic size replaced by the one seen at capture; a data-dependent size by 0."""
    if isinstance(value, torch.SymInt):
        return value.node.hint or 0
    if isinstance(value, torch.Tensor):
        return torch.empty([_hinted(s) for s in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return type(value)(_hinted(v) for v in value)
    return value


def inputs_of_products(gm: fx.GraphModule) -> set[str]:
    """Names of the graph inputs that a product, convolution or attention reads, as they are or through views."""
    found = set()
    for node in gm.graph.nodes:
        if node_flops(node):
            found |= {base.name for base in map(view_base, node.all_input_nodes) if base.op == "placeholder"}
    return found


def tensor_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the nodes' tensors."""
    values = (n.meta.get("val") for n in nodes)
    tensors = (_hinted(v) for v in values if isinstance(v, torch.Tensor))
    return sum(v.numel() * v.element_size() for v in tensors)


def host_reads(gm: fx.GraphModule) -> list[str]:
    """Names of the calls that make the host wait for a value."""
    return [f"{node.name} ({node.target})" for node in gm.graph.nodes if host_read(node)]
