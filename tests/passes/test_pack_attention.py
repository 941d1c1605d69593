"""Attention by a plan of its mask: what the graph becomes, that no mask gives anything else, and when masks stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture, context, staged_graph, text
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from dithoist.passes import BindingTime, attention, binding_times, eliminate_common_subexpressions, pack_attention
from dithoist.passes.attention import KEEP_MASK, NO_MASK, PACKED, Plan, kernel, plan_attention, planned_attention
from dithoist.passes.printing import format_graph

INF = math.inf
X = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[True, True, False, False], [True, False, False, False]])


def attend(x: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, None]) + 1


def packed(function: Callable[..., Tensor], *args: Tensor, fast: bool = True, **labels: str) -> tuple[Any, Any]:
    gm = capture(function, *args)
    eliminate_common_subexpressions(gm, context())
    ctx = context(**({"x": "step", "mask": "request"} | labels))
    ctx.fast = fast
    binding_times(gm, ctx)
    count = pack_attention(gm, ctx)
    assert count == sum("planned_attention" in str(node.target) for node in gm.graph.nodes)
    gm.recompile()
    return gm, ctx


def calls(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes]


def test_an_attention_gets_a_plan_that_is_made_with_its_mask() -> None:
    gm, ctx = packed(attend, X, PADDED)
    lines = format_graph(gm).split("\n")
    start = next(i for i, line in enumerate(lines) if "plan_attention" in line)
    mask = lines[start].split("(")[-1].split(",")[0]
    assert "\n".join(lines[start:]).replace(mask, "bias") == text("""
        plan_attention: (i64[6], i64[8, 5], i32[2, 9], i64[8], i64[8]) = dithoist.plan_attention.default(bias, [2, 3, 4, 4])
        plan_host: i64[6] = getitem(plan_attention, 0)
        plan_table: i64[8, 5] = getitem(plan_attention, 1)
        plan_cu_seqlens: i32[2, 9] = getitem(plan_attention, 2)
        plan_queries: i64[8] = getitem(plan_attention, 3)
        plan_keys: i64[8] = getitem(plan_attention, 4)
        planned_attention: f32[2, 3, 4, 8] = dithoist.planned_attention.default(x, x, x, bias, [plan_host, plan_table, plan_cu_seqlens, plan_queries, plan_keys], None, True)
        add: f32[2, 3, 4, 8] = aten.add.Tensor(planned_attention, 1)
        return (add,)
    """)  # noqa: E501
    assert ctx.notes == ["pack_attention: 1 attentions run on packed tokens (per sequence) where their mask allows"]


def test_attentions_share_the_plan_of_a_mask() -> None:
    def twice(x: Tensor, mask: Tensor) -> Tensor:
        return attend(attend(x, mask), mask)

    gm, _ = packed(twice, X, PADDED)
    assert [name for name in calls(gm) if "dithoist" in name] == [
        "dithoist.plan_attention.default", "dithoist.planned_attention.default", "dithoist.planned_attention.default"
    ]  # fmt: skip


def test_exact_numerics_keep_masks_and_say_so() -> None:
    _, ctx = packed(attend, X, PADDED, fast=False)
    assert ctx.notes == [
        "pack_attention: 1 attentions keep masks that are known before the loop; numerics='fast' packs their tokens"
    ]
    _, ctx = packed(lambda x: scaled_dot_product_attention(x, x, x), X, fast=False)
    assert ctx.notes == []


@pytest.mark.parametrize(
    ("function", "labels"),
    [
        (attend, {"mask": "step"}),
        (attend, {"mask": "schedule"}),
        (attend, {"x": "request"}),
        (lambda x, mask: scaled_dot_product_attention(x, x, x, is_causal=True) + mask[:, None, :, None], {}),
    ],
    ids=["a mask of the step", "a mask of the schedule", "attention of the request", "causal"],
)
def test_what_gets_no_plan(function: Callable[..., Tensor], labels: dict[str, str]) -> None:
    gm, _ = packed(function, X, PADDED, **labels)
    assert not any("planned" in str(node.target) for node in gm.graph.nodes)


def operands(shape: tuple[int, int, int, int], width: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    batch, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, n, heads, width, generator=generator).to(dtype).transpose(1, 2)
        for n in (queries, keys, keys)
    ]


def error(result: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> float:
    """The largest against float64."""
    bias = mask if mask.dtype == torch.bool else mask.double()
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=bias)
    return float((result.double() - exact).abs().max())


@st.composite
def requests(draw: st.DrawFn) -> tuple[tuple[int, int, int, int], Tensor, torch.dtype]:
    batch, heads, queries, keys = (draw(st.integers(1, n)) for n in (3, 2, 40, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    form = draw(st.sampled_from(["padding", "segments", "any", "none hidden", "all hidden"]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    if form == "padding":
        lengths = torch.randint(0, keys + 1, (batch, 1, 1, 1), generator=generator)
        seen = torch.arange(keys) < lengths
    elif form == "segments":
        of_queries, of_keys = (
            torch.randint(-1, 3, (batch, n), generator=generator).sort().values for n in (queries, keys)
        )
        seen = (of_queries.unsqueeze(2) == of_keys.unsqueeze(1)).unsqueeze(1)
    elif form == "any":
        seen = torch.rand(batch, 1, queries, keys, generator=generator) > 0.3
    else:
        seen = torch.full((1, 1, 1, keys), form == "none hidden")
    hidden = draw(st.sampled_from([-INF, -1e4, -1e9, torch.finfo(dtype).min]))
    numbers = torch.where(seen, 0.0, torch.tensor(hidden, dtype=torch.float64)).to(dtype)
    mask = seen if draw(st.booleans()) else numbers
    return (batch, heads, queries, keys), mask, dtype


@given(requests(), st.sampled_from([8, 24]), st.sampled_from([None, 0.3]), st.booleans())
def test_a_planned_attention_errs_no_more_than_a_masked_one_property(
    request: tuple[tuple[int, int, int, int], Tensor, torch.dtype], width: int, scale: float | None, heads_first: bool
) -> None:
    shape, mask, dtype = request
    q, k, v = operands(shape, width, dtype)
    if scale is not None:
        q = q * scale
    plan = plan_attention(mask, shape)
    masked = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    result = planned_attention(q, k, v, mask, plan, None, heads_first)
    assert result.shape == masked.shape
    assert (result if heads_first else result.transpose(1, 2)).is_contiguous()
    own = error(masked, q, k, v, mask)
    eps = torch.finfo(dtype).eps
    assert error(result, q, k, v, mask) <= 2 * own + 4 * eps or dtype == torch.float64  # What errors are of.
    torch.testing.assert_close(result, masked, rtol=16 * eps, atol=16 * eps)  # Whatever its error is.
    if plan.host[0] == KEEP_MASK:
        assert torch.equal(result, masked)


def kinds(*masks: Tensor, shape: tuple[int, ...] = (2, 3, 4, 4)) -> list[int]:
    return [int(plan_attention(mask, shape).host[0]) for mask in masks]


def test_the_values_of_a_mask_decide() -> None:
    everything, most = torch.ones(4, dtype=torch.bool), torch.ones(20, dtype=torch.bool)
    most[0] = False
    assert kinds(everything, PADDED[:, None, None], torch.ones(4, 4).tril().bool()) == [NO_MASK, PACKED, KEEP_MASK]
    assert kinds(most, shape=(1, 1, 20, 20)) == [KEEP_MASK], "gathering costs more than one key of twenty"


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph would run by this plan for every mask that comes."""
    bias = torch.where(PADDED, 0.0, -INF)[:, None, None]
    plan = plan_attention(bias, (2, 3, 4, 4))
    masked = scaled_dot_product_attention(X, X, X, attn_mask=bias)
    monkeypatch.setattr(attention, "_capturing", lambda query: True)
    assert torch.equal(planned_attention(X, X, X, bias, plan, None, True), masked)


