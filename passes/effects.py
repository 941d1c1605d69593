"""What an operation does besides computing its result: the one place that decides what may move.

Every pass asks the questions here instead of keeping a list of operators of its own:

* :func:`pinned_reason`: may this node run earlier, and run where a branch would have skipped it?
* :func:`is_view`: does its result share memory with an argument?
* :func:`host_read`: does it make the host wait for a value on the device?

The answers come from the operator's schema and tags (``torch.Tag``), which PyTorch keeps for every ATen
operator, so a new operator needs no entry here. What has no schema (a Python callable, a higher-order
operator) is pinned: unknown code is never moved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

# Python arithmetic on sizes, which graphs with dynamic shapes hold beside their tensor operations.
_SIZE_ARITHMETIC: frozenset[Callable[..., Any]] = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
        operator.neg, operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
        operator.ge, operator.and_, operator.or_, operator.not_,
        torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_sum,
    }
)  # fmt: skip

# Views whose schema does not say so, on the promise that the argument is not used any more.
_SILENT_VIEWS: frozenset[OpOverload] = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)

# Namespaces whose operators state all their effects in schema and tags. Custom operators may keep state.
_TRUSTED_NAMESPACES = frozenset({"aten", "prims", "prim", "dithoist"})

_COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "c10d", "_dtensor", "symm_mem"})


def schema_argument(node: fx.Node, name: str) -> Any:
    """Value of the schema argument ``name`` in this call, its default, or ``None`` where there is none."""
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[position] if position < len(node.args) else argument.default_value
    return None


def is_random(node: fx.Node) -> bool:
    """Whether the call draws random numbers. Attention operators draw only where their dropout is on."""
    if not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return bool(schema_argument(node, "dropout_p") != 0.0)


def host_read(node: fx.Node) -> bool:
    """Whether the call makes the host wait for device data: ``item``, ``nonzero``, a boolean index.

    ``aten.index.Tensor`` carries the tag always, though only a boolean index needs ``nonzero``.
    """
    if not isinstance(node.target, OpOverload):
        return False
    if node.target in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default):
        return any(_is_mask(index) for index in _index_list(node))
    tags = node.target.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _index_list(node: fx.Node) -> Iterable[Any]:
    indices = node.args[1]
    return indices if isinstance(indices, (list, tuple)) else ()


def _is_mask(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)


def is_size(node: fx.Node) -> bool:
    """Whether the node is a host number of a dynamic shape rather than a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def is_view(node: fx.Node) -> bool:
    """Whether the result shares memory with an argument and costs nothing to make again."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if not isinstance(node.target, OpOverload):
        return False
    if node.target in _SILENT_VIEWS:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def is_cast(node: fx.Node) -> bool:
    """Whether the node only changes the dtype: one memory-bound pass, cheap to repeat."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    source = node.args[0]
    return (
        isinstance(source, fx.Node)
        and set(node.kwargs) <= {"dtype"}
        and source.meta["val"].device == node.meta["val"].device
    )


def view_base(node: fx.Node) -> fx.Node:
    """The value ``node`` is a view of, through any number of views; ``node`` itself if it is none."""
    while is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def storage_owner(node: fx.Node) -> fx.Node:
    """The call or input that made the memory ``node`` lies in: :func:`view_base`, and for one of several
    results of a call, that call."""
    base = view_base(node)
    if base.target is operator.getitem:
        call = base.args[0]
        assert isinstance(call, fx.Node)
        return call
    return base


def writes_argument(node: fx.Node) -> bool:
    """Whether the call writes an argument in place, whoever defined the operator."""
    return isinstance(node.target, OpOverload) and bool(node.target._schema.is_mutable)


def written_memory(node: fx.Node) -> fx.Node:
    """The owner of the memory that a call writing its first argument in place writes, through earlier writes."""
    while True:
        owner = storage_owner(node)
        if not writes_argument(owner):
            return owner
        node = owner.all_input_nodes[0]


def is_assertion(node: fx.Node) -> bool:
    """Whether the call only fails or does not: ``_assert_scalar`` and the like."""
    return isinstance(node.target, OpOverload) and effect(node) == "assertion"


def pinned_reason(node: fx.Node) -> str | None:
    """Why the node must stay where the model put it, or ``None`` if it may be hoisted.

    Hoisting needs two things (as loop-invariant code motion does everywhere): the call is *pure*, so that
    running it once gives what running it each time gave; and it is *safe to speculate*, so that running it
    where a branch would have skipped it cannot fail or be seen. A host read is both: it makes the host wait, which is
    a reason to hoist it. An assertion may fail wherever it runs, but only in a call that would fail in any case.
    """
    reason = effect(node)
    return None if reason in ("host read", "assertion") else reason


def effect(node: fx.Node) -> str | None:
    """What the call does besides its result, or ``None`` if nothing."""
    if node.op != "call_function":
        return None
    target = node.target
    if target is operator.getitem or target in _SIZE_ARITHMETIC:
        return None
    if not isinstance(target, OpOverload):
        return "no ATen operator"
    if target.namespace in _COLLECTIVES:
        return "collective"
    if target.namespace not in _TRUSTED_NAMESPACES:
        return "custom operator"
    if writes_argument(node):
        return "writes an argument"
    if is_random(node):
        return "random"
    if host_read(node):
        return "host read"
    if not target._schema.returns:
        return "assertion"
    return None
