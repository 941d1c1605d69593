"""What is claimed of masks as models write them, what is not and why; and that no claim is ever wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from graphs import capture
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from dithoist.passes import (
    PASSES,
    AttentionMask,
    BindingTime,
    PassContext,
    attention_mask,
    attention_masks,
    binding_times,
    canonicalize_graph,
    find_attention_masks,
)
from dithoist.passes.printing import format_node

BATCH, HEADS, TOKENS = 2, 3, 4
INPUTS: dict[str, Tensor] = {
    "m": torch.tensor([[True, True, True, False], [True, False, True, False]]),
    "n": torch.tensor([[False, True, True, False], [True, True, True, True]]),
    "ids": torch.tensor([[0, 0, 1, 1], [2, 1, 2, 2]]),
    "other": torch.tensor([[0, 1, 1, 1], [2, 2, 0, 2]]),
    "lengths": torch.tensor([3, 0]),
    "numbers": torch.tensor([[1.0, 1.0, 0.0, 0.5], [1.0, math.nan, 1.0, 0.0]]),
    "heads": torch.tensor([True, False, True]),
}
INF = math.inf


def attend(mask: Tensor, x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x, attn_mask=mask)


def values(gm: fx.GraphModule, inputs: dict[str, Tensor]) -> dict[fx.Node, Any]:
    """What every node of a graph holds."""
    held: dict[fx.Node, Any] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            held[n] = super().run_node(n)
            return held[n]

    Keeping(gm).run(*[inputs[node.name] for node in gm.graph.find_nodes(op="placeholder")])
    return held


def search(gm: fx.GraphModule, times: dict[str, BindingTime]) -> tuple[list[AttentionMask], list[str]]:
    """What the pass finds after those that run before it, and its notes."""
    labels = {node.name: times.get(node.name, BindingTime.REQUEST) for node in gm.graph.find_nodes(op="placeholder")}
    context = PassContext(labels | {"x": BindingTime.STEP}, verify=True)
    for run in PASSES:
        run(gm, context)
    context.notes.clear()
    before = [format_node(node) for node in gm.graph.nodes]
    found = find_attention_masks(gm, context)
    assert [format_node(node) for node in gm.graph.nodes] == before
    masks = [mask for mask in map(attention_mask, gm.graph.nodes) if mask is not None]
    assert len(masks) == found
    return masks, context.notes


def assert_true(claim: AttentionMask, held: dict[fx.Node, Any]) -> None:
    """The mask's own truth table is the one claimed, and it does nothing but show and hide."""
    mask = held[claim.mask]
    if mask.dtype != torch.bool:
        assert ((mask == 0) | (mask == -INF)).all()
        mask = mask == 0
    shape = BATCH, HEADS, TOKENS, TOKENS
    assert torch.equal(claim.truth(held.__getitem__).expand(shape), mask.expand(shape))


def claims(
    write: Callable[..., Tensor], *, dynamic: bool = False, **times: BindingTime
) -> tuple[list[AttentionMask], list[str]]:
    """Of attention through the mask that ``write`` makes of some of ``INPUTS``; each claim is checked."""
    names = write.__code__.co_varnames[: write.__code__.co_argcount]
    inputs = {name: INPUTS[name] for name in names} | {"x": torch.randn(BATCH, HEADS, TOKENS, 8)}

    def model(x: Tensor, *arguments: Tensor) -> Tensor:
        return attend(write(*arguments), x)

    # Named arguments, since placeholders are called after them.
    source = f"def call(x, {', '.join(names)}): return model(x, {', '.join(names)})"
    scope: dict[str, Any] = {"model": model}
    exec(source, scope)
    gm = capture(scope["call"], inputs["x"], *[inputs[name] for name in names], dynamic=dynamic)
    masks, notes = search(gm, times)
    if not dynamic:
        held = values(gm, inputs)
        for mask in masks:
            assert_true(mask, held)
    return masks, notes


def boolean_keys(m: Tensor) -> Tensor:
    return m[:, None, None, :]