@pytest.mark.parametrize("value", [math.nan, INF])
def test_what_is_not_finite_shows_where_it_is_seen(value: float) -> None:
    q, k, v = operands((1, 1, 4, 4), 8, torch.float32)
    v = v.clone()
    v[0, 0, 1, 0] = value
    mask = torch.tensor([True, True, False, False]).expand(4, 4)
    result = planned_attention(q, k, v, mask, plan_attention(mask, (1, 1, 4, 4)), None, True)
    masked = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(result.isfinite(), masked.isfinite())
    v[0, 0, 3] = value
    assert planned_attention(q, k, v, mask, plan_attention(mask, (1, 1, 4, 4)), None, True)[..., 1:].isfinite().all()


def test_a_mask_that_changes_is_planned_anew_and_nothing_is_compiled_for_it() -> None:
    gm = capture(attend, X, PADDED)
    ctx = context(x="step", mask="request")
    ctx.fast = True
    graph = staged_graph(gm, ctx)
    assert list(graph.program.placeholders) == ["mask", "x"]
    for mask in (PADDED, torch.ones_like(PADDED), PADDED.flip(0), torch.zeros_like(PADDED), PADDED):
        for x in (X, X + 1):
            (result,) = graph([mask, x])
            torch.testing.assert_close(result, attend(x, mask), atol=1e-6, rtol=0)
    assert graph.stage_runs[BindingTime.REQUEST] == 4, "the last mask is the first"


