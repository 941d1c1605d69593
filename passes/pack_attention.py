"""Packing: attention whose mask is known before the loop skips the keys that the mask hides.

An attention of the body with a mask of the model or of the request becomes ``dithoist::planned_attention``, which
follows a plan that is made where the mask is known (:mod:`dithoist.passes.attention`): without a mask where it hides
nothing, on packed tokens where it is padding or segments, with the mask otherwise. Which of them a request needs, its
mask's values tell, not the graph, so nothing is compiled for it; and a mask that changes is planned anew, as every
value of the request is made anew.

Legality: the plan shows each query the very keys that the mask shows it (:func:`dithoist.passes.varlen.mask_segments`),
and hidden keys have no weight. Sums over fewer keys are grouped otherwise, so last bits differ, and a NaN among what is
hidden does not show: this is for ``numerics="fast"`` alone. Not even a mask that hides nothing may go otherwise:
without one, a query whose scores are all NaN gets zeros (``tests/test_attention_bits.py``).
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from .attention import Plan, kernel
from .binding_time import BindingTime, binding_time
from .context import PassContext
from .edit import call, same_layout, shape_of, size_inputs
from .effects import schema_argument


def pack_attention(gm: fx.GraphModule, context: PassContext) -> int:
    """Plan each attention of the body whose mask is known before it, if ``context.fast``; otherwise count them.

    Binding times are known by then. Returns how many attentions got a plan.
    """
    found = [node for node in gm.graph.nodes if _has_known_mask(node)]
    if not found:
        return 0
    if not context.fast:
        message = (
            f"{len(found)} attentions keep masks that are known before the loop; numerics='fast' packs their tokens"
        )
        context.note("pack_attention", message)
        return 0
    plans: dict[Any, list[fx.Node]] = {}
    kernels: Counter[str] = Counter()
    sizes = size_inputs(gm.graph)
    for node in found:
        query, key, value, mask = (schema_argument(node, name) for name in ("query", "key", "value", _mask_name(node)))
        shape = shape_of(torch.Size([*query.meta["val"].shape[:-1], key.meta["val"].shape[-2]]), sizes)
        if shape is None:
            context.note("pack_attention", f"{node.name} keeps its mask: sizes are known only at the call")
            continue
        if (mask, str(shape)) not in plans:
            plans[mask, str(shape)] = _plan(node, mask, shape)
        (result,) = node.users
        new = _planned(node, result, (query, key, value, mask, plans[mask, str(shape)]))
        if new is None:
            context.note("pack_attention", f"{node.name} keeps its mask: its result is laid out otherwise")
            continue
        result.replace_all_uses_with(new)
        gm.graph.erase_node(result)
        gm.graph.erase_node(node)
        q, v = query.meta["val"], value.meta["val"]
        kernels[kernel(q.device, q.dtype, q.shape[-1], v.shape[-1])] += 1
    for name, count in kernels.items():
        context.note("pack_attention", f"{count} attentions run on packed tokens ({name}) where their mask allows")
    gm.graph.eliminate_dead_code()
    return kernels.total()


def _planned(node: fx.Node, result: fx.Node, arguments: tuple[Any, ...]) -> fx.Node | None:
    """A planned attention before ``node``, laid out as its ``result`` is."""
    for heads_first in (True, False):
        target = torch.ops.dithoist.planned_attention.default
        new = call(node, target, *arguments, schema_argument(node, "scale"), heads_first)
        if same_layout(new, result):
            new.meta["binding_time"] = BindingTime.STEP
            return new
        node.graph.erase_node(new)
    return None


def _has_known_mask(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or "scaled_dot_product" not in node.target.name():
        return False
    mask = schema_argument(node, _mask_name(node))
    if not isinstance(mask, fx.Node) or binding_time(mask) not in (BindingTime.MODEL, BindingTime.REQUEST):
        return False
    only_result = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    plain = not schema_argument(node, "is_causal") and not schema_argument(node, "dropout_p")
    step = binding_time(node) == BindingTime.STEP  # What runs once a request is not worth a plan.
    return step and plain and only_result and len(node.users) == 1


def _mask_name(node: fx.Node) -> str:
    assert isinstance(node.target, OpOverload)
    names = {argument.name for argument in node.target._schema.arguments}
    return "attn_bias" if "attn_bias" in names else "attn_mask"


def _plan(node: fx.Node, mask: fx.Node, shape: list[int | fx.Node]) -> list[fx.Node]:
    """The parts of a plan, made where the mask is known."""
    whole = call(node, torch.ops.dithoist.plan_attention.default, mask, shape)
    whole.meta["binding_time"] = BindingTime(functools.reduce(operator.or_, map(binding_time, whole.all_input_nodes)))
    parts = []
    for i, name in enumerate(Plan._fields):
        with node.graph.inserting_before(node):
            part = node.graph.create_node("call_function", operator.getitem, (whole, i), name=f"plan_{name}")
        part.meta = {"val": whole.meta["val"][i], "binding_time": whole.meta["binding_time"]}
        parts.append(part)
    return parts
