"""Outlining: a small repeating graph in, a function and its calls out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from graphs import capture, context, text
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import bits_equal
from torch.fx.experimental.proxy_tensor import make_fx

from dithoist.passes import outline, outline_repeats
from dithoist.passes.edit import copy_graph
from dithoist.passes.printing import format_graph

X = torch.linspace(-1, 1, 6).view(2, 3)
W = torch.linspace(-1, 1, 36).view(4, 3, 3)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x + (x.sin() @ w.t()).cos()


@pytest.fixture(autouse=True)
def _short_blocks():  # type: ignore[no-untyped-def]
    with mock.patch.object(outline, "MIN_OPERATIONS", 2):
        yield


def outlined(function: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    gm = capture(function, *args)
    outline_repeats(gm, context())
    return gm


def calls(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_module"]


def test_a_repeated_block_becomes_one_function() -> None:
    def model(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        for w in (a, b, c):
            x = block(x, w)
        return x.tanh().t()

    gm = outlined(model, X, *W[:3])
    assert calls(gm) == ["between_0", "repeated_0", "repeated_0", "repeated_0", "between_1"]
    assert format_graph(gm.repeated_0) == text("""
        exp: f32[2, 3] = placeholder
        a: f32[3, 3] = placeholder
        sin: f32[2, 3] = aten.sin.default(exp)
        t: f32[3, 3] = aten.t.default(a)
        mm: f32[2, 3] = aten.mm.default(sin, t)
        cos: f32[2, 3] = aten.cos.default(mm)
        add: f32[2, 3] = aten.add.Tensor(exp, cos)
        return (add,)
    """)
    assert torch.equal(gm(X, *W[:3])[0], model(X, *W[:3]))


def only_two(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
    return block(block(x, ws[0]), ws[1]).exp() @ ws[2] @ ws[3]


def other_constant(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
    for i, w in enumerate(ws):
        x = block(x, w) * (1 + i % 2)
    return x


def other_wiring(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
    first = x
    for i, w in enumerate(ws):
        x = block(x, w) - (first if i % 2 else x)
    return x


def other_view(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
    for i, w in enumerate(ws):
        x = (x.sin() @ (w.t() if i % 2 else w)).cos()
    return x


@pytest.mark.parametrize("function", [only_two, other_constant, other_wiring, other_view])
def test_what_only_looks_alike_stays_apart(function: Callable[..., Any]) -> None:
    gm = outlined(function, X, *W)
    assert calls(gm) == []
    assert torch.equal(gm(X, *W)[0], function(X, *W))


def test_a_graph_that_writes_an_argument_or_has_dynamic_shapes_is_left_whole() -> None:
    def writes(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = block(x, w)
        return x.add_(1)

    assert outline_repeats(make_fx(writes, tracing_mode="fake")(X, *W), context()) == 0
    gm = capture(lambda x, a, b, c: block(block(block(x, a), b), c), X, *W[:3], dynamic=True)
    assert outline_repeats(gm, context()) == 0


def test_a_value_read_far_behind_its_block_leaves_it() -> None:
    def skips(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        kept = []
        for w in ws:
            x = block(x, w)
            kept.append(x)
        return x + kept[1]

    gm = outlined(skips, X, *W)
    assert calls(gm).count("repeated_0") == 4
    assert torch.equal(gm(X, *W)[0], skips(X, *W))


STEPS: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, first, w: x.sin() + w[0],
    lambda x, first, w: torch.cat([x[:1], x[1:].cos()]),
    lambda x, first, w: x @ w,
    lambda x, first, w: x * first,
    lambda x, first, w: torch.stack(x.split(1), 0).view(2, 3).exp(),
    lambda x, first, w: torch.native_layer_norm(x, [3], w[0], None, 1e-5)[0],
]


@given(st.lists(st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_property_outlining_changes_no_bit(kinds: list[list[int]], data: st.DataObject) -> None:
    """Any sequence of a few kinds of blocks, repeated or not, gives the same bits, views and skips included."""
    order = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=3, max_size=8))
    skips = data.draw(st.sets(st.integers(0, len(order) - 1), max_size=2))

    def model(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        first, kept = x, []
        for i, kind in enumerate(order):
            for step in kinds[kind]:
                x = STEPS[step](x, first, ws[i % 4])
            if i in skips:
                kept.append(x.t())
        return torch.cat([x, *(k.t() for k in kept)])

    gm = make_fx(model, tracing_mode="fake")(X, *W)
    plain = copy_graph(gm)
    outline_repeats(gm, context())
    assert bits_equal(gm(X, *W), plain(X, *W))