def test_sizes_may_be_dynamic() -> None:
    gm = capture(attend, X, PADDED, dynamic=True)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    ctx = context(**dict.fromkeys(names, "request") | {"x": "step"})
    ctx.fast = True
    binding_times(gm, ctx)
    assert pack_attention(gm, ctx) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.cuda
def test_varlen_kernels_on_a_device(dtype: torch.dtype) -> None:
    """Whichever of flash-attn and PyTorch's own is there, against the masked attention of the device."""
    shape = (2, 4, 64, 96)
    q, k, v = (x.cuda() for x in operands(shape, 64, dtype))
    assert kernel(q.device, dtype, 64, 64) in ("flash-attn", "varlen_attn")
    ids = torch.arange(96, device="cuda") // 40
    for mask in (
        (torch.arange(96, device="cuda") < 50)[None, None, None],
        (ids[:64].unsqueeze(1) == ids)[None, None],
    ):
        plan = plan_attention(mask, shape)
        assert [part.device.type for part in plan] == ["cpu", "cpu", "cuda", "cuda", "cuda"]
        result = planned_attention(q, k, v, mask, plan, None, True)
        masked = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert error(result, q, k, v, mask) <= 2 * error(masked, q, k, v, mask) + 4 * torch.finfo(dtype).eps


def test_kernels_are_chosen_by_what_applies() -> None:
    assert kernel(torch.device("cpu"), torch.bfloat16, 64, 64) == "per sequence"
    assert kernel(torch.device("cuda"), torch.float32, 64, 64) == "per sequence"
    assert kernel(torch.device("cuda"), torch.bfloat16, 64, 32) == "per sequence"
    assert Plan._fields == ("host", "table", "cu_seqlens", "queries", "keys")


def test_a_planned_attention_reads_nothing_from_the_device() -> None:
    """What the host must know of a plan lies with the host."""

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    for mask in (PADDED, torch.ones_like(PADDED), torch.ones(4, 4).tril().bool()):
        plan = plan_attention(mask if mask.shape == (4, 4) else mask[:, None, None], (2, 3, 4, 4))
        with Reads():
            planned_attention(X, X, X, mask if mask.shape == (4, 4) else mask[:, None, None], plan, None, True)
