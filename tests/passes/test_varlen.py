"""Where packed tokens lie, against a loop over rows and columns; and which masks are segments, against softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dithoist.passes.varlen import (
    HIDDEN,
    Varlen,
    from_key_mask,
    from_lengths,
    from_ranges,
    from_segment_ids,
    mask_segments,
)

Rows = list[list[int]]


def by_loop(sequences: Rows, positions: int) -> Varlen:
    """What the flat positions of each sequence's tokens should give."""
    cu_seqlens, indices, inverse = [0], [], [-1] * positions
    for sequence in sequences:
        for flat in sequence:
            inverse[flat] = len(indices)
            indices.append(flat)
        cu_seqlens.append(len(indices))
    return Varlen(
        torch.tensor(cu_seqlens, dtype=torch.int32),
        torch.tensor(indices, dtype=torch.int64),
        torch.tensor(inverse, dtype=torch.int32),
        max([len(sequence) for sequence in sequences], default=0),
    )


def tokens_of(mask: list[list[bool]], width: int) -> Rows:
    return [[row * width + column for column in range(width) if mask[row][column]] for row in range(len(mask))]


def assert_same(actual: Varlen, expected: Varlen) -> None:
    for name in ("cu_seqlens", "indices", "inverse"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert (name, a.dtype, a.tolist()) == (name, e.dtype, e.tolist())
    assert type(actual.max_seqlen) is int
    assert actual.max_seqlen == expected.max_seqlen


def rows_of(element: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[int, list[list[Any]]]]:
    """A width, and rows of it."""

    def rows(width: int) -> st.SearchStrategy[tuple[int, list[list[Any]]]]:
        row = st.lists(element, min_size=width, max_size=width)
        return st.tuples(st.just(width), st.lists(row, max_size=4))

    return st.integers(0, 6).flatmap(rows)


@given(rows_of(st.booleans()))
def test_a_key_mask_property(drawn: tuple[int, list[list[bool]]]) -> None:
    width, mask = drawn
    tensor = torch.tensor(mask, dtype=torch.bool).reshape(len(mask), width)
    assert_same(from_key_mask(tensor), by_loop(tokens_of(mask, width), len(mask) * width))


@given(st.integers(0, 6), st.data())
def test_lengths_and_ranges_property(width: int, data: st.DataObject) -> None:
    edges = data.draw(st.lists(st.tuples(st.integers(0, width), st.integers(0, width)).map(sorted), max_size=4))
    ranges = [(start, stop) for start, stop in edges]
    sequences = [list(range(row * width + start, row * width + stop)) for row, (start, stop) in enumerate(ranges)]
    assert_same(from_ranges(ranges, width), by_loop(sequences, len(ranges) * width))
    lengths = [stop for _, stop in ranges]
    sequences = [list(range(row * width, row * width + length)) for row, length in enumerate(lengths)]
    assert_same(from_lengths(lengths, width), by_loop(sequences, len(lengths) * width))


@given(rows_of(st.integers(-2, 2)), st.none() | st.integers(-2, 2), st.sampled_from([torch.int64, torch.int8]))
def test_segment_ids_property(drawn: tuple[int, Rows], padding: int | None, dtype: torch.dtype) -> None:
    width, ids = drawn
    sequences = [
        [row * width + column for column in range(width) if ids[row][column] == segment]
        for row in range(len(ids))
        for segment in sorted(set(ids[row]) - {padding})
    ]
    tensor = torch.tensor(ids, dtype=dtype).reshape(len(ids), width)
    assert_same(from_segment_ids(tensor, padding=padding), by_loop(sequences, len(ids) * width))


@given(rows_of(st.booleans()))
def test_packing_and_unpacking_give_back_the_tokens_property(drawn: tuple[int, list[list[bool]]]) -> None:
    width, rows = drawn
    mask = torch.tensor(rows, dtype=torch.bool).reshape(len(rows), width)
    varlen = from_key_mask(mask)
    x = torch.randn(len(rows), width, 3)
    packed = x.flatten(0, 1)[varlen.indices]
    padded = torch.cat([packed, torch.zeros(1, 3)])[varlen.inverse]  # -1 names the row behind the last.
    assert torch.equal(padded.view_as(x), x.masked_fill(~mask.unsqueeze(-1), 0))


@pytest.mark.parametrize(
    ("mask", "cu_seqlens", "indices", "inverse", "longest"),
    [
        ([[1, 1, 0], [0, 0, 0], [1, 0, 1]], [0, 2, 2, 4], [0, 1, 6, 8], [0, 1, -1, -1, -1, -1, 2, -1, 3], 2),
        ([[0, 0], [0, 0]], [0, 0, 0], [], [-1, -1, -1, -1], 0),
        ([[1, 1], [1, 1]], [0, 2, 4], [0, 1, 2, 3], [0, 1, 2, 3], 2),
        ([[0, 1, 1]], [0, 2], [1, 2], [-1, 0, 1], 2),
    ],
    ids=["an empty row", "all padding", "all valid", "one row"],
)
def test_examples(mask: Rows, cu_seqlens: list[int], indices: list[int], inverse: list[int], longest: int) -> None:
    varlen = from_key_mask(torch.tensor(mask, dtype=torch.bool))
    found = (varlen.cu_seqlens.tolist(), varlen.indices.tolist(), varlen.inverse.tolist(), varlen.max_seqlen)
    assert found == (cu_seqlens, indices, inverse, longest)


def test_a_row_may_hold_several_segments_in_pieces() -> None:
    varlen = from_segment_ids(torch.tensor([[7, 3, 7, -1], [3, 3, -1, -1]]), padding=-1)
    assert varlen.cu_seqlens.tolist() == [0, 1, 3, 5]
    assert varlen.indices.tolist() == [1, 0, 2, 4, 5]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: from_key_mask(torch.ones(2, 3)), TypeError, "mask must be boolean, .* but is torch.float32"),
        (lambda: from_key_mask(torch.ones(3) > 0), ValueError, r"mask must be .*\[B, S\], but is of \[3\]"),
        (lambda: from_segment_ids(torch.ones(2, 3)), TypeError, "ids must be integers, but are torch.float32"),
        (lambda: from_segment_ids(torch.ones(1, 2, 3).int()), ValueError, r"ids must be of shape"),
        (lambda: from_lengths([1, 4], 3), ValueError, r"lengths\[1\] must be 0 to width=3, but is 4"),
        (lambda: from_lengths([-1], 3), ValueError, r"lengths\[0\]"),
        (lambda: from_ranges([(0, 1), (2, 1)], 3), ValueError, r"ranges\[1\] must be .* width=3, but is \(2, 1\)"),
        (lambda: from_ranges([(0, 1)] * 2, 2**30), ValueError, "more than int32 counts"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(build: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.cuda
def test_lengths_and_ranges_are_sent_without_a_wait() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = [from_lengths([1, 3], 4, "cuda"), from_ranges([(1, 2), (0, 4)], 4, "cuda")]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for varlen, host in zip(sent, (from_lengths([1, 3], 4), from_ranges([(1, 2), (0, 4)], 4)), strict=True):
        assert_same(varlen, host)


INF = math.inf


def seen_by(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Which keys have weight where all scores are 0."""
    numbers = torch.where(mask, 0.0, -INF) if mask.dtype == torch.bool else mask
    weights = numbers.double().expand(shape).softmax(dim=-1)
    return weights.nan_to_num(0) > 0


def shown(segments: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    of_queries, of_keys = segments
    return ((of_queries.unsqueeze(2) == of_keys.unsqueeze(1)) & (of_queries >= 0).unsqueeze(2)).unsqueeze(1)


def numbers(seen: torch.Tensor, hidden: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.where(seen, 0.0, hidden).to(dtype)


@st.composite
def segment_masks(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A mask of segments, in one of the forms that models write, and the shape of the scores."""
    batch, heads, queries, keys = (draw(st.integers(1, n)) for n in (3, 2, 6, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    rows = draw(st.sampled_from([1, batch]))
    of_keys = torch.randint(-1, draw(st.integers(1, 3)), (rows, keys), generator=generator)
    of_queries = torch.randint(-1, 3, (rows, draw(st.sampled_from([1, queries]))), generator=generator)
    seen = shown((of_queries, of_keys))
    if draw(st.booleans()):
        seen = seen.expand(-1, heads, -1, -1)
        seen = seen if draw(st.booleans()) else seen.contiguous()
    if draw(st.booleans()) and rows == 1 and seen.shape[1] == 1:
        seen = seen[0, 0]
    form = draw(st.sampled_from(["boolean", "number", "large number"]))
    if form == "boolean":
        return seen, (batch, heads, queries, keys)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    hidden = -INF if form == "number" else draw(st.sampled_from([HIDDEN, -2 * HIDDEN, torch.finfo(dtype).min]))
    return numbers(seen, -abs(hidden), dtype), (batch, heads, queries, keys)


@given(segment_masks())
def test_a_mask_of_segments_is_taken_apart_property(drawn: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    mask, shape = drawn
    seen = seen_by(mask, shape)
    segments = mask_segments(mask, shape)
    if segments is None:  # A row that finite numbers hide sees every key, so keys may be those of two segments.
        blind = (mask == mask[..., :1]).all(dim=-1) & (mask[..., 0] <= HIDDEN)
        assert mask.dtype != torch.bool
        assert blind.any()
        assert not (mask == -INF).any()
        return
    assert [ids.shape for ids in segments] == [torch.Size(shape[::2]), torch.Size(shape[::3])]
    assert torch.equal(shown(segments).expand(shape), seen)


@given(
    st.sampled_from([(2, 2, 3, 4), (1, 1, 4, 4), (2, 1, 1, 3)]),
    st.lists(
        st.sampled_from([0.0, 0.0, -INF, -INF, HIDDEN, HIDDEN - 1, -1.0, 1.0, math.nan, INF]), min_size=96, max_size=96
    ),
    st.booleans(),
)
def test_no_mask_is_taken_for_another_property(shape: tuple[int, ...], values: list[float], boolean: bool) -> None:
    mask = torch.tensor(values)[: math.prod(shape)].view(shape)
    mask = mask == 0 if boolean else mask
    segments = mask_segments(mask, shape)
    if segments is not None:
        assert torch.equal(shown(segments).expand(shape), seen_by(mask, shape))


NO_SEGMENTS = {
    "causal": torch.ones(4, 4, dtype=torch.bool).tril(),
    "by head": torch.tensor([True, False]).view(1, 2, 1, 1).expand(1, 2, 4, 4),
    "overlapping": torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1]]).bool(),
    "less likely": torch.tensor([0.0, -1.0, 0.0, 0.0]),
    "not a number": torch.tensor([0.0, math.nan, 0.0, 0.0]),
    "hidden by degrees": torch.tensor([HIDDEN, 2 * HIDDEN, HIDDEN, HIDDEN]),
}


@pytest.mark.parametrize("name", NO_SEGMENTS)
def test_what_is_no_segments(name: str) -> None:
    assert mask_segments(NO_SEGMENTS[name], (1, 2, 4, 4)) is None


@pytest.mark.parametrize("hidden", [HIDDEN, -1e9, torch.finfo(torch.float32).min])
def test_a_row_that_sees_no_key_is_no_segment_unless_minus_infinity_says_so(hidden: float) -> None:
    """In theory what is added to every score of a row changes nothing; ``(1 - m) * hidden`` does that to an empty
    prompt. But scores are rounded away next to it, and what is left is the mean of all values."""
    mask = torch.tensor([[0.0, hidden], [hidden, hidden]]).view(2, 1, 1, 2)
    assert mask_segments(mask, (2, 1, 3, 2)) is None
    of_queries, of_keys = mask_segments(mask.where(mask == 0, -math.inf), (2, 1, 3, 2))  # type: ignore[misc]
    assert (of_queries.tolist(), of_keys.tolist()) == ([[0] * 3, [-1] * 3], [[0, -1], [-1, -1]])
