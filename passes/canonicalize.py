"""Canonical forms: one spelling for what models write in many, so that later passes match one shape.

Four rewrites, each bitwise neutral:

1. *Boolean-mask writes become static.* ``x[mask] *= s`` reaches the graph as ``index`` (of data-dependent
   shape, a host read), ``mul`` and ``index_put``. With ``m`` the mask broadcast over the trailing dimensions
   it becomes ``where(m, x * s, x)``; ``x[mask] = v`` becomes ``masked_fill(x, m, v)`` or ``where(m, v, x)``.

   Legality: row by row both forms store ``f(x)`` where the mask holds and ``x`` elsewhere. ``f`` may be any
   chain of operations whose result for one element does not depend on its neighbours *or on where it lies in
   memory*; vectorised and scalar tails of ``exp`` differ in the last bit, so only operations that IEEE 754
   rounds exactly are taken. A scale stays a scale: ``NaN * 0.0`` is NaN and ``-1 * 0.0`` is ``-0.0``, which a
   fill would not give. (Which NaN a bfloat16 or float16 product gives depends on its place in memory, in eager code
   as well; that it is one does not.) The mask must cover whole dimensions of ``x`` (``x[:, m]`` skips the first),
   and the result have the layout that ``index_put`` would have given it.
2. *Selections of a constant are fills*: ``where(m, v, x)`` becomes ``masked_fill(x, m, v)``, ``where(m, x, v)``
   becomes ``masked_fill(x, ~m, v)``, and ``x * keep`` with a boolean ``keep`` on integers ``masked_fill(x, ~keep, 0)``.
   Legality: each stores ``v`` or ``x`` element by element; ``v`` is the number the constant holds in its own dtype,
   which both convert to ``x``'s dtype alike, and the mask does not enlarge ``x``. A fill of what is not contiguous is
   laid out otherwise than a selection or a product, so these stay then. For floating point ``x * keep``
   is no fill (``NaN * 0`` is NaN, ``-1 * 0`` is ``-0.0``): it stays a product, and the report says so.
3. *Creators that read only a shape* (``zeros_like``, ``full_like``, ``new_zeros`` ...) become ``full`` with
   that shape, so that their result no longer depends on the tensor they were modelled on. Legality: the
   operators never read their argument's values; a result that would not be contiguous is left alone.
4. *Sizes* (``sym_size``) become the graph input that holds the same symbol, for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .context import PassContext
from .edit import call, same_layout, same_sizes, shape_of, size_inputs
from .effects import is_size

aten = torch.ops.aten

# Correctly rounded for every element, whatever its neighbours: IEEE 754 basic operations.
_EXACT: frozenset[OpOverload] = frozenset(
    {
        aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor,
        aten.sub.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default,
    }
)  # fmt: skip

# Creator -> the value it fills with (None: its second argument).
_CREATORS: dict[OpOverload, float | None] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.full_like.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
}


def canonicalize_graph(gm: fx.GraphModule, context: PassContext) -> int:
    """Apply the four rewrites in place. Returns how many nodes were replaced."""
    replaced = 0
    sizes = size_inputs(gm.graph)
    for node in list(gm.graph.nodes):
        if node.target is aten.index_put.default:
            new = _static_index_put(node, context)
        elif node.target is aten.where.self:
            new = _selected_constant(node)
        elif node.target is aten.mul.Tensor:
            new = _product_with_mask(node, context)
        elif node.target in _CREATORS:
            new = _creator(node, sizes)
        elif node.target is aten.sym_size.int:
            new = sizes.get(str(node.meta["val"]))
        else:
            continue
        if new is not None:
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            replaced += 1
    return replaced


def _creator(node: fx.Node, sizes: dict[str, fx.Node]) -> fx.Node | None:
    value = node.meta["val"]
    shape = shape_of(value.shape, sizes)
    fill: Any = _CREATORS[node.target]  # type: ignore[index]
    if fill is None:
        fill = node.args[1] if len(node.args) > 1 else node.kwargs["fill_value"]
    if shape is None or isinstance(fill, fx.Node) or not value.is_contiguous():
        return None
    new = call(node, aten.full.default, shape, fill, dtype=value.dtype, layout=value.layout, device=value.device)
    return new if same_layout(new, node) else None


def _static_index_put(node: fx.Node, context: PassContext) -> fx.Node | None:
    x, indices, values, *accumulate = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(values, fx.Node)
    assert isinstance(indices, (list, tuple))
    *skipped, mask = indices
    if not isinstance(mask, fx.Node) or mask.meta["val"].dtype != torch.bool or any(skipped):
        return None
    start, end = len(skipped), len(skipped) + mask.meta["val"].ndim
    rest = x.meta["val"].shape[end:]
    if any(accumulate) or not same_sizes(mask.meta["val"].shape, x.meta["val"].shape[start:end]):
        context.note("canonicalize", f"{node.name}: boolean index write left: {_why(accumulate)}")
        return None

    chain = _exact_chain(values, x, indices)
    # Behind skipped dimensions the values have these in front of the rows, and a row's value may differ in each.
    if chain is None and not _broadcasts(values.meta["val"].shape, rest):
        context.note("canonicalize", f"{node.name}: boolean index write left: values depend on the row")
        return None

    wide = mask
    for _ in rest:
        wide = call(node, aten.unsqueeze.default, wide, -1)
    if chain is None:
        new = _fill(node, x, wide, values)
    else:
        scaled = x
        for step in reversed(chain):
            operands = tuple(scaled if a is step.args[0] else a for a in step.args)
            scaled = call(node, step.target, *operands, **step.kwargs)  # type: ignore[arg-type]
        new = call(node, aten.where.self, wide, scaled, x)
    if not same_layout(new, node):
        context.note("canonicalize", f"{node.name}: boolean index write left: the layout would change")
        return None
    return new


def _selected_constant(node: fx.Node) -> fx.Node | None:
    mask, chosen, other = node.args
    if not isinstance(mask, fx.Node) or not isinstance(chosen, fx.Node) or not isinstance(other, fx.Node):
        return None
    for x, value, inverted in ((other, chosen, False), (chosen, other, True)):
        number = _constant(value, node.meta["val"].dtype)
        if number is None or not same_layout(x, node):
            continue
        where = call(node, aten.logical_not.default, mask) if inverted else mask
        new = call(node, aten.masked_fill.Scalar, x, where, number)
        return new if same_layout(new, node) else None
    return None


def _product_with_mask(node: fx.Node, context: PassContext) -> fx.Node | None:
    for x, factor in (node.args, node.args[::-1]):
        if not isinstance(x, fx.Node) or not isinstance(factor, fx.Node) or is_size(x) or is_size(factor):
            return None
        keep = factor.args[0] if factor.target is aten._to_copy.default else factor
        if not isinstance(keep, fx.Node) or keep.meta["val"].dtype != torch.bool or not same_layout(x, node):
            continue
        if x.meta["val"].dtype.is_floating_point or x.meta["val"].dtype.is_complex:
            context.note(
                "canonicalize", f"{node.name} stays a product with a mask: 0 * NaN is no 0, and 0 * -1 is -0.0"
            )
            return None
        new = call(node, aten.masked_fill.Scalar, x, call(node, aten.logical_not.default, keep), 0)
        return new if same_layout(new, node) else None
    return None


def _why(accumulate: list[Any]) -> str:
    return "it accumulates" if any(accumulate) else "the mask does not cover the leading dimensions"


def _broadcasts(shape: torch.Size, rest: torch.Size) -> bool:
    """Whether values of ``shape`` are the same for every row of trailing shape ``rest``."""
    if len(shape) > len(rest):
        return False
    pairs = zip(reversed(shape), reversed(rest), strict=False)
    return all(same_sizes([s], [1]) or same_sizes([s], [r]) for s, r in pairs)


def _fill(node: fx.Node, x: fx.Node, wide: fx.Node, values: fx.Node) -> fx.Node:
    """A constant goes in as a number: ``masked_fill`` with a tensor would read it on the host."""
    number = _constant(values, node.meta["val"].dtype)
    if number is None:
        return call(node, aten.where.self, wide, values, x)
    return call(node, aten.masked_fill.Scalar, x, wide, number)


def _constant(node: fx.Node, dtype: torch.dtype) -> bool | int | float | None:
    """The number a 0-dim value is known to be, as a tensor of ``dtype`` would hold it: ``full([], 2.5)``, or a tensor
    the model wrote as a literal. A complex fill is none: it would lose the sign of a zero."""
    if node.meta["val"].ndim or dtype.is_complex:
        return None
    number: Any = None
    if node.target is aten.full.default:
        number = node.args[1]
    elif node.target is aten.scalar_tensor.default:
        number = node.args[0]
    elif node.target in (aten.zeros.default, aten.ones.default):
        number = int(node.target is aten.ones.default)
    with unset_fake_temporarily():  # Capture runs us under its fake mode; these are real numbers.
        if isinstance(number, (bool, int, float)):
            return torch.tensor(number, dtype=node.meta["val"].dtype).to(dtype).item()
        if node.target is aten.lift_fresh_copy.default and isinstance(node.args[0], fx.Node):
            literal = getattr(node.graph.owning_module, str(node.args[0].target), None)
            if node.args[0].op == "get_attr" and isinstance(literal, torch.Tensor) and literal.device.type == "cpu":
                return literal.to(dtype).item()
    return None


def _exact_chain(values: fx.Node, x: fx.Node, indices: list[Any] | tuple[Any, ...]) -> list[fx.Node] | None:
    """The operations from ``x[indices]`` to ``values``, last first, if all are exact and take only scalars."""
    chain: list[fx.Node] = []
    node = values
    if x.meta["val"].is_complex():  # Complex products and quotients are not rounded once.
        return None
    while node.target in _EXACT:
        source = node.args[0]
        others = [a for a in node.args[1:] if isinstance(a, fx.Node)]
        # alpha and rounding_mode make two operations of one, which may or may not be fused.
        if not isinstance(source, fx.Node) or node.kwargs or any(o.meta["val"].ndim for o in others):
            return None
        if node.meta["val"].dtype != x.meta["val"].dtype:
            return None
        chain.append(node)
        node = source
    if node.target is not aten.index.Tensor or node.args[0] is not x:
        return None
    return chain if list(node.args[1]) == list(indices) else None  # type: ignore[arg-type]
