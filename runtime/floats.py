"""Floats that AOTAutograd would lose, as constants of the graph.

With ``dynamic=True``, and once a Python float has changed, Dynamo makes it an input, and AOTAutograd turns what is
computed with it into tensor operations. In that it drops ``alpha``: ``torch.add(eps, x, alpha=a)`` with a float ``eps``
becomes ``eps + x`` (torch 2.13, ``torch/fx/passes/_tensorify_python_scalars.py``; Cosmos has such a line). A float that
meets an ``alpha`` is therefore asked to be a constant, with a guard, in the way AOTAutograd itself asks for it: what
Dynamo has traced so far is traced once more.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.utils._sympy.symbol import SymT, symbol_is_type


def keep_floats_beside_alpha(gm: fx.GraphModule) -> None:
    """Have Dynamo make its graph ``gm`` anew if it would be misunderstood.

    Raises:
        TensorifyScalarRestartAnalysis: which Dynamo understands.
    """
    beside = [node for node in gm.graph.nodes if "alpha" in node.kwargs]
    floats = {str(s) for node in beside for source in node.all_input_nodes for s in _symbols(source)}
    unknown = sorted(name for name in floats if not TensorifyState.should_specialize(name))
    for name in unknown:
        TensorifyState.specialize(name)
    if unknown:
        raise TensorifyScalarRestartAnalysis


def _symbols(node: fx.Node) -> list[object]:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.SymFloat):
        return []
    return [s for s in value.node.expr.free_symbols if symbol_is_type(s, SymT.FLOAT)]
