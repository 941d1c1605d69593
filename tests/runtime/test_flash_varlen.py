"""A denoiser whose user chose diffusers' back end for packed attention keeps it, bit for bit.

flash-attn needs CUDA, so an operator of the same signature stands in for its kernel. All that diffusers does around it
(lengths from the mask, packed keys, the longest sequence read by the host) is its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from torch import Tensor
from twins import Twins

from dithoist.models.padding import PADDING
from dithoist.models.small import Sizes, build_denoiser, example_calls, with_prompts

SIZES = Sizes(batch=2, prompt=8)
CALLS: list[int] = []


@torch.library.custom_op("dithoist_tests::varlen", mutates_args=())
def varlen(query: Tensor, key: Tensor, value: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    CALLS.append(len(key))
    result = torch.empty_like(query)
    for i in range(len(of_queries) - 1):
        rows, columns = (slice(int(part[i]), int(part[i + 1])) for part in (of_queries, of_keys))
        operands = (x.transpose(0, 1).unsqueeze(0) for x in (query[rows], key[columns], value[columns]))
        result[rows] = torch.nn.functional.scaled_dot_product_attention(*operands)[0].transpose(0, 1)
    return result


@varlen.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    return torch.empty_like(query)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **others: Any
) -> Tensor:
    assert others["max_seqlen_q"] > 0
    result: Tensor = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    return result


def test_the_chosen_back_end_runs_with_the_bits_it_has_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_dispatch, "flash_attn_varlen_func", flash_attn_varlen_func)
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_FLASH_ATTN", True)
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)  # Which setting one sets for all.
    twins = Twins(build_denoiser("qwen-image"))
    for module in (twins.untouched, twins.compiled):
        module.set_attention_backend("flash_varlen")
    (padding,) = PADDING["QwenImageTransformer2DModel"]
    for lengths in ((3, 5), (8, 8), (3, 5)):
        for call in example_calls("qwen-image", twins.untouched, SIZES, steps=2):
            CALLS.clear()
            twins.check(**with_prompts(call, [padding], lengths, SIZES.prompt))
            blocks = len(CALLS) // 2
            assert CALLS[:blocks] == CALLS[blocks:] == [32 + sum(lengths)] * blocks
