"""Out-of-place fills and scales of masked rows, written in place: bits, legality, and the graphs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture, context, staged_graph, text
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import bits_equal
from torch import nn
from torch._dynamo.utils import counters
from twins import Twins

from dithoist.passes import Program, build_program
from dithoist.passes.printing import format_graph
from dithoist.runtime import table
from dithoist.runtime.capture import breakable_cuda_graph

SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1.5, 3.0)


def lowered(function: Callable[..., object], *args: torch.Tensor, **labels: str) -> tuple[Program, list[str]]:
    ctx = context(**labels)
    ctx.in_place = True
    return build_program(capture(function, *args), ctx), ctx.notes


def test_golden_fill() -> None:
    program, notes = lowered(
        lambda x, m: (x + 1).masked_fill(m.unsqueeze(-1), -2.0) * 2,
        torch.ones(2, 3, 8), torch.ones(2, 3, dtype=torch.bool), x="step", m="request",
    )  # fmt: skip
    (rows,) = program.stages
    assert format_graph(rows.module) == text("""
        m: b8[2, 3] = placeholder
        unsqueeze: b8[2, 3, 1] = aten.unsqueeze.default(m, -1)
        masked_rows_default = dithoist.masked_rows.default(unsqueeze, [2, 3, 8], 2)
        return (masked_rows_default,)
    """)
    assert rows.depends == ("m",)
    assert not rows.capture_safe
    assert program.eager_body is not None
    assert format_graph(program.eager_body.module) == text("""
        x: f32[2, 3, 8] = placeholder
        rows_unsqueeze = placeholder
        add: f32[2, 3, 8] = aten.add.Tensor(x, 1)
        index_fill__default: f32[2, 3, 8] = dithoist.index_fill_.default(add, rows_unsqueeze, 2, -2.0)
        mul: f32[2, 3, 8] = aten.mul.Tensor(index_fill__default, 2)
        return (mul,)
    """)
    assert "masked_fill" in format_graph(program.body.module)
    assert notes == []


def scale_rows(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[m] *= 0.0
    return y * 2


def test_golden_scale() -> None:
    program, _ = lowered(scale_rows, torch.ones(2, 3, 8), torch.ones(2, 3, dtype=torch.bool), x="step", m="request")
    assert program.eager_body is not None
    assert format_graph(program.eager_body.module) == text("""
        x: f32[2, 3, 8] = placeholder
        rows_unsqueeze = placeholder
        add: f32[2, 3, 8] = aten.add.Tensor(x, 1)
        index_scale__default: f32[2, 3, 8] = dithoist.index_scale_.default(add, rows_unsqueeze, 2, 0.0)
        mul_9: f32[2, 3, 8] = aten.mul.Tensor(index_scale__default, 2)
        return (mul_9,)
    """)


def forms(program: Program) -> list[str]:
    body = (program.eager_body or program.body).module
    words = ("masked_fill", "index_fill", "index_scale", "where")
    return [str(n.target).split("::")[-1] for n in body.graph.nodes if any(w in str(n.target) for w in words)]


X, M = torch.ones(2, 3, 8), torch.ones(2, 3, 1, dtype=torch.bool)
LEGAL: dict[str, tuple[Callable[..., object], str]] = {
    "mask of the request": (lambda x, m: (x + 1).masked_fill(m, 0) * 2, "dithoist.index_fill_.default"),
    "a chain": (lambda x, m: (x + 1).masked_fill(m, 0).masked_fill(m, 1), "dithoist.index_fill_.default"),
    "result leaves": (lambda x, m: (x + 1).masked_fill(m, 0), "dithoist.index_fill_.default"),
    "read before": (lambda x, m: ((y := x + 1).sum(), y.masked_fill(m, 0)), "dithoist.index_fill_.default"),
    "mask of the latents": (lambda x, m: (x + 1).masked_fill(x > 0, 0) * 2, "aten.masked_fill_.Scalar"),
    "mask over elements": (lambda x, m: (x + 1).masked_fill(m[0, :1, 0], 0) * 2, "dithoist.index_fill_.default"),
    "narrow rows": (lambda x, m: (x[..., :2] + 1).masked_fill(m, 0), "aten.masked_fill_.Scalar"),
}
ILLEGAL: dict[str, tuple[Callable[..., object], str]] = {
    "an input": (lambda x, m: x.masked_fill(m, 0) * 2, "is an input or held value"),
    "a view of an input": (lambda x, m: x.transpose(0, 1).masked_fill(m[:1, :1], 0), "is an input or held value"),
    "read afterwards": (lambda x, m: (y := x + 1).masked_fill(m, 0) + y, "afterwards"),
    "a view read afterwards": (lambda x, m: (y := x + 1).masked_fill(m, 0) + y[:1], "afterwards"),
    "a base read afterwards": (lambda x, m: (y := x + 1)[:1].masked_fill(m[:1], 0) + y, "afterwards"),
    "leaves itself": (lambda x, m: ((y := x + 1).masked_fill(m, 0), y), "output reads"),
    "overlapping": (lambda x, m: (x[:, :, :1] + 1).expand(2, 3, 8).masked_fill(m, 0), "another layout|overlaps itself"),
    "transposed": (lambda x, m: (y := x.transpose(0, 1) + 1).masked_fill(y > 1, 0), "another layout"),
    "enlarged": (lambda x, m: (x[:1] + 1).masked_fill(m, 0), "another layout"),
    "a mask of itself": (lambda x, m: (y := x > 0).masked_fill(y, False), "lies in the memory"),
    "a value of itself": (lambda x, m: (y := x + 1).masked_fill(m, y[0, 0, 0]), "lies in the memory"),
    "complex": (lambda x, m: torch.view_as_real((x + 1j).masked_fill(m, 0)), "complex"),
}


@pytest.mark.parametrize(("function", "form"), LEGAL.values(), ids=LEGAL.keys())
def test_legal_sites_are_written_in_place(function: Callable[..., object], form: str) -> None:
    program, notes = lowered(function, X, M, x="step", m="request")
    assert form in forms(program)
    assert not [f for f in forms(program) if f in ("aten.masked_fill.Scalar", "aten.where.self")]
    assert notes == []


@pytest.mark.parametrize(("function", "reason"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_sites_keep_the_original_and_the_report_says_why(function: Callable[..., object], reason: str) -> None:
    program, notes = lowered(function, X, M, x="step", m="request")
    assert forms(program) in (["aten.masked_fill.Scalar"], ["aten.masked_fill.Tensor"])
    assert any(re.search(reason, note) for note in notes), notes


def test_a_held_value_is_never_written() -> None:
    """An embedding table and a cached embedding, filled by the step's own mask, over three requests."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 8)

        def forward(self, x: torch.Tensor, timestep: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            cached = self.table(ids)
            late = timestep.view(-1, 1, 1) > 1
            return cached.masked_fill(late, 0.0) + self.table.weight.masked_fill(x[0, 0] > 0, 1.0).sum() + x

    twins = Twins(Model())
    table = twins.compiled.table.weight.detach().clone()
    for request in range(3):
        ids = torch.tensor([[0, 1, request]])
        for step in (2.0, 1.0, 0.0):
            twins.check(torch.randn(1, 3, 8), torch.tensor([step]), ids)
    assert torch.equal(twins.compiled.table.weight, table)


class StepMask(nn.Module):
    def forward(self, x: torch.Tensor, timestep: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        y = (x + 1).masked_fill((x.sum(-1, keepdim=True) > threshold), float("nan"))
        late = timestep.view(-1, 1, 1) > 1
        y = torch.where(late, y, -1.0)
        z = y * 3
        z[late.expand(-1, z.shape[1], -1)[..., 0]] *= -0.0
        return z


@pytest.mark.parametrize("capturing", [False, True])
def test_masks_that_change_with_the_latents_and_with_the_timestep(capturing: bool) -> None:
    twins = Twins(StepMask())
    for step in (2.0, 1.0, 0.0):
        with breakable_cuda_graph(capturing):
            twins.check(torch.randn(2, 3, 8), torch.tensor([step, 1.5]), torch.zeros(()))
    (graph,) = twins.report.graphs
    assert graph.body_host_syncs == []


class RequestMask(nn.Module):
    def forward(self, x: torch.Tensor, timestep: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * timestep).masked_fill(mask.unsqueeze(-1), 0.0).masked_fill(mask.unsqueeze(-1), 1.0)


def test_row_indices_are_made_once_a_request_and_shared_by_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    run = table.StageCall.run

    def watched(self: table.StageCall, values: list[Any]) -> Any:
        result = run(self, values)
        made.extend([len(result)] * (not self.stage.capture_safe))
        return result

    monkeypatch.setattr(table.StageCall, "run", watched)
    counters["dithoist"].clear()
    twins = Twins(RequestMask())
    for request in range(2):
        for step in range(3):
            twins.check(torch.ones(2, 3, 8), torch.tensor(float(step)), torch.full((2, 3), bool(request)))
    assert made == [1, 1]
    assert counters["dithoist"]["lower_masked_fill"] == 2
    assert twins.report.graphs[0].body_host_syncs == []


# --- the property -------------------------------------------------------------------------------------------

_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


@st.composite
def mask_shapes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Every shape that broadcasts to ``shape``: dimensions dropped in front, any set to one."""
    kept = draw(st.integers(0, len(shape)))
    return tuple(draw(st.sampled_from([size, 1])) for size in shape[len(shape) - kept :])


@st.composite
def chains(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor, float, str]], str]:
    """A tensor, and fills and scales applied to it one after another, each with its mask and binding time."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=4)))
    dtype = draw(st.sampled_from(_DTYPES))
    values = draw(st.lists(st.sampled_from(SPECIAL), min_size=math.prod(shape), max_size=math.prod(shape)))
    x = torch.tensor(values, dtype=torch.float64).reshape(shape)
    if not dtype.is_floating_point:
        x = x.nan_to_num(3.0, 7.0, 9.0).abs()
    x = x.to(dtype)
    if x.ndim > 1 and draw(st.booleans()):
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        mask_shape = draw(mask_shapes(shape))
        bits = draw(st.lists(st.booleans(), min_size=math.prod(mask_shape), max_size=math.prod(mask_shape)))
        mask = torch.tensor(bits, dtype=torch.bool).reshape(mask_shape)
        kind = draw(st.sampled_from(["fill", "scale"])) if dtype.is_floating_point else "fill"
        amount = draw(st.sampled_from(SPECIAL)) if dtype.is_floating_point else draw(st.sampled_from([0, 1]))
        steps.append((kind, mask, amount, draw(st.sampled_from(["request", "schedule", "step"]))))
    return x, steps, draw(st.sampled_from(["none", "before", "base", "after"]))


def apply_chain(x: torch.Tensor, steps: list[tuple[str, torch.Tensor, float, str]], alias: str) -> list[torch.Tensor]:
    """The model: fresh value, aliases of it read before or after, fills out of place."""
    y = x.clone()
    outputs = [y.sum()] if alias == "before" else []
    base = y
    for kind, mask, amount, _ in steps:
        y = y.masked_fill(mask, amount) if kind == "fill" else torch.where(mask, y * amount, y)
    if alias == "after":
        outputs.append(base + base)
    if alias == "base":
        outputs.append(base.view_as(base))
    return [y, *outputs]


@given(chains(), st.lists(st.booleans(), min_size=2, max_size=4))
def test_property_bits_are_those_of_masked_fill(chain, captured: list[bool]) -> None:  # type: ignore[no-untyped-def]
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x, steps, alias = chain
    masks = [mask for _, mask, _, _ in steps]
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in (x, *masks)]

    def model(x: torch.Tensor, *masks: torch.Tensor) -> list[torch.Tensor]:
        given_masks = [(kind, m, amount, t) for (kind, _, amount, t), m in zip(steps, masks, strict=True)]
        return apply_chain(x, given_masks, alias)

    with mode:
        gm = make_fx(model, tracing_mode="real")(*fakes)
    labels = dict(
        zip([n.name for n in gm.graph.find_nodes(op="placeholder")], ["step", *(s[3] for s in steps)], strict=True)
    )
    ctx = context(**labels)
    ctx.in_place = True
    lowered_graph = staged_graph(gm, ctx)
    for capturing in captured:
        values = [t.clone(memory_format=torch.preserve_format) for t in (x, *masks)]
        expected = apply_chain(x, steps, alias)
        with breakable_cuda_graph(capturing):
            actual = lowered_graph(list(values))
        for a, e in zip(actual, expected, strict=True):
            assert bits_equal(a, e)
        for value, before in zip(values, (x, *masks), strict=True):
            assert bits_equal(value, before), "an input was written"


def test_the_operators_are_well_formed() -> None:
    x, rows = torch.randn(2, 3, 8), torch.tensor([0, 4])
    for name in ("index_fill", "index_scale"):
        for suffix in ("", "_"):
            operator = getattr(torch.ops.dithoist, name + suffix).default
            torch.library.opcheck(operator, (x.clone(), rows, 2, 0.5), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(
        torch.ops.dithoist.masked_rows.default,
        (x[..., :1] > 0, [2, 3, 8], 2),
        test_utils=("test_schema", "test_faketensor"),
    )
    for dtype in _DTYPES:  # Many rows at once are zeroed by clearing their bits.
        value = torch.tensor(SPECIAL, dtype=torch.float64).repeat(2, 3, 1)
        value = (value if dtype.is_floating_point else value.nan_to_num(1.0, 2.0, 3.0).abs()).to(dtype)
        mask = torch.tensor([[True, False, True], [True, True, False]])
        filled = torch.ops.dithoist.index_fill(value, torch.tensor([0, 2, 3, 4]), 2, 0)
        assert bits_equal(filled, value.masked_fill(mask.unsqueeze(-1), 0))
    strided = x.transpose(0, 2)
    for name in ("index_fill", "index_scale"):
        operator = getattr(torch.ops.dithoist, name).default
        dense = operator(strided.contiguous(), torch.tensor([1, 5]), 2, 2.0)
        assert torch.equal(operator(strided, torch.tensor([1, 5]), 2, 2.0), dense)
