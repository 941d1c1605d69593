"""What pipelines make of their scheduler's timesteps before they pass them to the denoiser.

Nothing is said per family: the form in use is the one that gives the bits of the argument actually passed
(:mod:`dithoist.runtime.forecast`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FORMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t,  # Wan, PixArt, LTX
    lambda t: t / 1000,  # Flux, Qwen-Image
    lambda t: t - 1,  # GLM-Image
    lambda t: 1 - t / 1000,  # Ideogram 4, Lumina 2
    lambda t: (1000 - t) / 1000,  # Z-Image
)
"""Functions of a scheduler's timestep, which runs from 1000 to 0."""


def timestep_forms(timesteps: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every form of ``timesteps`` (shape ``[steps]``) in ``dtype``: rounded before the formula and after it."""
    rounded = timesteps.to(dtype)
    forms = [values for form in FORMS for values in (form(rounded), form(timesteps).to(dtype))]
    return [f for f in forms if f.dtype == dtype]  # An integer divided is none.
