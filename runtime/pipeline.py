"""``compile_pipeline``: every denoiser of a diffusers pipeline, and ``restore``."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import torch

from .denoiser import (
    Compiled,
    compiled_denoiser,
    prepare_denoiser,
    replace_denoisers,
)
from .loop import Loop
from .settings import Backend, Numerics, Settings, suggest_arguments

P = TypeVar("P")

_DENOISER = re.compile(r"(.*_)?transformer(_\d+)?")


def find_denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """A pipeline's denoisers by component name: ``transformer``, ``transformer_2``,
    ``unconditional_transformer`` and the like.

    Raises:
        TypeError: ``pipe`` is no diffusers pipeline.
        ValueError: it has no scheduler or no diffusion transformer.
    """
    components = getattr(pipe, "components", None)
    if isinstance(pipe, torch.nn.Module) or not isinstance(components, dict):
        raise TypeError(
            f"pipe must be a diffusers DiffusionPipeline, not {type(pipe).__name__}; "
            "for a module in a loop of your own use compile_denoiser(module)"
        )
    title = type(pipe).__name__
    if components.get("scheduler") is None:
        raise ValueError(f"{title} has no scheduler, so there is no denoising loop; set pipe.scheduler first")
    found = {
        name: module
        for name, module in components.items()
        if _DENOISER.fullmatch(name) and isinstance(module, torch.nn.Module)
    }
    if not found:
        unet = " (a UNet is not supported)" if components.get("unet") is not None else ""
        raise ValueError(
            f"{title} has no diffusion transformer{unet}: its components are {', '.join(sorted(components))}; "
            "supported are components named 'transformer', 'transformer_2', 'unconditional_transformer' ..."
        )
    return found


@suggest_arguments
def compile_pipeline(
    pipe: P,
    *,
    backend: Backend = "inductor",
    numerics: Numerics = "exact",
    dynamic: bool | None = None,
    strict: bool = False,
    release_weights: bool | str = False,
    max_cached_bytes: int | None = None,
) -> P:
    """Compile the denoisers of a diffusers pipeline in place; call the pipeline as before.

    The first call captures and compiles. Work that cannot change between steps then runs once per model,
    request or schedule.

    Args:
        pipe: a diffusers ``DiffusionPipeline`` with a diffusion transformer.
        backend: compiles the stages: ``"inductor"``, ``"eager"`` (same bits as the untouched pipeline) or
            anything else ``torch.compile`` accepts.
        numerics: ``"exact"``, or ``"fast"``: all rows of a schedule are made as one batch, so that modulation weights
            are read once a picture instead of once a step, and padding of prompts is skipped; last bits may differ.
        dynamic: as in ``torch.compile``.
        strict: raise where the default falls back to the untouched module with a warning.
        release_weights: let weights that the loop does not read leave memory after the first call, and stay readable:
            from a CPU to the ``"disk"``, a file mapped where they were (on Linux); from a CUDA device to the
            ``"cpu"``, memory that the device can read; ``True`` is whichever applies. :func:`restore` brings them
            back.
        max_cached_bytes: bound on held values per denoiser; ``None`` is a quarter of its weights, at least
            256 MiB.

    Returns:
        ``pipe`` itself. Calling this again with the same options changes nothing; with others, the new ones
        take effect.

    Raises:
        TypeError, ValueError: bad arguments, before anything is changed; the message names the fix.
    """
    settings = Settings(backend, numerics, dynamic, strict, release_weights, max_cached_bytes)
    denoisers = find_denoisers(pipe)
    loop = Loop(pipe)
    replace_denoisers([prepare_denoiser(module, name, settings, loop=loop) for name, module in denoisers.items()])
    return pipe


def compiled_denoisers(target: Any) -> list[Compiled]:
    """The compiled denoisers of a pipeline or module, or a compiled step itself.

    Raises:
        TypeError: ``target`` is none of these.
        ValueError: nothing in it is compiled.
    """
    if isinstance(target, Compiled):
        return [target]
    modules = [target] if isinstance(target, torch.nn.Module) else list(find_denoisers(target).values())
    found: list[Compiled] = [wrapper for wrapper in map(compiled_denoiser, modules) if wrapper is not None]
    if not found:
        call = "compile_denoiser(module)" if isinstance(target, torch.nn.Module) else "compile_pipeline(pipe)"
        raise ValueError(f"{type(target).__name__} was not compiled by dithoist; call {call} first")
    return found


def clear_caches(target: Any) -> int:
    """Free the values held between calls; compiled code stays, and the next call makes what it needs again.

    Worth it before the memory is wanted for something else: a VAE, another model, a long pause.

    Args:
        target: a compiled pipeline, module or step.

    Returns:
        How many bytes were held, private copies of inputs included. A call that is under way in another thread keeps
        those it uses until it returns.

    Raises:
        TypeError: ``target`` is none of these.
        ValueError: it was never compiled.
    """
    return sum(wrapper.state.clear() for wrapper in compiled_denoisers(target))


def restore(target: P) -> P:
    """Undo ``compile_pipeline`` or ``compile_denoiser``: the modules are exactly what they were.

    Args:
        target: the compiled pipeline or module; or a compiled step, which then calls the function it was made from.

    Returns:
        ``target`` itself.

    Raises:
        ValueError: it was never compiled.
    """
    for wrapper in compiled_denoisers(target):
        wrapper.remove()
    return target
