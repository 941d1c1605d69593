"""Boolean-mask writes, shape-only creators and sizes, each before and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import capture, context, text
from random_graphs import bits_equal

from dithoist.passes import eliminate_dead_code
from dithoist.passes.canonicalize import canonicalize_graph
from dithoist.passes.printing import format_graph

SPECIAL = torch.tensor([[float("nan"), float("inf"), -1.0], [-0.0, -float("inf"), 2.0], [1.0, 0.0, -3.0]])
MASKS = [torch.tensor([True, True, False]), torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)]


def canonical(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[torch.fx.GraphModule, list[str]]:
    gm = capture(function, *args)
    ctx = context()
    canonicalize_graph(gm, ctx)
    eliminate_dead_code(gm, ctx)
    gm.recompile()
    return gm, ctx.notes


def scale(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[m] *= 0.0
    return y


def test_a_scale_of_masked_rows_becomes_where_and_stays_a_scale() -> None:
    gm, notes = canonical(scale, SPECIAL, MASKS[0])
    assert format_graph(gm) == text("""
        x: f32[3, 3] = placeholder
        m: b8[3] = placeholder
        add: f32[3, 3] = aten.add.Tensor(x, 1)
        unsqueeze: b8[3, 1] = aten.unsqueeze.default(m, -1)
        mul_9: f32[3, 3] = aten.mul.Tensor(add, 0.0)
        where: f32[3, 3] = aten.where.self(unsqueeze, mul_9, add)
        return (where,)
    """)
    assert notes == []


def fill(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[m] = -2.5
    return y


def test_a_fill_of_masked_rows_becomes_masked_fill_with_a_number() -> None:
    gm, _ = canonical(fill, SPECIAL, MASKS[0])
    assert format_graph(gm) == text("""
        x: f32[3, 3] = placeholder
        m: b8[3] = placeholder
        add: f32[3, 3] = aten.add.Tensor(x, 1)
        unsqueeze: b8[3, 1] = aten.unsqueeze.default(m, -1)
        masked_fill: f32[3, 3] = aten.masked_fill.Scalar(add, unsqueeze, -2.5)
        return (masked_fill,)
    """)


def chain(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[m] = -(y[m] * 0.5 - 3) / 7
    return y


def row(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[m] = torch.arange(3, dtype=x.dtype)
    return y


def full_mask(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[m.unsqueeze(-1) & (x > 0)] *= -0.0
    return y


def inexact(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[m] = y[m].exp()
    return y


def accumulate(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (x + 1).index_put((m,), torch.ones((), dtype=x.dtype), accumulate=True)


def selected(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.where(m.unsqueeze(-1), torch.tensor(2.5, dtype=x.dtype), x + 1)


def selected_number(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.where(m.unsqueeze(-1), x + 1, 0.1)


def kept(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.where(m.unsqueeze(-1), x + 1, torch.full((), -float("inf"), dtype=x.dtype))


def integer_product(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (x.nan_to_num(3.0, 7.0, -7.0).to(torch.int64) + 1) * (~m).unsqueeze(-1)


def product(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (x + 1) * (~m).unsqueeze(-1).to(x.dtype)


def column(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[:, m] *= 0.5
    y[:, m] = 1.5
    return y


def enlarged(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.where(m.unsqueeze(-1), torch.ones((), dtype=x.dtype), x[:1] + 1)


def selected_transposed(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """A fill of this would be contiguous, which the selection is not."""
    return torch.where(m.unsqueeze(-1), 2.5, (x + 1).mT)


def integer_product_transposed(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return integer_product(x, m).mT.contiguous().mT * m.unsqueeze(-1)


@pytest.mark.parametrize(
    ("function", "fills"),
    [
        (selected, 1), (selected_number, 1), (kept, 1), (integer_product, 1), (column, 1), (product, 0), (enlarged, 0),
        (selected_transposed, 0), (integer_product_transposed, 1),
    ],
)  # fmt: skip
def test_selections_of_a_constant_become_fills_where_the_bits_are_the_same(
    function: Callable[..., torch.Tensor], fills: int
) -> None:
    gm, notes = canonical(function, SPECIAL, MASKS[0])
    targets = [n.target for n in gm.graph.nodes]
    assert targets.count(torch.ops.aten.masked_fill.Scalar) == fills
    assert torch.ops.aten.index_put.default not in targets
    assert any("stays a product" in note for note in notes) == (function is product)


def test_what_is_not_bitwise_the_same_is_left_and_reported() -> None:
    for function, reason in ((inexact, "values depend on the row"), (accumulate, "it accumulates")):
        gm, notes = canonical(function, SPECIAL, MASKS[0])
        assert any(n.target is torch.ops.aten.index_put.default for n in gm.graph.nodes)
        assert any(reason in note for note in notes), notes


@pytest.mark.parametrize(
    "function",
    [
        scale,
        fill,
        chain,
        row,
        full_mask,
        inexact,
        accumulate,
        selected,
        kept,
        integer_product,
        product,
        column,
        enlarged,
        selected_transposed,
        integer_product_transposed,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", MASKS, ids=["some", "none", "all"])
def test_bits_are_those_of_the_model(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, mask: torch.Tensor
) -> None:
    x = SPECIAL.to(dtype)
    gm, _ = canonical(function, x, mask)
    arguments = {"x": x, "m": mask}  # Placeholders stand in the order of first use.
    outputs = gm(*[arguments[n.name] for n in gm.graph.find_nodes(op="placeholder")])
    assert bits_equal(outputs[0], function(x, mask))
    assert outputs[0].stride() == function(x, mask).stride()


def test_creators_no_longer_depend_on_the_tensor_whose_shape_they_take() -> None:
    def creators(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) + torch.full_like(x, 2.0) + x.new_ones(3) + t

    gm, _ = canonical(creators, torch.ones(3, 3), torch.ones(()))
    (x,) = [n for n in gm.graph.nodes if n.name == "x"]
    assert not x.users


def test_a_creator_that_keeps_strange_strides_is_left() -> None:
    gm, _ = canonical(
        lambda x: torch.zeros_like(x).view(-1) if x.is_contiguous() else torch.zeros_like(x),
        torch.ones(3, 4).t(),
    )
    assert any(n.target is torch.ops.aten.zeros_like.default for n in gm.graph.nodes) or all(
        n.meta["val"].stride() == (1, 4) for n in gm.graph.nodes if n.op == "call_function"
    )


def test_dynamic_sizes_read_the_graph_input_that_holds_them() -> None:
    gm = capture(lambda x: torch.zeros_like(x) + torch.arange(x.shape[0]).unsqueeze(-1), torch.ones(5, 3), dynamic=True)
    canonicalize_graph(gm, context())
    eliminate_dead_code(gm, context())
    (x,) = [n for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor)]
    assert not x.users
