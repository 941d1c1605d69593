"""Attention on packed tokens: operators that skip the keys which a mask hides, whatever mask a request brings.

* ``dithoist::plan_attention(Tensor mask, SymInt[] shape) -> (Tensor, Tensor, Tensor, Tensor, Tensor)``: reads a mask of
  scores of ``shape``, once a request, and says what to do with it (:class:`Plan`).
* ``dithoist::planned_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor[] plan, float? scale,
  bool heads_first) -> Tensor``: ``scaled_dot_product_attention`` by that plan, ``[B, H, Q, D]``, which lies in memory
  like that, or as ``[B, Q, H, D]`` would.

The plan is data: its shapes depend on those of the mask alone, so a request of another kind compiles nothing, and
what the host has to know of it lies on the host, so no step waits. While a CUDA graph is captured the mask is used, for
a plan would be captured with it.

A query that sees no key gets zeros, as with a boolean mask. What differs is the last bits, and that a NaN
behind a mask is not seen: a masked key has weight 0, and 0 * NaN is NaN.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .varlen import Varlen, from_segment_ids, mask_segments

KEEP_MASK, NO_MASK, PACKED = range(3)

WORTH_PACKING = 0.9
"""Packing pays where no more than this share of the scores is left: gathering keys and values costs as well."""

_library = torch.library.Library("dithoist", "FRAGMENT")
_library.define(
    "plan_attention(Tensor mask, SymInt[] shape) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "planned_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor[] plan, float? scale, "
    "bool heads_first) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Plan(NamedTuple):
    """What to do with a mask, as tensors whose shapes say nothing of it. ``n`` is how many sequences there can be.

    Attributes:
        host: int64 ``[6]``, on the host: :data:`KEEP_MASK`, :data:`NO_MASK` or :data:`PACKED`; how many sequences there
            are, packed queries, packed keys, queries in the longest sequence, keys in the longest.
        table: int64 ``[n, 5]``, on the host; of each sequence its row, how many queries and keys it has, and the flat
            position of the first query and key, or -1 where they do not stand side by side.
        cu_seqlens: int32 ``[2, n + 1]``, of queries and of keys, on the mask's device.
        queries: int64 ``[B * Q]``, flat positions of the packed queries, then zeros.
        keys: int64 ``[B * K]``, flat positions of the packed keys, then zeros.
    """

    host: Tensor
    table: Tensor
    cu_seqlens: Tensor
    queries: Tensor
    keys: Tensor


def _empty_plan(mask: Tensor, shape: Sequence[Any]) -> Plan:
    batch, _, queries, keys = shape
    most = batch * torch.sym_min(queries, keys)
    return Plan(
        torch.zeros(6, dtype=torch.int64),
        torch.zeros(most, 5, dtype=torch.int64),
        torch.zeros(2, most + 1, dtype=torch.int32, device=mask.device),
        torch.zeros(batch * queries, dtype=torch.int64, device=mask.device),
        torch.zeros(batch * keys, dtype=torch.int64, device=mask.device),
    )


def plan_attention(mask: Tensor, shape: Sequence[int]) -> Plan:
    """What to do with ``mask``, which broadcasts to scores of ``shape``, ``[B, H, Q, K]``."""
    plan = _empty_plan(mask, shape)
    segments = mask_segments(mask, shape)
    if segments is None:
        return plan
    queries, keys = (from_segment_ids(ids, padding=-1) for ids in segments)
    batch, _, n_queries, n_keys = shape
    scores = int(torch.dot(queries.cu_seqlens.long().diff(), keys.cu_seqlens.long().diff()))
    if scores == batch * n_queries * n_keys:
        plan.host[0] = NO_MASK
    elif scores <= WORTH_PACKING * batch * n_queries * n_keys:
        _fill(plan, queries, keys, n_queries, n_keys)
    return plan


def _fill(plan: Plan, queries: Varlen, keys: Varlen, n_queries: int, n_keys: int) -> None:
    n = len(queries.cu_seqlens) - 1
    counts = (PACKED, n, len(queries.indices), len(keys.indices), queries.max_seqlen, keys.max_seqlen)
    plan.host.copy_(torch.tensor(counts))
    for side, (part, flat) in enumerate(((queries, plan.queries), (keys, plan.keys))):
        starts, lengths = part.cu_seqlens[:-1].long(), part.cu_seqlens.long().diff()
        first, last = part.indices[starts], part.indices[starts + lengths - 1]
        plan.table[:n, 1 + side] = lengths
        plan.table[:n, 3 + side] = torch.where(last - first + 1 == lengths, first, -1)
        plan.cu_seqlens[side, : n + 1] = part.cu_seqlens
        flat[: len(part.indices)] = part.indices
    plan.table[:n, 0] = queries.indices[queries.cu_seqlens[:-1].long()] // n_queries


def planned_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    plan: Sequence[Tensor],
    scale: float | None,
    heads_first: bool,
) -> Tensor:
    """``scaled_dot_product_attention`` of ``[B, H, Q, D]``, ``[B, H, K, D]`` and ``[B, H, K, Dv]`` by ``plan``."""
    parts = Plan(*plan)
    kind = parts.host.tolist()[0]  # The host's own; `item` would count as a read from a device.
    if kind == KEEP_MASK or _capturing(query):
        result = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    elif kind == NO_MASK:
        result = scaled_dot_product_attention(query, key, value, scale=scale)
    else:
        run = _KERNELS[kernel(query.device, query.dtype, query.shape[-1], value.shape[-1])]
        result = run(query, key, value, parts, scale)
    return result.contiguous() if heads_first else result.transpose(1, 2).contiguous().transpose(1, 2)


def _capturing(query: Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def kernel(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> str:
    """Name of what runs packed attention: ``flash-attn`` or PyTorch's ``varlen_attn`` where they apply, otherwise
    ``per sequence``."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or width != value_width:
        return "per sequence"
    return _varlen_kernel(width, torch.cuda.get_device_capability(device))


