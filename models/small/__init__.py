"""Small pipelines and denoisers of diffusers with random weights, built without a download."""

from .denoisers import DENOISERS, NOT_DENOISERS, Denoiser, Sizes, build_denoiser, example_calls, prepare_capture
from .embedded import EMBEDDED
from .padded import as_dtype, readable, with_prompts
from .pipelines import DEFAULT_PROMPT, FAMILIES, Size, build_pipeline, example_call

__all__ = [
    "DEFAULT_PROMPT",
    "DENOISERS",
    "EMBEDDED",
    "FAMILIES",
    "NOT_DENOISERS",
    "Denoiser",
    "Size",
    "Sizes",
    "as_dtype",
    "build_denoiser",
    "build_pipeline",
    "example_call",
    "example_calls",
    "prepare_capture",
    "readable",
    "with_prompts",
]
