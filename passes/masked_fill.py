"""Lowering: out-of-place ``masked_fill`` in the body becomes an in-place index-scale, where no capture is active.

``masked_fill(x, m, v)`` and ``where(m, x * s, x)`` (:mod:`dithoist.passes.canonicalize` makes these of all the
ways models write them) copy all of ``x`` to change a few rows. Where ``x`` is dead afterwards the rows can be
written in place, and where the mask is known before the step its row indices are made once, with the mask: the
body then neither copies nor waits.

**Forms**, the first that applies:

1. *indexed rows* (``dithoist::index_fill_``, ``dithoist::index_scale_``): the mask is hoisted and constant over
   rows of at least :data:`MIN_ROW_WIDTH` elements;
2. *in place* (``masked_fill_``): any other fill, so also one whose mask changes with the latents;
3. the original: any other scale.

Cost model, calibrated by ``bench/masked_fill.py`` on a CPU: writing indexed rows costs one visit per row named
plus the bytes of those rows; with rows of one or two elements the visits dominate and the fused ``masked_fill_``
wins. Past a share of rows that grows with the element size, one pass over everything is cheaper than the visits;
zeroing then clears bits with a keep mask of the rows (``operators._clear_rows``). How many rows a mask names is known
only at run time, so the operator chooses between these two. Multiplying by a keep mask is not on the list: ``NaN * 0``
is NaN and ``-1 * 0`` is ``-0.0`` where a fill writes ``+0.0``, and ``x * 1`` quiets a signalling NaN where a scale
leaves the other rows alone; clearing bits does its work exactly and as fast.

**Legality** of writing into the memory of ``x`` at the place of the call:

* *Fresh*: that memory was allocated by a call in this body. Graph inputs (the caller's tensors, weights, held
  request values, schedule rows) are not; a view is as fresh as its base.
* *Last use*: no node after the call reads ``x`` or anything that shares its memory, and none of these is an
  output. Sharing is followed through every view; that no other node's fake value lies in the same storage is
  checked as well, for operators that return their argument without saying so.
* *Same result*: ``x`` has the result's shape, dtype and strides (so the mask does not enlarge it), does not overlap
  itself, and is not complex. In-place and out-of-place run the same arithmetic on the elements the mask names and
  leave the others alone, for every value: NaN, infinities, zeros of both signs.
* *Operands*: neither mask nor value lies in the memory to be written.
* *Mask*: it is broadcast to ``x`` explicitly, aligned at the last dimension, never guessed: ``[B, S, 1]`` names rows of
  ``[B, S, D]``, ``[S]`` names elements of the last dimension.

Sites may be chained: each is judged on the functional graph. If nothing reads ``x`` after the first write, whatever
memory the first result lies in is read afterwards only through that result, which is what the second is
judged on.

Under capture (``runtime/capture.py``) the functional body runs instead: static shapes, no ``nonzero``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from . import operators as operators  # Registers dithoist::index_fill_ and the like.
from .binding_time import HOISTED, BindingTime, binding_time
from .context import PassContext
from .dead_code import eliminate_dead_code
from .edit import copy_graph, needed_nodes, same_layout
from .effects import view_base
from .split import Program, Stage

aten = torch.ops.aten

MIN_ROW_WIDTH = 4
"""Elements a row must have for indexed rows to beat ``masked_fill_`` whatever share of them is filled."""


@dataclass(frozen=True)
class _Site:
    """A call that could be written in place: ``kind`` is ``"fill"`` or ``"scale"``."""

    node: fx.Node
    x: fx.Node
    mask: fx.Node
    amount: Any
    kind: str


def lower_masked_fill(program: Program, context: PassContext) -> Program:
    """Add to ``program`` the body to run while no capture is active, and the stages that make its row indices.

    Without ``context.in_place`` (a back end that fuses ``masked_fill`` into its neighbours and wants a functional
    graph) both bodies are the same.
    """
    if not context.in_place:
        return program
    gm = copy_graph(program.body.module)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    sites = [s for s in map(_match, gm.graph.nodes) if s is not None]
    illegal = [_illegal(site, order) for site in sites]  # All judged on the functional graph.
    rows: dict[tuple[fx.Node, tuple[int, ...], int], fx.Node] = {}
    lowered = 0
    for site, reason in zip(sites, illegal, strict=True):
        if reason is None:
            reason = _rewrite(gm.graph, _match(site.node) or site, rows)  # Its x may be an earlier site's result.
        if reason is None:
            lowered += 1
        else:
            context.note("masked_fill", f"{site.node.name} is left as it was: {reason}")
    context.count("lower_masked_fill", lowered)
    if not lowered:
        return program
    stages = _row_stages(program, gm, rows)
    for placeholder in rows.values():
        del placeholder.meta["mask"]
    eliminate_dead_code(gm, context)
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        if not placeholder.users:
            gm.graph.erase_node(placeholder)
    gm.recompile()
    inputs = tuple(n.name for n in gm.graph.find_nodes(op="placeholder"))
    eager = dataclasses.replace(program.body, module=gm, inputs=inputs)
    return dataclasses.replace(program, stages=(*program.stages, *stages), eager_body=eager)


def _match(node: fx.Node) -> _Site | None:
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        x, mask, value = node.args
        return _Site(node, x, mask, value, "fill")  # type: ignore[arg-type]
    if node.target is not aten.where.self:
        return None
    mask, scaled, x = node.args
    if not isinstance(scaled, fx.Node) or scaled.target not in (aten.mul.Tensor, aten.mul.Scalar):
        return None
    if scaled.args[0] is not x or isinstance(scaled.args[1], fx.Node) or set(scaled.users) != {node}:
        return None
    return _Site(node, x, mask, scaled.args[1], "scale")  # type: ignore[arg-type]


def _illegal(site: _Site, order: dict[fx.Node, int]) -> str | None:
    """Why the site may not be written in place, or ``None``."""
    x, value = site.x, site.x.meta["val"]
    base = view_base(x)
    if value.is_complex():
        return "complex numbers are left alone"
    if base.op != "call_function":
        return f"{base.name} is an input or held value"
    if not same_layout(x, site.node):
        return "the result has another layout than its input"
    if _overlaps_itself(value):
        return f"{x.name} overlaps itself"
    for other in (site.mask, site.amount):
        if isinstance(other, fx.Node) and view_base(other) is base:
            return f"{other.name} lies in the memory to be written"
    own = {site.node, *(u for u in x.users if site.kind == "scale" and u is site.node.args[1])}
    for node in order:
        shares = view_base(node) is base if node.op != "output" else False
        if not shares and node is not site.node and _same_storage(node, base):
            return f"{node.name} may share its memory"
        if shares:
            late = [u for u in node.users if u not in own and order[u] > order[site.node]]
            if late:
                return f"{late[0].name} reads {node.name} afterwards"
    return None


def _overlaps_itself(value: torch.Tensor) -> bool:
    return any(stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _same_storage(node: fx.Node, base: fx.Node) -> bool:
    a, b = node.meta.get("val"), base.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return bool(StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage()))


def _leading(mask: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Number of leading dimensions of ``shape`` over which the mask, aligned at the last, varies."""
    varying = [i for i, size in enumerate(mask.shape) if size != 1]
    return len(shape) - (mask.ndim - 1 - varying[-1]) if varying else 0


