"""The cut: what the body gets held, and what it makes again. Held values are named by their nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture, context

from dithoist.passes import BindingTime, binding_times, build_program
from dithoist.passes.cut import ROWS, choose_held

WIDTH, TOKENS = 64, 512


def held(function: Callable[..., Any], *args: torch.Tensor, **labels: str) -> list[str]:
    """Names of the values held for ``function``."""
    gm = capture(function, *args)
    ctx = context(**labels)
    binding_times(gm, ctx)
    return [n.name for n in choose_held(gm, ctx)]


def test_one_tensor_is_held_however_many_views_of_it_are_read() -> None:
    def model(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = (t @ w).chunk(3, dim=-1)
        return x * scale + shift + x.sin() * gate

    args = torch.ones(8, WIDTH), torch.ones(1, WIDTH), torch.ones(WIDTH, 3 * WIDTH)
    assert held(model, *args, x="step", t="schedule", w="model") == ["mm"]


def test_small_rows_are_held_ready_and_large_ones_before_they_are_finished() -> None:
    """``1 + scale`` costs one more operation in the body, or its bytes in every row."""

    def model(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        row = t @ w
        return x * (1 + row) + row

    for width, expected in ((64, ["mm", "add"]), (4096, ["mm"])):
        args = torch.ones(8, width), torch.ones(1, width), torch.ones(width, width)
        assert held(model, *args, x="step", t="schedule", w="model") == expected


def test_a_mask_spread_over_heads_is_spread_in_the_body() -> None:
    def model(x: torch.Tensor, mask: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return x + mask.sin() * slopes.view(-1, 1, 1)

    args = torch.ones(16, TOKENS, TOKENS), torch.ones(TOKENS, TOKENS), torch.ones(16)
    assert held(model, *args, x="step", mask="request", slopes="model") == ["sin"]


def test_products_of_the_prompt_are_held() -> None:
    def model(x: torch.Tensor, prompt: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ (prompt @ w).t()

    args = torch.ones(8, WIDTH), torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, WIDTH)
    assert held(model, *args, x="step", prompt="request", w="model") == ["mm"]


def test_what_is_needed_once_a_picture_is_held_only_if_it_is_smaller_than_its_weights() -> None:
    """Modulation from a pooled prompt and the timestep is; the modulated prompt of a first block is not."""

    def model(
        x: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor, w: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        row = (time * prompt.mean(0, keepdim=True)) @ w
        return x * row + (x @ ((prompt * row) @ v).t()).sum()

    args = [torch.ones(s, 1024) for s in (8, 1, TOKENS, 1024, 1024)]
    labels = {"x": "step", "time": "schedule", "prompt": "request", "w": "model", "v": "model"}
    assert held(model, *args, **labels) == ["mean", "mm"]


@pytest.mark.parametrize(
    ("made", "read", "expected"), [(torch.float32, torch.bfloat16, "_to_copy"), (torch.bfloat16, torch.float32, "mm")]
)
def test_a_cast_is_held_on_its_smaller_side(made: torch.dtype, read: torch.dtype, expected: str) -> None:
    def model(x: torch.Tensor, prompt: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x + (prompt @ w).to(x.dtype)

    args = torch.ones(TOKENS, 256, dtype=read), torch.ones(TOKENS, 256, dtype=made), torch.ones(256, 256, dtype=made)
    assert held(model, *args, x="step", prompt="request", w="model") == [expected]


def test_never_more_bytes_than_holding_every_value_that_crosses() -> None:
    def model(x: torch.Tensor, t: torch.Tensor, prompt: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        row = torch.nn.functional.silu(t @ w)
        text = torch.nn.functional.layer_norm(prompt @ w, [WIDTH])
        shift, scale = row.chunk(2, dim=-1)
        return x * (1 + scale.repeat(1, 2)) + shift.repeat(1, 2) + (text * row).sum(0) + text.t().exp().mean()

    args = torch.ones(8, WIDTH), torch.ones(1, WIDTH), torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, WIDTH)
    gm = capture(model, *args)
    ctx = context(x="step", t="schedule", prompt="request", w="model")
    program = build_program(gm, ctx)

    def size(nodes: list[Any]) -> int:
        rows = (ROWS if n.meta["binding_time"] & BindingTime.SCHEDULE else 1 for n in nodes)
        return sum(r * n.meta["val"].nbytes for r, n in zip(rows, nodes, strict=True))

    by_name = {n.name: n for n in gm.graph.nodes}
    body = [n for n in gm.graph.nodes if n.op == "output" or n.meta["binding_time"] == BindingTime.STEP]
    crossing = {s for n in body for s in n.all_input_nodes if s.op == "call_function"}
    naive = [n for n in crossing if n.meta["binding_time"] != BindingTime.STEP]
    assert size([by_name[n] for n in program.body.inputs if n in program.sources]) <= size(naive)


def test_what_does_not_fit_is_made_again_and_the_report_names_it() -> None:
    def model(x: torch.Tensor, prompt: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        small, large = prompt[:1] @ w, prompt @ v
        return x * small + large.sum(0) + (large * large).mean()

    def program(limit: int | None) -> tuple[list[str], list[str]]:
        args = torch.ones(8, WIDTH), torch.ones(2048, WIDTH), torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
        gm = capture(lambda x, prompt, w, v: model(x, prompt, w, v), *args)
        ctx = context(x="step", prompt="request", w="model", v="model")
        ctx.max_held_bytes = limit
        binding_times(gm, ctx)
        return [n.name for n in choose_held(gm, ctx)], ctx.notes

    assert program(None) == (["mm", "sum_1", "mean"], [])
    assert program(10**6) == program(None)
    assert program(2 * WIDTH * 4 + 4) == program(None)
    assert program(WIDTH * 4) == (["mean"], [])
    assert program(0) == ([], [])


def test_a_value_too_large_to_hold_is_named() -> None:
    def model(x: torch.Tensor, prompt: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ (prompt @ w).t()

    args = torch.ones(8, WIDTH), torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, WIDTH)
    gm = capture(model, *args)
    ctx = context(x="step", prompt="request", w="model")
    ctx.max_held_bytes = TOKENS * WIDTH * 4 - 1
    binding_times(gm, ctx)
    assert choose_held(gm, ctx) == {}
    assert ctx.notes == ["cut: mm (131,072 bytes) is made again in the body: dearer to hold"]
