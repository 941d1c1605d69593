"""Common subexpressions: merged where a kernel could not tell them apart, and nowhere else."""

from __future__ import annotations

import functools

import torch
from graphs import rewritten, text

from dithoist.passes import eliminate_common_subexpressions
from dithoist.passes.printing import format_graph

merged = functools.partial(rewritten, eliminate_common_subexpressions)


def test_equal_calls_become_one() -> None:
    gm = merged(lambda x: (x.sin() * 2 + x.sin() * 2).cos(), torch.ones(2))
    assert format_graph(gm) == text("""
        x: f32[2] = placeholder
        sin: f32[2] = aten.sin.default(x)
        mul: f32[2] = aten.mul.Tensor(sin, 2)
        add: f32[2] = aten.add.Tensor(mul, mul)
        cos: f32[2] = aten.cos.default(add)
        return (cos,)
    """)


def count(gm: torch.fx.GraphModule, packet: object) -> int:
    return sum(getattr(n.target, "overloadpacket", None) is packet for n in gm.graph.nodes)


def test_zeros_of_both_signs_and_numbers_of_other_types_differ() -> None:
    gm = merged(lambda x: (x * 0.0) / (x * -0.0), torch.ones(2))
    assert count(gm, torch.ops.aten.mul) == 2
    gm = merged(lambda x: (x + 1) / (x + 1.0), torch.ones(2, dtype=torch.int64))
    assert count(gm, torch.ops.aten.add) == 2


def test_random_draws_are_never_merged() -> None:
    gm = merged(lambda x: torch.randn_like(x) - torch.randn_like(x) + x, torch.ones(2))
    assert count(gm, torch.ops.aten.randn_like) == 2


def test_two_results_the_caller_gets_stay_two_tensors() -> None:
    gm = merged(lambda x: (x + 1, x + 1, (x + 1).view(1, 2)), torch.ones(2))
    outputs = gm(torch.ones(2))
    assert len({o.untyped_storage().data_ptr() for o in outputs}) == 3
    gm = merged(lambda x: (torch.var_mean(x)[0], torch.var_mean(x)[0]), torch.ones(2))
    outputs = gm(torch.ones(2))
    assert len({o.untyped_storage().data_ptr() for o in outputs}) == 2
