"""The cut: which values are held for the body, and what the body makes again.

A minimum cut (Ford and Fulkerson) through the hoisted part of the graph, between what is known and what the body reads;
AOTAutograd's partitioner decides in the same way what to save for the backward pass. Every value has two prices, both
in bytes:

* *holding* it costs its size, for schedule values once for each of `ROWS` steps. Views are never held, their base is:
  one tensor, however many views of it the body reads. Nor are sizes, but for numbers the host had to wait for.
* *making it again* costs the body, at every step, what the operation reads and writes, and `LAUNCH` for one more
  operation where the back end does not fuse it into others. Views, casts and sizes are free. A result more than
  `EXPANSION` times what it is made from (a mask spread over heads) counts only what it reads, so it is not held.
  Products, attention and reductions are never made again, with one exception: what depends on request *and*
  timestep is needed once a picture, so holding it saves no time, only the weights it reads. These are its price (and
  `LAUNCH`, for the next picture of the same prompt). So modulation vectors are held, being small and made from large
  weights, and the first block's modulated text is not.

If what is held at once (request values and one row) is more than ``context.max_held_bytes``, holding gets dearer and
products may be made again, until it fits. Values that the body could have been given and makes again are noted.

Between two hoisted stages only views, sizes and casts are made again.

Quantised weights that are made larger again by cheap operations are never held, but made again wherever they are read:
whoever quantised them wants the memory more than the time.

Legality: what is made again is pure (it is hoisted work) and reads only held values and graph inputs, so it gives the
same bits in the later stage.
"""

from __future__ import annotations

import math

import networkx as nx
import torch
from torch import fx

from .binding_time import HOISTED, BindingTime, binding_time
from .context import PassContext
from .cost import node_flops, tensor_bytes
from .edit import needed_nodes
from .effects import host_read, is_cast, is_size, is_view, view_base

ROWS = 32
"""Steps a schedule is taken to have: as many rows of a schedule value are held."""

LAUNCH = 2**16
"""What one more operation in the body costs, in bytes: the traffic of about 5 microseconds on a CPU."""

EXPANSION = 4

FLOPS_PER_BYTE = 16
"""Arithmetic that takes as long as moving one byte, where products have to be made again."""

_MAX_PRICE = 2.0**40
_COPIES = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default, torch.ops.aten.clone.default})


def choose_held(gm: fx.GraphModule, context: PassContext) -> dict[fx.Node, None]:
    """The nodes whose values cross from one stage to a later one, in graph order."""
    unpacked = _unpacked_weights(gm)
    held = _held_within_limit(gm, context, unpacked)
    _note_refused(gm, held | unpacked, context)
    for time in reversed(HOISTED):
        earlier = {n for n in gm.graph.nodes if binding_time(n) != time}
        # In graph order, since whether a cast is held depends on what is held already.
        for node in sorted(needed_nodes([n for n in held if n not in earlier], earlier) & earlier):
            _demand(node, held, unpacked)
    return {node: None for node in gm.graph.nodes if node in held}


def is_input(node: fx.Node) -> bool:
    """Whether every stage can read the node directly: a graph input or constant."""
    return node.op in ("placeholder", "get_attr")


def _unpacked_weights(gm: fx.GraphModule) -> set[fx.Node]:
    """Values cheaply made of weights of 8 bits alone that are larger than these."""
    packed: dict[fx.Node, int] = {}
    unpacked = set()
    for node in gm.graph.nodes:
        if binding_time(node) != BindingTime.MODEL:
            continue
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.itemsize == 1:
            packed[node] = tensor_bytes([node])
        elif is_view(node) or is_cast(node) or _is_cheap(node):
            size = sum(packed.get(source, 0) for source in node.all_input_nodes)
            if size:
                packed[node] = size
                if tensor_bytes([node]) > size:
                    unpacked.add(node)
    return unpacked


def _is_cheap(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in _COPIES)


def _held_within_limit(gm: fx.GraphModule, context: PassContext, unpacked: set[fx.Node]) -> set[fx.Node]:
    price = 1.0
    held = _held_for_body(gm, context, price, unpacked)
    while context.max_held_bytes is not None and tensor_bytes(held) > context.max_held_bytes and price < _MAX_PRICE:
        price *= 4
        held = _held_for_body(gm, context, price, unpacked)
    return held


