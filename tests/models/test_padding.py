"""Declarations of padding, held to their word: the small denoiser notices neither what is padding, nor its absence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dithoist import compile_denoiser, report
from dithoist.models.padding import PADDING, Padding
from dithoist.models.small import DENOISERS, Sizes, as_dtype, build_denoiser, example_calls, readable, with_prompts
from dithoist.runtime.trim import Trim

DECLARED = [name for name, entry in DENOISERS.items() if entry.class_name in PADDING]
SIZES = Sizes(batch=2, prompt=16)


def test_every_class_is_tested() -> None:
    assert {DENOISERS[name].class_name for name in DECLARED} == set(PADDING)


def with_garbage(call: dict[str, Any], paddings: tuple[Padding, ...]) -> dict[str, Any]:
    """The call with something else where both rows are padded."""
    call = dict(call)
    for padding in paddings:
        hidden = (call[padding.mask] == 0).all(dim=0)
        for name in padding.tokens:
            value = call.get(name)
            if isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point():
                call[name] = torch.where(hidden[None, :, None], value + 3, value)
    return call


def seen(module: Any, call: dict[str, Any], paddings: tuple[Padding, ...]) -> list[Tensor]:
    """What callers may read of what the module gives."""
    with torch.no_grad():
        return readable(module(**call), call, paddings)


@pytest.mark.parametrize("name", DECLARED)
def test_padding_neither_influences_nor_carries_the_result(name: str) -> None:
    module = build_denoiser(name).double()
    paddings = PADDING[DENOISERS[name].class_name]
    (call,) = example_calls(name, module, SIZES, steps=1)
    call = with_prompts(as_dtype(call, torch.float64), paddings, (3, 5), SIZES.prompt)
    expected = seen(module, call, paddings)
    other = seen(module, with_garbage(call, paddings), paddings)
    trim = Trim(paddings, [])
    (_, shorter), finish = trim((), call)
    assert trim.tokens_run < trim.tokens_given
    assert finish is not None
    with torch.no_grad():
        trimmed = readable(finish(module(**shorter)), call, paddings)
    for whole, changed, cut in zip(expected, other, trimmed, strict=True):
        assert torch.equal(whole, changed)
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen-image", "pixart", "ideogram-4", "hunyuan-video"])
def test_fast_numerics_err_no_more_than_the_untouched_denoiser(name: str, dtype: torch.dtype) -> None:
    """Against float64, whatever prompt comes, and where a mask changes within a loop."""
    untouched, compiled = build_denoiser(name, dtype=dtype), build_denoiser(name, dtype=dtype)
    exact = build_denoiser(name, dtype=dtype).double()
    compile_denoiser(compiled, backend="eager", numerics="fast", strict=True)
    paddings = PADDING[DENOISERS[name].class_name]
    steps = example_calls(name, untouched, SIZES, steps=2)
    masks = {padding.mask: steps[0][padding.mask].clone() for padding in paddings}
    for lengths in (((3, 5), (3, 5)), ((16, 16), (16, 16)), ((1, 2), (9, 2)), ((5, 3), (5, 3))):
        for of_step, given in zip(lengths, steps, strict=True):
            call = with_prompts(given, paddings, of_step, SIZES.prompt)
            for mask, kept in masks.items():  # The same objects all the time, written in place.
                call[mask] = kept.copy_(call[mask])
            expected = seen(exact, as_dtype(call, torch.float64), paddings)
            own, ours = (seen(m, call, paddings) for m in (untouched, compiled))
            for e, a, b in zip(expected, own, ours, strict=True):
                allowed = 2 * (a - e).abs().max() + 4 * torch.finfo(dtype).eps
                assert (b - e).abs().max() <= allowed
    (found,) = report(compiled).denoisers
    assert found.tokens_run < found.tokens_given
    assert found.fallbacks == []
    assert any("packed tokens" in note for graph in found.graphs for note in graph.notes)
    assert found.recompiles <= 3, "four lengths once they are rounded; Qwen-Image has a graph for each"


def test_exact_numerics_trim_nothing() -> None:
    module = build_denoiser("qwen-image")
    compile_denoiser(module, backend="eager", strict=True)
    (call,) = example_calls("qwen-image", module, SIZES, steps=1)
    paddings = PADDING["QwenImageTransformer2DModel"]
    seen(module, with_prompts(call, paddings, (3, 5), SIZES.prompt), paddings)
    (found,) = report(module).denoisers
    assert (found.tokens_given, found.tokens_run) == (0, 0)
