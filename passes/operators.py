"""Operators of our own that lowered graphs call, registered with ``torch.library``.

``rows`` are flat indices over the first ``leading`` dimensions of ``self`` (row-major); a row is everything
behind them. They are integer indices made once where the mask is known, because a boolean index needs
``nonzero``, a wait for the device, at each use.

* ``dithoist::masked_rows(Tensor mask, int[] shape, int leading) -> Tensor``: int64 ``[n]``, the rows of a tensor
  of ``shape`` that ``mask``, broadcast to it, names. The mask must not vary inside a row.
* ``dithoist::index_fill_(Tensor(a!) self, Tensor rows, int leading, Scalar value) -> Tensor(a!)``
  Zeroing at least three eighths of the rows (of 2-byte elements half as many) clears bits instead of visiting rows.
* ``dithoist::index_scale_(Tensor(a!) self, Tensor rows, int leading, Scalar scale) -> Tensor(a!)``: multiplies the
  rows, so NaN stays NaN and zeros keep their sign, as ``x[mask] *= scale`` does.
* ``dithoist::index_fill`` and ``dithoist::index_scale``: the same on a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_library = torch.library.Library("dithoist", "DEF")
for _schema in (
    "masked_rows(Tensor mask, int[] shape, int leading) -> Tensor",
    "index_fill_(Tensor(a!) self, Tensor rows, int leading, Scalar value) -> Tensor(a!)",
    "index_fill(Tensor self, Tensor rows, int leading, Scalar value) -> Tensor",
    "index_scale_(Tensor(a!) self, Tensor rows, int leading, Scalar scale) -> Tensor(a!)",
    "index_scale(Tensor self, Tensor rows, int leading, Scalar scale) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _masked_rows(mask: torch.Tensor, shape: Sequence[int], leading: int) -> torch.Tensor:
    ones = [1] * (len(shape) - leading)
    return mask.expand([*shape[:leading], *ones]).reshape(-1).nonzero().squeeze(1)


def _as_rows(x: torch.Tensor, leading: int) -> torch.Tensor:
    return x.view(math.prod(x.shape[:leading]), math.prod(x.shape[leading:]))


def _index_fill_(x: torch.Tensor, rows: torch.Tensor, leading: int, value: float) -> torch.Tensor:
    if rows.numel() == 0 or x.numel() == 0:
        return x
    if rows.numel() == math.prod(x.shape[:leading]):
        return x.fill_(value)
    if not x.is_contiguous():
        x[torch.unravel_index(rows, x.shape[:leading])] = value
    elif _is_positive_zero(value) and 32 * rows.numel() >= 3 * min(x.element_size(), 4) * math.prod(x.shape[:leading]):
        _clear_rows(_as_rows(x, leading), rows)
    else:
        _as_rows(x, leading).index_fill_(0, rows, value)
    return x


def _is_positive_zero(value: float) -> bool:
    return value == 0 and math.copysign(1.0, value) > 0


def _clear_rows(x: torch.Tensor, rows: torch.Tensor) -> None:
    """Zero many rows: all bits off there and as they are elsewhere, which ``x * keep`` would not be for NaN and
    negative numbers, and which goes at the speed of ``x.fill_``."""
    bits = x.view(_BITS[x.element_size()])
    keep = torch.full((len(x), 1), -1, dtype=bits.dtype, device=x.device).index_fill_(0, rows, 0)
    bits.bitwise_and_(keep)


def _index_scale_(x: torch.Tensor, rows: torch.Tensor, leading: int, scale: float) -> torch.Tensor:
    if rows.numel() == 0 or x.numel() == 0:
        return x
    if rows.numel() == math.prod(x.shape[:leading]):
        return x.mul_(scale)
    if x.is_contiguous():
        flat = _as_rows(x, leading)
        flat.index_copy_(0, rows, flat.index_select(0, rows).mul_(scale))
    else:
        x[torch.unravel_index(rows, x.shape[:leading])] *= scale
    return x


def _index_fill(x: torch.Tensor, rows: torch.Tensor, leading: int, value: float) -> torch.Tensor:
    return _index_fill_(x.clone(), rows, leading, value)


def _index_scale(x: torch.Tensor, rows: torch.Tensor, leading: int, scale: float) -> torch.Tensor:
    return _index_scale_(x.clone(), rows, leading, scale)


for _name, _kernel in (
    ("masked_rows", _masked_rows),
    ("index_fill_", _index_fill_),
    ("index_fill", _index_fill),
    ("index_scale_", _index_scale_),
    ("index_scale", _index_scale),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


def _fake_masked_rows(mask: torch.Tensor, shape: Sequence[int], leading: int) -> torch.Tensor:
    count = torch.library.get_ctx().new_dynamic_size()
    return mask.new_empty([count], dtype=torch.int64)


def _fake_in_place(x: torch.Tensor, rows: torch.Tensor, leading: int, value: float) -> torch.Tensor:
    return x


def _fake_copy(x: torch.Tensor, rows: torch.Tensor, leading: int, value: float) -> torch.Tensor:
    return torch.empty_like(x)


for _name, _fake in (
    ("masked_rows", _fake_masked_rows),
    ("index_fill_", _fake_in_place),
    ("index_fill", _fake_copy),
    ("index_scale_", _fake_in_place),
    ("index_scale", _fake_copy),
):
    torch.library.register_fake(f"dithoist::{_name}", _fake, lib=_library)
