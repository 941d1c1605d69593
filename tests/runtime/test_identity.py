"""Tokens of inputs and epochs of weights: equal tokens mean equal bits."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import bits_equal
from torch import nn

from dithoist.runtime.cache import HeldValues
from dithoist.runtime.identity import InputIdentity, WeightsIdentity, same_bits

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64)
_VALUES = (0.0, -0.0, 1.0, float("nan"), float("inf"), 2.0)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Few values and few shapes, so that equal ones are likely; small and large; odd strides."""
    shape = draw(st.sampled_from([(), (1,), (2,), (2, 1), (1, 2), (0,), (2048,)]))
    value = torch.full(shape, draw(st.sampled_from(_VALUES)), dtype=torch.float64)
    if value.numel() > 1 and draw(st.booleans()):
        value.view(-1)[-1] = draw(st.sampled_from(_VALUES))
    value = value.nan_to_num(5.0).to(draw(st.sampled_from(_DTYPES))) if draw(st.booleans()) else value
    if value.ndim and draw(st.booleans()):
        value = value[..., None].expand(*value.shape, 2)[..., 0]
    return value


@given(st.lists(tensors(), min_size=2, max_size=12))
def test_property_equal_tokens_mean_equal_bits(values: list[torch.Tensor]) -> None:
    identity = InputIdentity(HeldValues(10**9), 0)
    tokens = [identity.token(v) for v in values]
    for a, s in zip(values, tokens, strict=True):
        for b, t in zip(values, tokens, strict=True):
            if s == t:
                assert bits_equal(a, b)
                assert a.stride() == b.stride()
    assert [identity.token(values[-1]) for _ in range(2)] == [tokens[-1]] * 2


def test_the_same_bits_get_the_same_token_in_another_object() -> None:
    for size in (3, 4096):
        identity = InputIdentity(HeldValues(10**9), 0)
        value = torch.randn(size)
        assert identity.token(value) == identity.token(value.clone())


def test_a_large_value_is_forgotten_after_many_others() -> None:
    identity = InputIdentity(HeldValues(10**9), 0)
    values = [torch.full((2048,), float(i)) for i in range(20)]
    first = identity.token(values[0])
    for value in values[1:]:
        identity.token(value)
    assert len(identity._strides) == 8
    assert identity.token(values[0]) != first


def test_python_numbers_differ_by_type_and_sign() -> None:
    identity = InputIdentity(HeldValues(10**9), 0)
    assert len({identity.token(v) for v in (0, 0.0, -0.0, False, 1, 1.0, True)}) == 7


def test_same_bits_sees_what_equality_does_not() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.ones(2, 3), torch.ones(3, 2))


def test_an_epoch_lasts_while_the_weights_do() -> None:
    weights = [nn.Parameter(torch.randn(3)), torch.randn(70, 50), torch.zeros(0), torch.ones(())]
    identity = WeightsIdentity()
    assert identity.check(weights, deep=True) == [0, 1, 2, 3]
    assert [identity.check(weights, deep=deep) for deep in (False, True, False)] == [[], [], []]
    with torch.no_grad():
        weights[0].add_(1)
    assert identity.check(weights, deep=False) == [0]
    weights[1] = weights[1].clone()  # As offloading brings weights back: what was made from them is still right.
    assert identity.check(weights, deep=False) == []
    weights[1] = weights[1].flip(0)
    assert identity.check(weights, deep=False) == [1]
    weights[1] = weights[1].t().contiguous().t()  # The same values, and another way through them.
    assert identity.check(weights, deep=False) == [1]
    weights[0].data = torch.randn(3)
    assert identity.check(weights, deep=False) == [0]
    assert identity.check(weights, deep=False) == []
    assert identity.epoch == 5


@given(st.integers(0, 3499), st.integers(0, 3499), st.sampled_from([torch.float32, torch.bfloat16]))
def test_property_a_deep_check_sees_values_changed_or_swapped_behind_the_counter(
    i: int, j: int, dtype: torch.dtype
) -> None:
    weight = torch.arange(3500, dtype=torch.float32).remainder(251).to(dtype)
    identity = WeightsIdentity()
    identity.check([weight], deep=True)
    before = weight.clone()
    raw = weight.data
    raw[i], raw[j] = before[j].item(), before[i].item()
    changed = not bits_equal(before, weight)
    assert identity.check([weight], deep=True) == [0] * changed