def _note_refused(gm: fx.GraphModule, held: set[fx.Node], context: PassContext) -> None:
    """Say which values known before the loop the body makes again, cheap ones apart."""
    body = [n for n in gm.graph.nodes if n.op == "output" or binding_time(n) == BindingTime.STEP]
    for node in dict.fromkeys(view_base(source) for n in body for source in n.all_input_nodes):
        hoisted = binding_time(node) != BindingTime.STEP and not is_input(node) and node not in held
        size = tensor_bytes([node])
        if hoisted and size > LAUNCH and not is_size(node) and not is_cast(node):
            step = " a step" if _rows(node) > 1 else ""
            context.note("cut", f"{node.name} ({size:,} bytes{step}) is made again in the body: dearer to hold")


def _held_for_body(gm: fx.GraphModule, context: PassContext, price: float, unpacked: set[fx.Node]) -> set[fx.Node]:
    """The values on the edges of a minimum cut, with holding at ``price`` times its bytes.

    Each hoisted value is an edge from its making to its use, as wide as it costs to hold. Making hangs on the source
    by an edge as wide as it costs to make it again; wires, and uses in the body, are endless.
    """
    network = nx.DiGraph()
    body = [n for n in gm.graph.nodes if n.op == "output" or binding_time(n) == BindingTime.STEP]
    read_by_body = {source for node in body for source in node.all_input_nodes}
    pending = [n for n in read_by_body if binding_time(n) != BindingTime.STEP]
    for node in pending:
        network.add_edge((node, "use"), "body")
    seen = set(pending)
    while pending:
        node = pending.pop()
        holding = math.inf if node in unpacked else _holding(node, read_by_body) * (1 if is_input(node) else price)
        network.add_edge((node, "make"), (node, "use"), capacity=holding)
        making = _making(node, 0 if context.compiles else LAUNCH, anything=price > 1)
        network.add_edge("known", (node, "make"), capacity=making)
        for source in node.all_input_nodes if making < math.inf else ():
            network.add_edge((source, "use"), (node, "make"))
            if source not in seen:
                seen.add(source)
                pending.append(source)
    if "body" not in network:
        return set()
    _, (known, _) = nx.minimum_cut(network, "known", "body")
    return {n for n in seen if (n, "make") in known and (n, "use") not in known and not is_input(n)}


def _rows(node: fx.Node) -> int:
    return ROWS if binding_time(node) & BindingTime.SCHEDULE else 1


def _holding(node: fx.Node, read_by_body: set[fx.Node]) -> float:
    if node.op == "placeholder":
        # A weight the body does not read otherwise would have to stay for this.
        free = binding_time(node) != BindingTime.MODEL or node in read_by_body
        return 0 if free else tensor_bytes([node])
    if node.op == "get_attr":
        return 0
    if host_read(node) and is_size(node):
        return 8 * _rows(node)
    if is_view(node) or is_size(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return math.inf
    return tensor_bytes([node]) * _rows(node)


def _making(node: fx.Node, launch: int, *, anything: bool) -> float:
    if is_input(node) or host_read(node):
        return math.inf  # It is known and nobody makes it, or the loop would wait for it.
    if is_view(node) or is_size(node) or is_cast(node) or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    if binding_time(node) == BindingTime.REQUEST_SCHEDULE:
        return launch
    read, written = tensor_bytes(node.all_input_nodes), tensor_bytes([node])
    if written > EXPANSION * read:
        return read + launch
    if _is_cheap(node) or anything:
        return read + written + launch + node_flops(node) / FLOPS_PER_BYTE
    return math.inf


def _demand(node: fx.Node, held: set[fx.Node], unpacked: set[fx.Node]) -> None:
    """Add to ``held`` what must be held so that a later stage can have ``node``."""
    if is_input(node) or node in held:
        return
    free = is_view(node) or is_size(node) or node in unpacked or (is_cast(node) and _repeat_cast(node, held))
    if free and not host_read(node):
        for source in node.all_input_nodes:
            _demand(source, held, unpacked)
    else:
        held.add(node)


def _repeat_cast(node: fx.Node, held: set[fx.Node]) -> bool:
    base = view_base(node.all_input_nodes[0])
    return is_input(base) or base in held or tensor_bytes([base]) <= tensor_bytes([node])
