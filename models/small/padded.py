"""Calls of small denoisers with prompts that leave padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..padding import Padding


def with_prompts(
    call: Mapping[str, Any], paddings: Sequence[Padding], lengths: Sequence[int], prompt: int
) -> dict[str, Any]:
    """The call, with row ``i`` padded but for ``lengths[i]`` of its ``prompt`` text tokens.

    Args:
        call: arguments of a step.
        paddings: of the denoiser's class (:data:`dithoist.models.padding.PADDING`).
        lengths: one for each row of the batch, at most ``prompt``.
        prompt: text tokens of the call.
    """
    padded = dict(call)
    for padding in paddings:
        # Where positions are given, the mask says of each token what it is, and all are some.
        mask = call[padding.mask].clone() if padding.leading else torch.ones_like(call[padding.mask])
        for row, length in enumerate(lengths):
            hidden = slice(prompt - length) if padding.leading else slice(length, None)
            mask[row, hidden] = 0
        padded[padding.mask] = mask
        if "segment_ids" in padding.tokens:  # Padding is a segment of its own.
            padded["segment_ids"] = torch.where(mask == 0, -1, call["segment_ids"])
    return padded


def as_dtype(call: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The call, its floats of ``dtype``."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}


def readable(result: Any, call: Mapping[str, Any], paddings: Sequence[Padding]) -> list[Tensor]:
    """Tensors of the result of ``call``, with zeros in rows that are padding, which callers drop."""
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    for padding in paddings:
        if padding.result:
            found = [value * (call[padding.mask] != 0).unsqueeze(-1) for value in found]
    return found