def viewed_number(lengths: Tensor, ids: Tensor) -> Tensor:
    return ids.bool().view(BATCH, 1, 1, -1)


def additive_keys(m: Tensor) -> Tensor:
    return torch.where(m, 0.0, -INF)[:, None, None]


def filled_keys(m: Tensor) -> Tensor:
    return torch.zeros(BATCH, TOKENS).masked_fill(~m, -INF).unsqueeze(1).unsqueeze(1)


def filled_in_place(m: Tensor) -> Tensor:
    bias = torch.zeros(BATCH, 1, TOKENS, TOKENS)
    bias.masked_fill_(~m[:, None, None, :], -INF)
    return bias


def expanded_keys(m: Tensor) -> Tensor:
    return m[:, None, None, :].expand(-1, 1, TOKENS, -1)


def heads_in_the_batch(m: Tensor) -> Tensor:
    bias = torch.where(m, 0.0, -INF)[:, None].repeat_interleave(HEADS, dim=0)
    return bias.view(BATCH, HEADS, -1, TOKENS)


def text_and_picture(m: Tensor) -> Tensor:
    return torch.cat([m[:, :2], m.new_ones(BATCH, TOKENS - 2)], dim=1)[:, None, None]


def expanded_before_joining(m: Tensor) -> Tensor:
    text = m[:, None, None, :3].expand(BATCH, 1, TOKENS, 3)
    return torch.cat([text, torch.ones(BATCH, 1, TOKENS, TOKENS - 3, dtype=torch.bool)], dim=-1)


def by_lengths(lengths: Tensor) -> Tensor:
    return (torch.arange(TOKENS) < lengths[:, None])[:, None, None]


def filled_beyond_lengths(lengths: Tensor) -> Tensor:
    hidden = torch.arange(TOKENS)[None] >= lengths[:, None]
    return torch.ones(BATCH, TOKENS, dtype=torch.bool).masked_fill(hidden, False)[:, None, None]


def both(m: Tensor, n: Tensor) -> Tensor:
    return m[:, None, None, :] & n[:, None, None, :].expand(-1, HEADS, TOKENS, -1)


def either(m: Tensor, n: Tensor) -> Tensor:
    return m[:, None, None, :] | n[:, None, None, :]


def sum_of_biases(m: Tensor, n: Tensor) -> Tensor:
    return additive_keys(m) + filled_in_place(n)


def all_keys() -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool)


def cast_bias(m: Tensor) -> Tensor:
    return torch.where(m, 0.0, -INF).to(torch.bfloat16)[:, None, None].to(torch.float32)


def block_diagonal(ids: Tensor) -> Tensor:
    return (ids.unsqueeze(2) == ids.unsqueeze(1)).unsqueeze(1)


def block_diagonal_by_none(ids: Tensor) -> Tensor:
    return (ids[:, None, :, None] == ids[:, None, None, :]).expand(-1, HEADS, -1, -1)


def block_diagonal_bias(ids: Tensor) -> Tensor:
    return torch.zeros(BATCH, 1, TOKENS, TOKENS).masked_fill((ids[:, :, None] != ids[:, None])[:, None], -INF)


def computed_ids(ids: Tensor, other: Tensor) -> Tensor:
    return ((ids + other)[:, :, None] == (ids + other)[:, None])[:, None]


def segments_and_padding(ids: Tensor, m: Tensor) -> Tensor:
    return block_diagonal(ids) & m[:, None, None, :]


def neither_hidden(ids: Tensor, m: Tensor) -> Tensor:
    return ~((ids[:, :, None] != ids[:, None])[:, None] | ~m[:, None, None, :])


def filled_segments(ids: Tensor, m: Tensor) -> Tensor:
    return torch.where(~m[:, None, None, :], -INF, torch.where(block_diagonal(ids), 0.0, -INF))


def two_ids(ids: Tensor, other: Tensor) -> Tensor:
    return block_diagonal(ids) * block_diagonal(other)


M, IDS = "m: b8[2, 4] = placeholder", "ids: i64[2, 4] = placeholder"

