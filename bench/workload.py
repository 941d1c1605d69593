"""A case's module, and the arguments of its generations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .cases import Case

Calls = list[dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    """What a case runs.

    Attributes:
        module: as it is, in eval mode.
        calls: from a seed, the arguments of every step of one generation. Prompt and latents follow from the seed;
            what is fixed for a request is one object in all steps.
    """

    module: nn.Module
    calls: Callable[[int], Calls]

    @property
    def depth(self) -> int:
        """How many blocks the module is a stack of."""
        return sum(len(child) for child in self.module.children() if isinstance(child, nn.ModuleList))


def load(case: Case, device: str = "cpu") -> Workload:
    """The workload of a case, with random weights.

    Raises:
        ValueError: the family or one of its sizes does not exist.
    """
    from dithoist.models.small import Sizes, build_denoiser, example_calls

    module = build_denoiser(case.family, "bench", blocks=case.blocks, dtype=case.torch_dtype)
    sizes = Sizes(tokens=case.tokens, prompt=case.prompt, batch=1)

    def calls(seed: int) -> Calls:
        return move(example_calls(case.family, module, sizes, steps=case.steps, seed=seed), device)

    return Workload(module.to(device), calls)


def move(calls: Calls, device: str) -> Calls:
    """The calls on a device. What was one object at every step stays one object."""
    if device == "cpu":
        return calls
    moved: dict[int, torch.Tensor] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in moved:
            moved[id(value)] = value.to(device)
        return moved[id(value)]

    return [pytree.tree_map(once, call) for call in calls]
