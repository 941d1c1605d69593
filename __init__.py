"""dithoist: a compiler for the denoising loop of diffusion transformers.

    from dithoist import compile_pipeline
    pipe = compile_pipeline(pipe)  # a diffusers pipeline; call it as before

See README.md for what it does and :mod:`dithoist.passes` for how.
"""

from .runtime.denoiser import compile_denoiser
from .runtime.explain import explain
from .runtime.explanation import Explanation
from .runtime.pipeline import clear_caches, compile_pipeline, restore
from .runtime.report import Report, report
from .runtime.state import DithoistWarning
from .runtime.step import compile_step

__all__ = [
    "DithoistWarning",
    "Explanation",
    "Report",
    "clear_caches",
    "compile_denoiser",
    "compile_pipeline",
    "compile_step",
    "explain",
    "report",
    "restore",
]
