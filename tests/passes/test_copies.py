"""Copies of a tensor: gone where only the caller could tell, kept everywhere else."""

from __future__ import annotations

import functools

import pytest
import torch
from graphs import context, rewritten, text
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dithoist.passes import eliminate_copies
from dithoist.passes.printing import format_graph

X = torch.arange(12.0).view(3, 4)


without_copies = functools.partial(rewritten, eliminate_copies)


def test_dropout_in_eval_mode_copies_nothing() -> None:
    gm = without_copies(lambda x: F.dropout(x.sin(), 0.5, training=False).cos(), X)
    assert format_graph(gm) == text("""
        x: f32[3, 4] = placeholder
        sin: f32[3, 4] = aten.sin.default(x)
        cos: f32[3, 4] = aten.cos.default(sin)
        return (cos,)
    """)


def test_two_streams_taken_apart_and_joined_are_the_tensor_itself() -> None:
    def blocks(x: torch.Tensor) -> torch.Tensor:
        joined = x.sin()
        first, second = joined[:1], joined[1:]
        return torch.cat([first, second]).cos()

    gm = without_copies(blocks, X)
    assert format_graph(gm) == text("""
        x: f32[3, 4] = placeholder
        sin: f32[3, 4] = aten.sin.default(x)
        cos: f32[3, 4] = aten.cos.default(sin)
        return (cos,)
    """)
    assert torch.equal(gm(X)[0], blocks(X))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (s := x.sin(), torch.cat([s[1:], s[:1]]).cos())[1],
        lambda x: (s := x.sin(), torch.cat([s[:1], s[2:]]).cos())[1],
        lambda x: (s := x.sin(), torch.cat([s[:1], s[:1], s[2:]]).cos())[1],
        lambda x: (s := x.sin(), torch.cat([s[:1], x.sin()[1:]]).cos())[1],
        lambda x: (s := x.sin(), torch.cat([s[:, :1], s[:, 1:]], dim=0 if x.shape[0] > 3 else 1).t().cos())[1],
        lambda x: (s := x.sin().t(), torch.cat([s[:2], s[2:]]).cos())[1],
        lambda x: (s := torch.cat([x.sin()[:, :2], x.sin()[:, 2:]]), s.cos())[1],
    ],
    ids=["swapped", "a gap", "twice", "of another tensor", "columns", "transposed", "the other way"],
)
def test_other_joins_keep_their_numbers(function) -> None:  # type: ignore[no-untyped-def]
    gm = without_copies(function, X)
    assert torch.equal(gm(X)[0], function(X))
    assert gm(X)[0].stride() == function(X).stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin().clone(),
        lambda x: (s := x.sin(), s.clone()),
        lambda x: x.clone().sin(),
        lambda x: x.sin()[1:].clone().sin(),
        lambda x: x.sin().t().clone(memory_format=torch.contiguous_format).sin(),
    ],
    ids=["leaves", "both leave", "of an input", "at another place in memory", "in another layout"],
)
def test_a_copy_that_can_be_told_apart_stays(function) -> None:  # type: ignore[no-untyped-def]
    gm = without_copies(function, X)
    assert any(n.target is torch.ops.aten.clone.default for n in gm.graph.nodes)


def test_a_graph_that_writes_keeps_its_copies() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        kept = x.sin().clone()
        x.add_(1)
        return kept.cos() + x

    gm = make_fx(writes, tracing_mode="fake")(X.clone())
    assert eliminate_copies(gm, context()) == 0
    assert any(n.target is torch.ops.aten.clone.default for n in gm.graph.nodes)


@torch.library.custom_op("dithoist_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


def test_a_custom_operator_that_writes_is_seen() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        original = x.sin()
        kept = original.clone()
        double_(original)
        return kept.cos() + original

    gm = make_fx(writes, tracing_mode="fake")(X)
    assert eliminate_copies(gm, context()) == 0
    assert torch.equal(gm(X), writes(X))