def _rewrite(graph: fx.Graph, site: _Site, rows: dict[tuple[fx.Node, tuple[int, ...], int], fx.Node]) -> str | None:
    """Put the cheapest legal form in the site's place; the reason where there is none."""
    shape = tuple(site.x.meta["val"].shape)
    number = site.amount if isinstance(site.amount, (bool, int, float)) else None
    hoisted = binding_time(site.mask) != BindingTime.STEP
    static = all(isinstance(size, int) for size in shape)
    leading = _leading(site.mask.meta["val"], shape) if static else 0
    with graph.inserting_before(site.node):
        if number is not None and hoisted and static and math.prod(shape[leading:]) >= MIN_ROW_WIDTH:
            index = _rows(graph, site.mask, shape, leading, rows)
            packet = torch.ops.dithoist.index_fill_ if site.kind == "fill" else torch.ops.dithoist.index_scale_
            new = graph.call_function(packet.default, (site.x, index, leading, number))
        elif site.kind == "fill":
            overload = aten.masked_fill_.Tensor if isinstance(site.amount, fx.Node) else aten.masked_fill_.Scalar
            new = graph.call_function(overload, (site.x, site.mask, site.amount))
        else:
            return "rows are too narrow, or the mask is not known before the step"
    new.meta = dict(site.node.meta)
    site.node.replace_all_uses_with(new)
    graph.erase_node(site.node)
    return None


def _rows(
    graph: fx.Graph,
    mask: fx.Node,
    shape: tuple[int, ...],
    leading: int,
    rows: dict[tuple[fx.Node, tuple[int, ...], int], fx.Node],
) -> fx.Node:
    """The body's input for the row indices of a mask over a shape; one for all sites that agree in these."""
    key = (mask, shape[:leading], len(shape) - leading)
    if key not in rows:
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            rows[key] = graph.placeholder(f"rows_{mask.name}")
        rows[key].meta = {"binding_time": binding_time(mask), "mask": (mask, list(shape), leading)}
    return rows[key]


def _row_stages(program: Program, gm: fx.GraphModule, rows: dict[Any, fx.Node]) -> list[Stage]:
    """A stage for each binding time of the masks: what makes the mask again, then ``masked_rows``."""
    stages = []
    for time in HOISTED:
        inputs = [p for p in rows.values() if binding_time(p) == time]
        if not inputs:
            continue
        needed = needed_nodes([p.meta["mask"][0] for p in inputs], set())
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            if node in needed:
                env[node] = graph.node_copy(node, env.__getitem__)
        found = []
        for placeholder in inputs:
            mask, shape, leading = placeholder.meta["mask"]
            found.append(graph.call_function(torch.ops.dithoist.masked_rows.default, (env[mask], shape, leading)))
        graph.output(tuple(found))
        names = tuple(n.name for n in graph.find_nodes(op="placeholder"))
        depends = sorted({d for name in names for d in program.depends(name)}, key=program.placeholders.index)
        stages.append(
            Stage(
                time=time,
                module=fx.GraphModule(gm, graph, class_name="RowsStage"),
                inputs=names,
                outputs=tuple(p.name for p in inputs),
                depends=tuple(depends),
                capture_safe=False,
            )
        )
    return stages
