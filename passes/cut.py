"""The cut: which values are held between the stages.

A stage that needs a value of an earlier one can have it held, or can make it again from what is held. Making
a view again costs nothing and keeps one base tensor where holding each view would keep many, so views and
host-side sizes are always made again. A cast is made again where its source is at hand anyway or is the
smaller of the two. Everything else is held; matrix products in particular are never repeated.

Legality: what is made again is pure (it is hoisted work) and reads only held values and graph inputs, so it
gives the same bits in the later stage.

This is the seam for a minimum cut over bytes held: another strategy is another function of this signature.
"""

from __future__ import annotations

from torch import fx

from .binding_time import BindingTime, binding_time
from .effects import is_cast, is_size, is_view, view_base


def choose_held(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """The nodes whose values cross from one stage to a later one, in graph order."""
    crossing = [
        source
        for node in gm.graph.nodes
        for source in node.all_input_nodes
        if binding_time(source) != _time_of_use(node)
    ]
    held: set[fx.Node] = set()
    # The second round knows what is held anyway, so a cast of such a value is made again, not held beside it.
    for _ in range(2):
        at_hand, held = held, set()
        for node in crossing:
            _demand(node, held, at_hand)
    return {node: None for node in gm.graph.nodes if node in held}


def is_input(node: fx.Node) -> bool:
    """Whether every stage can read the node directly: a graph input or constant."""
    return node.op in ("placeholder", "get_attr")


def _time_of_use(node: fx.Node) -> BindingTime:
    return BindingTime.STEP if node.op == "output" else binding_time(node)


def _demand(node: fx.Node, held: set[fx.Node], at_hand: set[fx.Node]) -> None:
    """Add to ``held`` what must be held so that a later stage can have ``node``."""
    if is_input(node):
        return
    if is_view(node) or is_size(node) or (is_cast(node) and _repeat_cast(node, at_hand)):
        for source in node.all_input_nodes:
            _demand(source, held, at_hand)
    else:
        held.add(node)


def _repeat_cast(node: fx.Node, at_hand: set[fx.Node]) -> bool:
    base = view_base(node.all_input_nodes[0])
    return is_input(base) or base in at_hand or _bytes(base) <= _bytes(node)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * int(value.element_size())
