"""The split: stages as golden programs, what is held, what is made again, what the caller gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import DIT_INPUTS, DIT_LABELS, capture, context, dit, text

from dithoist.passes import Program, VerificationError, build_program, verify_program
from dithoist.passes.printing import format_graph


def program(function, *args: torch.Tensor, **labels: str) -> Program:  # type: ignore[no-untyped-def]
    return build_program(capture(function, *args), context(**labels))


def show(split: Program) -> str:
    stages = (*split.stages, split.body)
    return "\n\n".join(f"{s.time.label} <- {', '.join(s.depends)}\n{format_graph(s.module)}" for s in stages)


def test_golden() -> None:
    split = program(dit, *DIT_INPUTS, **DIT_LABELS)
    assert show(split) == text("""
        request <- text
        w: f32[3, 3] = placeholder
        text: f32[2, 3] = placeholder
        mm_1: f32[2, 3] = aten.mm.default(text, w)
        mean: f32[3] = aten.mean.dim(mm_1, [0])
        return (mm_1, mean)

        schedule <- t
        t: f32[3] = placeholder
        w: f32[3, 3] = placeholder
        sin: f32[3] = aten.sin.default(t)
        unsqueeze: f32[1, 3] = aten.unsqueeze.default(sin, 0)
        mm: f32[1, 3] = aten.mm.default(unsqueeze, w)
        return (mm,)

        request+schedule <- t, text
        mm: f32[1, 3] = placeholder
        mean: f32[3] = placeholder
        add: f32[1, 3] = aten.add.Tensor(mm, mean)
        return (add,)

        step <- t, text, x
        x: f32[2, 3] = placeholder
        mm_1: f32[2, 3] = placeholder
        add: f32[1, 3] = placeholder
        expand: f32[2, 3] = aten.expand.default(add, [2, 3])
        mul: f32[2, 3] = aten.mul.Tensor(x, expand)
        add_1: f32[2, 3] = aten.add.Tensor(mul, mm_1)
        return (add_1,)
    """)


def test_one_base_is_held_for_many_views_and_small_casts_are_made_again() -> None:
    def model(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        a, b, c = (t @ t).chunk(3, dim=1)
        return x * a + b.to(torch.float64) + (c.unsqueeze(0) - x)

    split = program(model, torch.ones(6, 2), torch.ones(6, 6), x="step", t="schedule")
    (stage,) = split.stages
    assert stage.outputs == ("mm",)


def test_a_large_value_cast_down_is_held_as_the_small_one() -> None:
    split = program(
        lambda x, p: x + p.to(torch.float64).exp().to(torch.bfloat16),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(4),
        x="step",
        p="request",
    )
    (stage,) = split.stages
    (output,) = stage.module.graph.find_nodes(op="output")
    assert [n.meta["val"].dtype for n in output.all_input_nodes] == [torch.bfloat16]


def test_a_weight_that_only_hoisted_work_reads_is_no_input_of_the_body() -> None:
    split = program(
        lambda x, t, w, v: (x * (t @ w)) @ v,
        *[torch.ones(3, 3) for _ in range(4)],
        x="step",
        t="schedule",
        w="model",
        v="model",
    )
    assert "w" not in split.body.inputs
    assert "v" in split.body.inputs


def test_the_caller_gets_a_copy_of_a_held_value_and_the_report_says_so() -> None:
    gm = capture(lambda x, p: (x + 1, p.exp(), p.exp().view(1, 2), p.view(1, 2)), torch.ones(2), torch.ones(2))
    ctx = context(x="step", p="request")
    split = build_program(gm, ctx)
    assert sum(n.target is torch.ops.aten.clone.default for n in split.body.module.graph.nodes) == 2
    assert any("the caller gets a copy" in note for note in ctx.notes)


def test_nothing_to_hoist_leaves_the_body_alone() -> None:
    split = program(lambda x: x + 1, torch.ones(2), x="step")
    assert split.stages == ()


def test_the_verifier_names_what_is_wrong() -> None:
    split = program(dit, *DIT_INPUTS, **DIT_LABELS)
    request, schedule, both = split.stages
    broken = [
        (
            replace(split, stages=(both, request, schedule)),
            "mm is not known yet",
        ),
        (
            replace(split, labels=split.labels | {"text": split.labels["x"]}),
            "known later",
        ),
        (replace(split, body=request), "held and never read"),
    ]
    for bad, message in broken:
        with pytest.raises(VerificationError, match=message):
            verify_program(bad)