FOUND: list[tuple[Callable[..., Tensor], str, list[str]]] = [
    (boolean_keys, "key padding", [M]),
    (viewed_number, "key padding", ["_to_copy: b8[2, 4] = aten._to_copy.default(ids, dtype=torch.bool)"]),
    (additive_keys, "key padding", [M]),
    (filled_keys, "key padding", [M]),
    (filled_in_place, "key padding", [M]),
    (expanded_keys, "key padding", [M]),
    (heads_in_the_batch, "key padding", [M]),
    (text_and_picture, "key padding", ["cat: b8[2, 4] = aten.cat.default([slice_1, full], 1)"]),
    (expanded_before_joining, "key padding", ["cat: b8[2, 1, 4, 4] = aten.cat.default([expand, ones], -1)"]),
    (by_lengths, "key padding", ["lt: b8[2, 4] = aten.lt.Tensor(arange, unsqueeze)"]),
    (filled_beyond_lengths, "key padding", ["masked_fill: b8[2, 4] = aten.masked_fill.Scalar(ones, ge, False)"]),
    (both, "key padding", ["bitwise_and: b8[2, 3, 4, 4] = aten.bitwise_and.Tensor(unsqueeze_1, expand)"]),
    (either, "key padding", ["bitwise_or: b8[2, 1, 1, 4] = aten.bitwise_or.Tensor(unsqueeze_1, unsqueeze_3)"]),
    (sum_of_biases, "key padding", ["add: f32[2, 1, 4, 4] = aten.add.Tensor(unsqueeze_1, masked_fill)"]),
    (all_keys, "key padding", []),
    (cast_bias, "key padding", [M]),
    (block_diagonal, "segments", [IDS]),
    (block_diagonal_by_none, "segments", [IDS]),
    (block_diagonal_bias, "segments", [IDS]),
    (computed_ids, "segments", ["add: i64[2, 4] = aten.add.Tensor(ids, other)"]),
    (segments_and_padding, "segments", [M, IDS]),
    (neither_hidden, "segments", [M, IDS]),
    (filled_segments, "segments", [M, IDS]),
    (two_ids, "segments", ["other: i64[2, 4] = placeholder", IDS]),
]