@functools.cache
def _varlen_kernel(width: int, capability: tuple[int, int]) -> str:
    if capability < (8, 0) or width % 8 or width > 256:
        return "per sequence"
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash-attn"
    return "varlen_attn" if importlib.util.find_spec("torch.nn.attention.varlen") is not None else "per sequence"


def _per_sequence(query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float | None) -> Tensor:
    batch, heads, queries, _ = query.shape
    result = query.new_zeros(batch, queries, heads, value.shape[-1])
    query_at = key_at = 0
    for row, n_queries, n_keys, first_query, first_key in plan.table[: plan.host.tolist()[1]].tolist():
        of_query = _within(row * queries, first_query, plan.queries[query_at : query_at + n_queries])
        of_key = _within(row * key.shape[2], first_key, plan.keys[key_at : key_at + n_keys])
        q, k, v = query[row, :, of_query], key[row, :, of_key], value[row, :, of_key]
        part = scaled_dot_product_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scale=scale)
        result[row, of_query] = part[0].transpose(0, 1)
        query_at += n_queries
        key_at += n_keys
    return result.transpose(1, 2)


def _within(row: int, first: int, positions: Tensor) -> Tensor | slice:
    """Where tokens are in the row that begins at flat position ``row``; what stands side by side is not gathered."""
    return positions - row if first < 0 else slice(first - row, first - row + len(positions))


_Packed = Callable[[Tensor, Tensor, Tensor, Plan, float | None], Tensor]


def _in_one_call(attend: _Packed) -> _Packed:
    """A kernel for ``[tokens, H, D]`` as one for padded operands."""

    def attention(query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float | None) -> Tensor:
        batch, heads, queries, width = query.shape
        n_queries, n_keys = plan.host.tolist()[2:4]
        q = query.transpose(1, 2).reshape(-1, heads, width)
        k, v = (x.transpose(1, 2).reshape(-1, *x.shape[1::2])[plan.keys[:n_keys]] for x in (key, value))
        positions = plan.queries[:n_queries]
        result = torch.zeros_like(q).index_copy_(0, positions, attend(q[positions], k, v, plan, scale))
        return result.view(batch, queries, heads, width).transpose(1, 2)

    return attention


@_in_one_call
def _flash_attn(query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    cu_queries, cu_keys, longest = _of_sequences(plan)
    result: Tensor = flash_attn_varlen_func(query, key, value, cu_queries, cu_keys, *longest, softmax_scale=scale)
    return result


@_in_one_call
def _varlen_attn(query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_queries, cu_keys, longest = _of_sequences(plan)
    result = varlen_attn(query, key, value, cu_queries, cu_keys, *longest, scale=scale)
    assert isinstance(result, Tensor)
    return result


def _of_sequences(plan: Plan) -> tuple[Tensor, Tensor, tuple[int, int]]:
    _, count, _, _, longest_query, longest_key = plan.host.tolist()
    cu_queries, cu_keys = plan.cu_seqlens[:, : count + 1]
    return cu_queries, cu_keys, (longest_query, longest_key)


_KERNELS: dict[str, _Packed] = {
    "flash-attn": _flash_attn,
    "varlen_attn": _varlen_attn,
    "per sequence": _per_sequence,
}


def _fake_planned_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, plan: Any, scale: float | None, heads_first: bool
) -> Tensor:
    batch, heads, queries, _ = query.shape
    if heads_first:
        return query.new_empty(batch, heads, queries, value.shape[-1])
    return query.new_empty(batch, queries, heads, value.shape[-1]).transpose(1, 2)


for _name, _run, _fake in (
    ("plan_attention", plan_attention, _empty_plan),
    ("planned_attention", planned_attention, _fake_planned_attention),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dithoist::{_name}", _fake, lib=_library)
