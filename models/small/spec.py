"""What describes a small denoiser, and the tools its description is written with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sizes:
    """How large one generation is.

    Attributes:
        tokens: latent tokens the blocks see; a square number for a picture, frames x height x width for a video.
        prompt: text tokens, padding included.
        batch: pictures made at once.
        grid: frames, height and width in tokens, where they are others than `tokens` alone would give.
    """

    tokens: int = 16
    prompt: int = 8
    batch: int = 1
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Denoiser:
    """One denoiser class, with a small configuration and the arguments its pipeline calls it with.

    Attributes:
        class_name: its name in diffusers.
        tiny: configuration for tests: two blocks or more, tiny widths.
        request: from a `Draw`, the arguments that are fixed for a request.
        step: from a `Draw` and a sigma in (0, 1], the arguments of one step.
        bench: configuration with a checkpoint's proportions, for two CPU cores.
        blocks: names of the configuration's values that set the depth.
        prepare: makes the draw's module ready for a capture in which nothing runs, if a first call would change it or
            the host reads what it is given. Returns what was taken for granted, if anything.
    """

    class_name: str
    tiny: Mapping[str, Any]
    request: Callable[[Draw], dict[str, Any]]
    step: Callable[[Draw, float], dict[str, Any]]
    bench: Mapping[str, Any] | None = None
    blocks: tuple[str, ...] = ()
    prepare: Callable[[Draw], str | None] = lambda draw: None


@dataclass(frozen=True)
class Draw:
    """Makes the arguments of one generation.

    Attributes:
        module: that will be called.
        sizes: of the generation.
        dtype: of the module, so of text embeddings and most latents.
        generator: where random values come from.
        steps: of the schedule.
    """

    module: Any
    sizes: Sizes
    dtype: torch.dtype
    generator: torch.Generator
    steps: int

    @property
    def config(self) -> Any:
        """The module's configuration."""
        return self.module.config

    @property
    def batch(self) -> int:
        return self.sizes.batch

    @property
    def prompt(self) -> int:
        return self.sizes.prompt

    @property
    def tokens(self) -> int:
        return self.sizes.tokens

    @property
    def picture_grid(self) -> tuple[int, int]:
        """Height and width of a picture in tokens."""
        return self.sizes.grid[1:] if self.sizes.grid else (self.side, self.side)

    @property
    def side(self) -> int:
        """Height and width of a picture in tokens, for a model that is only called for square ones."""
        side = math.isqrt(self.tokens)
        if side * side != self.tokens:
            raise ValueError(f"a small picture is square, so its number of tokens too, but {self.tokens} is not")
        return side

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, height and width of a video in tokens: square frames, at least two of them if possible."""
        if self.sizes.grid:
            return self.sizes.grid
        for frames in (4, 2, 3, *range(5, self.tokens), 1):
            side = math.isqrt(self.tokens // frames)
            if side and frames * side * side == self.tokens:
                return frames, side, side
        raise ValueError(f"no video of square frames has {self.tokens} tokens")

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Values of a standard normal distribution, by default in the module's dtype."""
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Token ids or classes below `high`."""
        return torch.randint(high, shape, generator=self.generator)

    def text(self, width: int) -> torch.Tensor:
        """Text embeddings."""
        return self.normal(self.batch, self.prompt, width)

    def lengths(self, padded: int | None = None) -> list[int]:
        """Text tokens of each row that are not padding: three quarters of them, or all, in turns."""
        padded = padded or self.prompt
        return [padded - (padded // 4 if row % 2 == 0 else 0) for row in range(self.batch)]

    def mask(self, dtype: torch.dtype = torch.int64, *, length: int | None = None) -> torch.Tensor:
        """Which text tokens are not padding; padding is on the right."""
        length = length or self.prompt
        return (torch.arange(length) < torch.tensor(self.lengths(length))[:, None]).to(dtype)

    def padded_text(self, width: int) -> torch.Tensor:
        """Text embeddings whose padding is zero."""
        return self.text(width) * self.mask(self.dtype)[:, :, None]

    def picture(self, channels: int, patch: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Latents of a picture that has yet to be cut into patches."""
        return self.normal(self.batch, channels, *(n * patch for n in self.picture_grid), dtype=dtype)

    def video(self, channels: int) -> torch.Tensor:
        """Latents of a video that has yet to be cut into the configuration's patches."""
        patch = self.config.patch_size
        if isinstance(patch, int):
            patch = (self.config.get("patch_size_t") or 1, patch, patch)
        return self.normal(self.batch, channels, *(n * p for n, p in zip(self.grid, patch, strict=True)))

    def packed(self, channels: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Latents as a sequence of tokens."""
        return self.normal(self.batch, self.tokens, channels, dtype=dtype)

    def t(self, sigma: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A timestep as schedulers give them, between 0 and 1000: a scalar, float32 or an integer."""
        return torch.tensor(sigma * 1000, dtype=dtype) if dtype.is_floating_point else torch.tensor(round(sigma * 999))

    def timestep(self, sigma: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The timestep for every picture of the batch; the scheduler's dtype is integer or float32."""
        return self.t(sigma, dtype).expand(self.batch)

    def next_sigma(self, sigma: float) -> float:
        """Where the step that starts at `sigma` ends."""
        return max(0.0, sigma - 1 / self.steps)

    def guidance(self, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        """The guidance scale for every picture, if the configuration embeds it."""
        return torch.full((1,), scale, dtype=dtype).expand(self.batch) if self.config.guidance_embeds else None

    def picture_ids(self, axes: int = 3, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Position of every token of a picture; the last two axes are its row and column."""
        height, width = self.picture_grid
        ids = torch.zeros(height, width, axes)
        ids[..., -2] = torch.arange(height)[:, None]
        ids[..., -1] = torch.arange(width)[None, :]
        return ids.reshape(self.tokens, axes).to(dtype or self.dtype)


def no_request(draw: Draw) -> dict[str, Any]:
    """For a denoiser that is given latents and a timestep only."""
    return {}


def packed_step(d: Draw, sigma: float) -> dict[str, Any]:
    """Latents as tokens, and a timestep between 0 and 1."""
    return {"hidden_states": d.packed(d.config.in_channels), "timestep": d.timestep(sigma).to(d.dtype) / 1000}


def picture_step(d: Draw, sigma: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Latents as a picture, and the timestep as the scheduler gives it."""
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": d.timestep(sigma, dtype),
    }


def video_step(d: Draw, sigma: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Latents as a video, and the timestep as the scheduler gives it."""
    return {"hidden_states": d.video(d.config.in_channels), "timestep": d.timestep(sigma, dtype)}


HEADS: Mapping[str, int] = {"attention_head_dim": 16, "num_attention_heads": 2}
"""Two tiny heads, as most classes call them."""

ROPE = (4, 6, 6)
"""How such a head's width is divided into rotary axes."""

KANDINSKY: Mapping[str, Any] = {
    "in_text_dim": 40,
    "in_text_dim2": 24,
    "time_dim": 16,
    "model_dim": 32,
    "ff_dim": 64,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": ROPE,
}
"""What Kandinsky 5 and 6 have in common."""