@pytest.mark.parametrize(("write", "kind", "nodes"), FOUND, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_found(write: Callable[..., Tensor], kind: str, nodes: list[str]) -> None:
    (mask,), notes = claims(write)
    assert (mask.kind, notes) == (kind, [])
    reads = mask.keys + mask.segments
    assert [format_node(read.node) for read in reads] == nodes
    assert all(read.direct == (read.node.meta["val"].ndim == 2) and not read.inverted for read in reads)


@pytest.mark.parametrize("write", [boolean_keys, heads_in_the_batch, block_diagonal, segments_and_padding])
def test_sizes_may_be_dynamic(write: Callable[..., Tensor]) -> None:
    (mask,), notes = claims(write, dynamic=True)
    assert notes == []
    assert all(read.direct for read in mask.keys + mask.segments)


def pixart(numbers: Tensor) -> Tensor:
    return ((1 - numbers) * -10000.0)[:, None, None]


def smallest(m: Tensor) -> Tensor:
    return torch.zeros(BATCH, TOKENS).masked_fill(~m, torch.finfo(torch.float32).min)[:, None, None]


def nan_where_seen(m: Tensor) -> Tensor:
    return ((1 - m.float()) * -INF)[:, None, None]


def chroma(numbers: Tensor) -> Tensor:
    return numbers[:, None, None, :] * numbers[:, None, :, None]


def given_numbers(numbers: Tensor) -> Tensor:
    return numbers[:, None, None]


def number_that_was_boolean(m: Tensor) -> Tensor:
    return torch.where(m[:, None, None], m.float()[:, None, None], -INF)


def hunyuan(m: Tensor) -> Tensor:
    keys = m.view(BATCH, 1, 1, TOKENS).repeat(1, 1, TOKENS, 1)
    seen = keys & keys.transpose(2, 3)
    seen[:, :, :, 0] = True
    return seen


def queries_too(m: Tensor) -> Tensor:
    return m[:, None, None, :] & m[:, None, :, None]


def queries_only(m: Tensor) -> Tensor:
    return m[:, None, :, None].expand(-1, 1, -1, TOKENS)


def causal() -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def transposed(m: Tensor) -> Tensor:
    return m[:, None, None, :].expand(-1, 1, TOKENS, -1).permute(0, 1, 3, 2)


def by_head(heads: Tensor, m: Tensor) -> Tensor:
    return heads[:, None, None] & m[:, None, None]


def across_rows(ids: Tensor) -> Tensor:
    return ids[:, None, :, None] == ids.flip(0)[:, None, None, :]


def first_row(ids: Tensor) -> Tensor:
    return ids[:, None, :, None] == ids[:1, None, None, :]


def two_kinds(ids: Tensor, other: Tensor) -> Tensor:
    return (ids[:, :, None] == other[:, None])[:, None]


def shifted(ids: Tensor) -> Tensor:
    longer = torch.cat([ids, ids[:, :1]], dim=1)
    return (longer[:, :-1, None] == longer[:, None, 1:])[:, None]


def float_ids(numbers: Tensor) -> Tensor:
    return (numbers[:, :, None] == numbers[:, None])[:, None]


def different(ids: Tensor) -> Tensor:
    return ~block_diagonal(ids)


def either_segment(ids: Tensor, other: Tensor) -> Tensor:
    return block_diagonal(ids) | block_diagonal(other)


def random_ids(ids: Tensor) -> Tensor:
    one, two = (torch.randint(0, 2, (BATCH, TOKENS)) for _ in range(2))
    return ((ids + one)[:, :, None] == (ids + two)[:, None])[:, None]


REFUSED = [
    (pixart, r"mul \(aten.mul.Tensor\) may be other numbers than 0 and -inf"),
    (smallest, r"-3.40\d*e\+38 is not -inf: a row of such keys alone still attends to them"),
    (nan_where_seen, "may be other numbers"),
    (chroma, "may be other numbers"),
    (given_numbers, "numbers is given as numbers, which may be any"),
    (number_that_was_boolean, "may be other numbers|becomes a number to add"),
    (hunyuan, "select_scatter .* depends on the query"),
    (queries_too, "m .* depends on the query"),
    (queries_only, "depends on the query"),
    (causal, "depends on the query"),
    (transposed, "m .* depends on the query"),
    (by_head, "heads .* depends on the head"),
    (across_rows, "compares something of the query with something else of the key"),
    (first_row, "something else of the key"),
    (two_kinds, "something else of the key"),
    (shifted, "something else of the key"),
    (float_ids, "may be NaN, which equals nothing"),
    (different, "eq.* depends on the query"),
    (either_segment, "depends on the query"),
    (random_ids, "known with step|something else of the key"),
]


@pytest.mark.parametrize(("write", "reason"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_refused_and_why(write: Callable[..., Tensor], reason: str) -> None:
    masks, (note,) = claims(write)
    assert masks == []
    assert re.search(reason, note), note


def test_a_mask_that_changes_with_the_step_is_refused() -> None:
    assert claims(boolean_keys, m=BindingTime.MODEL)[1] == []
    for time in (BindingTime.SCHEDULE, BindingTime.REQUEST_SCHEDULE, BindingTime.STEP):
        masks, (note,) = claims(boolean_keys, m=time)
        assert masks == []
        assert f"known with {time.label}" in note


def test_attention_without_a_mask_is_passed_over() -> None:
    gm = capture(lambda x: scaled_dot_product_attention(x, x, x), torch.randn(BATCH, HEADS, TOKENS, 8))
    assert search(gm, {}) == ([], [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_of_any_dtype(dtype: torch.dtype) -> None:
    def call(x: Tensor, m: Tensor) -> Tensor:
        return attend(m[:, None, None, :], x)

    gm = capture(call, torch.randn(BATCH, HEADS, TOKENS, 8, dtype=dtype), INPUTS["m"])
    (mask,), _ = search(gm, {})
    assert mask.keys[0].direct


# Random algebra of masks. Whatever is claimed must be so.

LEAVES = """m[:, None, None, :] | n[:, None, None, :] | m[:, None, :, None] | m.view(B, 1, 1, S).repeat(1, 1, S, 1)
    | ids[:, None, :, None] == ids[:, None, None, :] | (ids.unsqueeze(2) != ids.unsqueeze(1)).unsqueeze(1)
    | ids[:, None, None] == other[:, None, :, None] | (ids + other)[:, None, None] == (other + ids)[:, None, :, None]
    | (ids * 2)[:, None, None] == (ids * 2)[:, None, :, None] | (torch.arange(S) < lengths[:, None])[:, None, None]
    | m[:, None].repeat_interleave(H, 0).view(B, H, 1, S) | torch.ones(S, S, dtype=torch.bool).tril()
    | heads[:, None, None] | torch.full((1, 1, S, S), True) | ids[:1, None, None] == ids[:, None, :, None]
    | torch.cat([m[:, :1], n[:, 1:]], 1)[:, None, None] | m.T[:, :, None].expand(S, B, S).permute(1, 2, 0)[:, None]
    | m[0].expand(S, S) | n[:, -1][:, None, None, None] | (m[:, :, None] == m[:, None])[:, None]
    | torch.cat([ids[:, 1:], ids[:, :1]], 1)[:, None, None] == ids[:, None, :, None]"""
NODES = """{a} & {b} | {a} & {b} | {a} | {b} | ~{a} | {a} * {b} | {a} ^ {b} | {a} == {b} | {a} != {b}
    | torch.where({a}, {b}, {c}) | {a}.masked_fill({b}, False) | {a}.masked_fill({b}, True) | {a}.expand(B, H, S, S)
    | {a}.expand(B, H, S, S).transpose(2, 3) | torch.logical_or({a}, {b}) | ({a} & True).clone() | {a}[..., :]
    | {a}.expand(B, H, S, S).reshape(B * H, S, S).view(B, H, S, S) | torch.where({a}, {b}, False)
    | torch.cat([{a}.expand(B, H, S, S)[..., :2], {b}.expand(B, H, S, S)[..., 2:]], -1)
    | {a}.expand(B, H, S, S).flip(0) | {a}.expand(B, H, S, S)[:1] | {a}.expand(B, H, S, S)[:, :, :1]
    | {a}.expand(B, H, S, S)[:, 1:2] | {a}.expand(B, H, S, S).select(2, -1).unsqueeze(2)
    | torch.cat([{a}.expand(B, H, S, S)[:, :, 1:], {b}.expand(B, H, S, S)[:, :, :1]], 2)"""
BIASES = """{a} | torch.where({a}, 0.0, -INF) | torch.zeros(B, H, S, S).masked_fill(~{a}, -INF)
    | torch.where({a}, 0.0, -INF) + torch.where({b}, 0.0, -INF) | torch.where({a}, -INF, torch.where({b}, 0.0, -INF))
    | torch.where({a}, 0.0, -INF).to(torch.float16).to(torch.float32) | torch.where({a}, {b}.float(), -INF)
    | torch.zeros(B, 1, S, S).masked_fill({a}, -INF).masked_fill({b}, 0.0) | torch.where({a}, 0.0, -1e4)"""


def split(templates: str) -> list[str]:
    return [" ".join(template.split()) for template in re.split(r"\n? +\| ", templates)]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """An expression for a mask."""

    def expression(depth: int) -> str:
        if depth == 0 or draw(st.integers(0, 3)) == 0:
            return f"({draw(st.sampled_from(split(LEAVES)))})"
        parts = {name: expression(depth - 1) for name in "abc"}
        return f"({draw(st.sampled_from(split(NODES))).format(**parts)})"

    return draw(st.sampled_from(split(BIASES))).format(a=expression(draw(st.integers(0, 3))), b=expression(1))


@st.composite
def drawn_inputs(draw: st.DrawFn) -> dict[str, Tensor]:
    def rows(element: st.SearchStrategy[Any]) -> Tensor:
        return torch.tensor(draw(st.lists(element, min_size=8, max_size=8))).view(BATCH, TOKENS)

    drawn = {"m": rows(st.booleans()), "n": rows(st.booleans())}
    drawn |= {"ids": rows(st.integers(0, 2)), "other": rows(st.integers(0, 2))}
    return INPUTS | drawn


def traced(program: str, inputs: dict[str, Tensor], canonical: bool) -> fx.GraphModule:
    """The graph of attention through the mask that ``program`` is, analysed."""
    scope = {"torch": torch, "INF": INF, "B": BATCH, "H": HEADS, "S": TOKENS}

    def call(x: Tensor, *arguments: Tensor) -> Tensor:
        return attend(eval(program, scope, dict(zip(INPUTS, arguments, strict=True))), x)

    with torch.no_grad():
        gm = make_fx(call, tracing_mode="fake")(torch.randn(BATCH, HEADS, TOKENS, 8), *inputs.values())
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), ("x", *INPUTS), strict=True):
        node._rename(name)
    labels = dict.fromkeys(INPUTS, BindingTime.REQUEST)
    context = PassContext(labels, verify=True)
    if canonical:
        canonicalize_graph(gm, context)
    binding_times(gm, context)
    find_attention_masks(gm, context)
    return gm


def drawn_claim(program: str, inputs: dict[str, Tensor], canonical: bool) -> AttentionMask:
    """What is claimed, if anything, once it has been held against the mask."""
    gm = traced(program, inputs, canonical)
    masks = [mask for mask in map(attention_mask, gm.graph.nodes) if mask is not None]
    assume(masks)
    assert_true(masks[0], values(gm, inputs | {"x": torch.randn(BATCH, HEADS, TOKENS, 8)}))
    return masks[0]


@given(programs(), drawn_inputs(), st.booleans())
def test_every_claim_is_the_truth_table_of_the_mask_property(
    program: str, inputs: dict[str, Tensor], canonical: bool
) -> None:
    drawn_claim(program, inputs, canonical)


SEGMENTS = """ids[:, None, :, None] == ids[:, None, None, :] | m[:, None, None] == m[:, None, :, None]
    | (ids + other)[:, None, None] == (ids + other)[:, None, None].mT
    | ~(other.unsqueeze(2) != other.unsqueeze(1)).unsqueeze(1)"""


@given(st.sampled_from(split(SEGMENTS)), st.sampled_from(split(LEAVES)), drawn_inputs(), st.booleans())
def test_every_claim_of_segments_is_the_truth_table_of_the_mask_property(
    segments: str, condition: str, inputs: dict[str, Tensor], canonical: bool
) -> None:
    drawn_claim(f"torch.where(({segments}) & ({condition}), 0.0, -INF)", inputs, canonical)


# Rules that bite: without one of them a claim is wrong, and the truth table shows it.


@pytest.mark.parametrize(
    ("write", "mutant"),
    [
        (pixart, mock.patch.object(attention_masks, "_check_exact")),
        (smallest, mock.patch.object(attention_masks, "_check_exact")),
        (two_kinds, mock.patch.object(attention_masks._Parts, "_spell", return_value=0)),
        (across_rows, mock.patch.object(attention_masks._Parts, "_spell", return_value=0)),
        (queries_only, mock.patch.object(attention_masks, "_axes_in", return_value=frozenset())),
        (by_head, mock.patch.object(attention_masks, "_axes_in", return_value=frozenset())),
        (transposed, mock.patch.dict(attention_masks._MOVES, {torch.ops.aten.permute.default: attention_masks._same})),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_rule_is_needed(write: Callable[..., Tensor], mutant: Any) -> None:
    claims(write)
    with mutant, pytest.raises((AssertionError, RuntimeError, IndexError)):
        claims(write)
