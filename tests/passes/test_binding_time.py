"""Binding times: the lattice, what is pinned, and a whole graph as golden text."""

from __future__ import annotations

import itertools

import pytest
import torch
from graphs import DIT_INPUTS, DIT_LABELS, capture, context, dit, text

from dithoist.passes import TIMES, BindingTime, binding_times, build_program, format_binding_times
from dithoist.passes.canonicalize import canonicalize_graph
from dithoist.passes.cost import host_reads
from dithoist.passes.effects import is_assertion


def test_the_lattice_is_a_union_of_sources_with_step_on_top() -> None:
    for a, b, c in itertools.product(TIMES, repeat=3):
        assert a | b == b | a
        assert (a | b) | c == a | (b | c)
        assert a | a == a
        assert a | b in TIMES
        assert a | BindingTime.STEP == BindingTime.STEP
        assert a | BindingTime.MODEL == a
    assert BindingTime.REQUEST | BindingTime.SCHEDULE == BindingTime.REQUEST_SCHEDULE


def test_golden() -> None:
    gm = capture(dit, *DIT_INPUTS)
    ctx = context(**DIT_LABELS)
    assert binding_times(gm, ctx) == 7
    assert format_binding_times(gm) == text("""
        schedule          t: f32[3] = placeholder
        model             w: f32[3, 3] = placeholder
        request           text: f32[2, 3] = placeholder
        step              x: f32[2, 3] = placeholder
        schedule          sin: f32[3] = aten.sin.default(t)
        schedule          unsqueeze: f32[1, 3] = aten.unsqueeze.default(sin, 0)
        schedule          mm: f32[1, 3] = aten.mm.default(unsqueeze, w)
        request           mm_1: f32[2, 3] = aten.mm.default(text, w)
        request           mean: f32[3] = aten.mean.dim(mm_1, [0])
        request+schedule  add: f32[1, 3] = aten.add.Tensor(mm, mean)
        request+schedule  expand: f32[2, 3] = aten.expand.default(add, [2, 3])
        step              mul: f32[2, 3] = aten.mul.Tensor(x, expand)
        step              add_1: f32[2, 3] = aten.add.Tensor(mul, mm_1)
        step              return (add_1,)
    """)
    assert ctx.notes == []


def test_an_unnamed_input_is_a_step_input() -> None:
    gm = capture(lambda x: x + 1, torch.ones(2))
    binding_times(gm, context())
    assert {n.meta["binding_time"] for n in gm.graph.nodes} == {BindingTime.STEP}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda p: torch.rand_like(p) + p, "random"),
        (lambda p: torch.nn.functional.dropout(p, 0.5), "random"),
        (lambda p: torch.bernoulli(p), "random"),
    ],
)
def test_impure_work_is_pinned_with_all_that_reads_it_and_the_report_says_why(function, reason) -> None:  # type: ignore[no-untyped-def]
    gm = capture(lambda p: function(p) * 2, torch.ones(3))
    ctx = context(p="request")
    binding_times(gm, ctx)
    assert any(reason in note for note in ctx.notes), ctx.notes
    (output,) = gm.graph.find_nodes(op="output")
    assert output.all_input_nodes[0].meta["binding_time"] == BindingTime.STEP


def test_attention_is_random_only_where_its_dropout_is_on() -> None:
    from dithoist.passes.effects import is_random

    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    assert not is_random(graph.call_function(flash, (q, q, q)))
    assert not is_random(graph.call_function(flash, (q, q, q, 0.0)))
    assert is_random(graph.call_function(flash, (q, q, q, 0.1)))
    assert is_random(graph.call_function(flash, (q, q, q), {"dropout_p": 0.1}))


def test_unknown_callables_and_custom_operators_are_pinned() -> None:
    from dithoist.passes.effects import pinned_reason

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert pinned_reason(graph.call_function(torch.nn.functional.relu, (x,))) == "no ATen operator"
    with torch.library._scoped_library("dithoist_test", "FRAGMENT") as library:
        library.define("noop(Tensor x) -> Tensor")
        call = graph.call_function(torch.ops.dithoist_test.noop.default, (x,))
        assert pinned_reason(call) == "custom operator"
    assert pinned_reason(graph.call_function(torch.ops.aten.add_.Tensor, (x, x))) == "writes an argument"


@pytest.mark.parametrize(
    "use",
    [
        lambda p, x: p.expand_as(x),
        lambda p, x: p.type_as(x),
        lambda p, x: p.to(x.dtype),
        lambda p, x: p + torch.zeros_like(x),
        lambda p, x: p + x.new_ones(x.shape),
        lambda p, x: p.view_as(x),
    ],
)
def test_a_use_of_shape_or_dtype_is_no_dependence(use) -> None:  # type: ignore[no-untyped-def]
    gm = capture(lambda p, x: (use(p, x) * 2, x), torch.ones(2, 3), torch.ones(2, 3))
    canonicalize_graph(gm, context())
    binding_times(gm, context(p="schedule", x="step"))
    (output,) = gm.graph.find_nodes(op="output")
    assert output.args[0][0].meta["binding_time"] == BindingTime.SCHEDULE


def test_what_the_host_waits_for_leaves_the_loop_with_what_is_made_of_it() -> None:
    """The metadata of a padded batch: one ``nonzero`` and one ``item`` a request, none a step."""

    def model(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(mask.flatten()).flatten()
        starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        return x.flatten(0, 1)[rows] * starts[-1]

    gm = capture(model, torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))
    ctx = context(x="step", mask="request")
    program = build_program(gm, ctx)
    assert host_reads(program.body.module) == []
    (stage,) = program.stages
    assert any("nonzero" in line for line in host_reads(stage.module))
    assert not [n for n in program.body.module.graph.nodes if is_assertion(n)], "asked where the answer is known"
