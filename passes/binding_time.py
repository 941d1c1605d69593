"""Binding-time analysis: for every value of a denoiser's graph, the earliest moment it can be known.

The lattice is a set of sources under union (Jones, Gomard, Sestoft: *Partial Evaluation*, 1993): a value
depends on what is fixed for one generation (``REQUEST``), on the step's timestep (``SCHEDULE``), on both, on
neither (``MODEL``), or on the latents (``STEP``, the top: nothing that reads latents can be known earlier).

Legality: the analysis is a forward data-flow over a functional graph, so one pass in graph order is a fixed
point. A node's time is the union over the values it *reads*; canonicalisation has already replaced uses of a
mere shape, dtype or device by constants. A node that is impure or unsafe to speculate is pinned to ``STEP``
(:func:`dithoist.passes.effects.pinned_reason`), and so, by union, is everything that reads it.
"""

from __future__ import annotations

import enum
from typing import cast

from torch import fx

from .context import PassContext
from .effects import pinned_reason
from .printing import format_node


class BindingTime(enum.IntFlag):
    """When a value is first known. Union is ``|``; ``STEP`` absorbs everything."""

    MODEL = 0
    REQUEST = 1
    SCHEDULE = 2
    REQUEST_SCHEDULE = 3
    STEP = 7

    @property
    def label(self) -> str:
        """Lower-case name as reports and dumps print it, such as ``request+schedule``."""
        return cast(str, self.name).lower().replace("_", "+")


HOISTED = (
    BindingTime.MODEL,
    BindingTime.REQUEST,
    BindingTime.SCHEDULE,
    BindingTime.REQUEST_SCHEDULE,
)
"""The times before ``STEP``, in the order their stages run."""

TIMES = (*HOISTED, BindingTime.STEP)
"""Every time, in that order (iterating over the flag itself would give only its single bits)."""


def binding_time(node: fx.Node) -> BindingTime:
    """The time :func:`binding_times` found for ``node``."""
    return cast(BindingTime, node.meta["binding_time"])


def binding_times(gm: fx.GraphModule, context: PassContext) -> int:
    """Write each node's :class:`BindingTime` to ``node.meta["binding_time"]``.

    ``context.labels`` gives the time of each placeholder by name; a placeholder it lacks is ``STEP``.
    Returns the number of operations that are known before the loop's body.
    """
    hoisted = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            time = context.labels.get(node.name, BindingTime.STEP)
        else:
            time = BindingTime.MODEL
            for source in node.all_input_nodes:
                time |= binding_time(source)
            reason = pinned_reason(node)
            if reason is not None and time != BindingTime.STEP:
                time = BindingTime.STEP
                context.note("binding_times", f"{node.name} ({node.target}) stays in the body: {reason}")
            hoisted += node.op == "call_function" and time != BindingTime.STEP
        node.meta["binding_time"] = BindingTime(time)
    return hoisted


def format_binding_times(gm: fx.GraphModule) -> str:
    """The graph as text, one line a node, each with its binding time in front."""
    width = max(len(t.label) for t in TIMES)
    lines = [f"{binding_time(n).label:<{width}}  {format_node(n)}" for n in gm.graph.nodes]
    return "\n".join(lines)
