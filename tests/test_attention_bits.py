"""What may be done to a mask without changing a bit of attention, measured on the CPU, and what may not.

Only the first of these is a rewrite that exact numerics allow, and only where scores are finite.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import bits_equal
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def operands(sizes: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """Query, key and value for batch, heads, queries, keys and width."""
    batch, heads, queries, keys, width = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, n, width) for n in (queries, keys, keys)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def all_true(sizes: tuple[int, int, int, int, int]) -> list[Tensor]:
    batch, heads, queries, keys, _ = sizes
    shapes = [(1, 1, 1, keys), (batch, 1, 1, keys), (batch, 1, queries, keys), (batch, heads, queries, keys)]
    return [torch.ones(shape, dtype=torch.bool) for shape in shapes]


small_sizes = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 80), st.integers(1, 80), st.sampled_from([8, 16, 24, 40, 64])
)
large_sizes = st.sampled_from([(1, 2, 256, 256, 64), (1, 2, 513, 300, 72), (1, 1, 7, 1500, 24), (2, 1, 600, 520, 32)])


@given(small_sizes | large_sizes, st.sampled_from(DTYPES), st.integers(0, 99), st.sampled_from([0.0, 1.0, 1e4]))
def test_a_mask_that_hides_nothing_keeps_the_bits_of_finite_scores_property(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int, scale: float
) -> None:
    q, k, v = operands(sizes, dtype, seed)
    expected = attention(q * scale, k, v)
    for mask in all_true(sizes):
        assert bits_equal(attention(q * scale, k, v, attn_mask=mask), expected)
        bias = torch.zeros(mask.shape, dtype=dtype)
        assert bits_equal(attention(q * scale, k, v, attn_mask=bias), expected)


@given(small_sizes, st.sampled_from(DTYPES), st.integers(0, 99))
def test_a_boolean_mask_and_its_additive_form_of_any_shape_give_the_same_bits_property(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int
) -> None:
    q, k, v = operands(sizes, dtype, seed)
    shape = sizes[0], 1, 1, sizes[3]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.3
    expected = attention(q, k, v, attn_mask=mask)
    wide = mask.expand(-1, -1, sizes[2], -1).contiguous()
    for same in (torch.where(mask, 0.0, -math.inf).to(dtype), wide):
        assert bits_equal(attention(q, k, v, attn_mask=same), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_that_hides_nothing_shows_in_what_nan_becomes(dtype: torch.dtype) -> None:
    """Without a mask a query whose score is NaN gets zeros, with one NaN: it may go only where scores are finite."""
    q, k, v = operands((1, 1, 1, 1, 8), dtype)
    q[..., 0] = math.nan
    assert (attention(q, k, v) == 0).all()
    assert attention(q, k, v, attn_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)).isnan().all()


def hidden_at_the_end(k: Tensor, v: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and mask with so many hidden keys more."""
    more = k.flip(2)[:, :, :padding]
    mask = torch.ones(k.shape[0], 1, 1, k.shape[2] + more.shape[2], dtype=torch.bool)
    mask[..., k.shape[2] :] = False
    return torch.cat([k, more], dim=2), torch.cat([v, more], dim=2), mask


@pytest.mark.parametrize("dtype", DTYPES)
def test_leaving_out_hidden_keys_changes_bits(dtype: torch.dtype) -> None:
    """How products and sums are cut into vectors depends on the number of keys: packing is not for exact numerics."""
    changed = 0
    for sizes in ((2, 2, 24, 24, 16), (1, 4, 17, 33, 64), (2, 3, 100, 77, 40), (1, 2, 256, 256, 64)):
        q, k, v = operands(sizes, dtype)
        more_k, more_v, mask = hidden_at_the_end(k, v, 16)
        padded, packed = attention(q, more_k, more_v, attn_mask=mask), attention(q, k, v)
        torch.testing.assert_close(padded, packed, atol=0.02 if dtype.itemsize == 2 else 1e-5, rtol=0)
        changed += not bits_equal(padded, packed)
    assert changed


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_hidden_keys_that_are_not_finite_show(value: float, which: str) -> None:
    """0 * NaN is NaN, and NaN - inf as well: packed tokens would lose that."""
    q, k, v = operands((1, 1, 4, 4, 8), torch.float32)
    (k if which == "key" else v)[:, :, 3] = value
    mask = torch.tensor([True, True, True, False]).view(1, 1, 1, 4)
    assert attention(q, k, v, attn_mask=mask).isnan().any()
    assert attention(q, k[:, :, :3], v[:, :, :3]).isfinite().all()


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    q, k, v = operands((1, 1, 4, 4, 8), torch.float32)
    assert (attention(q, k, v, attn_mask=torch.zeros(1, 1, 1, 4, dtype=torch.bool)) == 0).all()
