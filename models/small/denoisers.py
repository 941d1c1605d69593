"""Small diffusers denoisers with random weights, called as their pipelines call them; nothing is downloaded.

`build_denoiser` makes the transformer of a family, `example_calls` the arguments of a generation. "tiny" is for
tests. "bench" keeps the widths of a checkpoint in proportion to each other, text and modulation included; with
fewer blocks, what is outside of them is a larger part of it than in the checkpoint, and `blocks=` undoes that.

A family is one entry of a table beside this file. Classes of diffusers that are no entry are in
`NOT_DENOISERS`, each with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import diffusers.models.transformers
import torch
from torch import nn

from . import image, image_cross, image_flux, image_joint, other, several, video, video_hunyuan, video_wan
from .common import find, randomize, set_dtype
from .spec import Denoiser, Draw, Sizes

__all__ = [
    "DENOISERS",
    "NOT_DENOISERS",
    "Denoiser",
    "Sizes",
    "build_denoiser",
    "example_calls",
    "prepare_capture",
]

DEFAULT_SIZES = Sizes()

_TABLES = (image, image_flux, image_joint, image_cross, video_wan, video_hunyuan, video, several, other)

DENOISERS: Mapping[str, Denoiser] = {name: entry for table in _TABLES for name, entry in table.DENOISERS.items()}
"""Denoisers by short name."""

NOT_DENOISERS: Mapping[str, str] = {
    "DreamLiteTransformer2DModel": "attention blocks inside a UNet",
    "DualTransformer2DModel": "two attention stacks inside a UNet",
    "MiniMaxMusic3RVQDepthDecoder": "decodes audio codes one by one",
    "Transformer2DModel": "attention blocks inside a UNet; whole denoisers of its kind have their own classes",
    "TransformerTemporalModel": "attention over frames inside a UNet",
}
"""Why a class of `diffusers.models.transformers` is no entry."""


def build_denoiser(
    name: str,
    size: Literal["tiny", "bench"] = "tiny",
    *,
    blocks: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: Any,
) -> nn.Module:
    """The denoiser called `name`, in eval mode, its parameters in `dtype` and drawn from `seed`.

    `blocks` sets the depth; where a class has several kinds of blocks, it is the number of the first, and the
    others keep their ratio to it. Parts that the class keeps in float32 when a checkpoint loads, stay so.
    `changes` are values of the configuration that shall be others.
    """
    entry = find(DENOISERS, name, "denoiser")
    config = entry.tiny if size == "tiny" else entry.bench
    if config is None:
        raise ValueError(f"{name!r} has no configuration for the bench")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = getattr(diffusers.models.transformers, entry.class_name)
        module: nn.Module = randomize(kind(**{**_with_blocks(entry, config, blocks), **changes})).eval()
    set_dtype(module, dtype, keep=getattr(module, "_keep_in_fp32_modules", None) or ())
    return module


def example_calls(
    name: str, module: nn.Module, sizes: Sizes = DEFAULT_SIZES, *, steps: int = 3, seed: int = 0
) -> list[dict[str, Any]]:
    """Arguments of `module`'s forward for every step of one generation, as the pipeline would pass them.

    What is fixed for the request is the same object in each. Timesteps follow from `steps` alone; prompt and
    latents from `seed`.
    """
    entry = find(DENOISERS, name, "denoiser")
    draw = _draw(module, sizes, steps, seed)
    request = entry.request(draw)
    tuples = {"return_dict": False} if "return_dict" in inspect.signature(type(module).forward).parameters else {}
    calls = []
    for i in range(steps):
        latents = torch.Generator().manual_seed((seed + 1) * 1_000_003 + i)
        step = entry.step(replace(draw, generator=latents), 1 - i / steps)
        calls.append({**step, **request, **tuples})
    return calls


def prepare_capture(name: str, module: nn.Module, sizes: Sizes = DEFAULT_SIZES) -> str | None:
    """Make `module` ready for a capture in which nothing runs, and only for that.

    Returns what was taken for granted about the values it will be called with, if anything.
    """
    return find(DENOISERS, name, "denoiser").prepare(_draw(module, sizes, steps=1, seed=0))


def _draw(module: nn.Module, sizes: Sizes, steps: int, seed: int) -> Draw:
    return Draw(module, sizes, module.dtype, torch.Generator().manual_seed(seed), steps)  # type: ignore[arg-type]


def _with_blocks(entry: Denoiser, config: Mapping[str, Any], blocks: int | None) -> dict[str, Any]:
    if blocks is None:
        return dict(config)
    if not entry.blocks:
        raise ValueError(f"the depth of {entry.class_name} is fixed")
    first = config[entry.blocks[0]]
    return {**config, **{key: max(1, round(config[key] * blocks / first)) for key in entry.blocks}}
