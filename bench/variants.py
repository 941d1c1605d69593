"""The ways to run a denoiser. Adding one is one line in :data:`VARIANTS`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from dithoist import compile_denoiser

OURS = "dithoist-inductor"
PLAIN = "torch.compile"

VARIANTS: dict[str, Callable[[Any], object]] = {
    "eager": lambda module: None,
    PLAIN: lambda module: module.compile(),
    "regional": lambda module: _compile_repeated_blocks(module),
    "dithoist-eager": lambda module: compile_denoiser(module, backend="eager"),
    OURS: lambda module: compile_denoiser(module, backend="inductor"),
    "dithoist-fast": lambda module: compile_denoiser(module, backend="inductor", numerics="fast"),
}
"""Each compiles a module in place."""


class Unsupported(Exception):
    """A variant that does not exist for a family, which is no failure."""


def _compile_repeated_blocks(module: Any) -> None:
    if not getattr(module, "_repeated_blocks", None):
        raise Unsupported(f"{type(module).__name__} names no repeated blocks")
    module.compile_repeated_blocks()


def build(name: str, module: nn.Module) -> nn.Module:
    """A copy of the structure of ``module`` that shares its weights, made into a variant.

    Sharing keeps the comparison fair: all variants read the same memory, and none has it in the cache because
    another has not.

    Raises:
        ValueError: no such variant.
        Unsupported: it does not exist for this module.
    """
    check([name])
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, shared)
    VARIANTS[name](twin)
    return twin


def check(names: list[str]) -> list[str]:
    """``names`` themselves.

    Raises:
        ValueError: there is no such variant; the message names those there are.
    """
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"no variant {name!r} (known: {', '.join(VARIANTS)})")
    return names
