"""What a denoiser will be passed at the coming steps, before it is passed.

Two sources, both of them guesses that whoever uses one has to check against the value that comes:

* the *last generation* with the same timesteps, step by step as it was;
* the *scheduler's timesteps*, in the one of the usual forms (:mod:`dithoist.models.timesteps`) that gives the bits of
  what is passed now; inputs that are no form of them (guidance) are taken to stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping

import torch

from ..models.timesteps import timestep_forms
from .loop import Loop

Step = dict[int, torch.Tensor]
"""What one step passes, by the input's position; tensors on the host with the strides they came with."""

_MAX_SCHEDULES = 8


def private_copy(value: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, in memory of its own, with its strides (zeros of ``expand`` too)."""
    size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    flat = value.detach().as_strided((size,), (1,)).to("cpu", copy=True)
    return flat.as_strided(value.shape, value.stride())


def filled_like(value: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
    """A host tensor with the shape, strides and dtype of ``value``, every element the number ``element``."""
    size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return element.to(value.dtype).expand(size).contiguous().as_strided(value.shape, value.stride())


def is_plain(value: object) -> bool:
    """Whether a value can be forecast: an ordinary tensor with elements."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout == torch.strided and value.numel() > 0 and not value.is_conj() and not value.is_neg()


class Forecast:
    """The coming steps of one captured graph."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._schedule: Hashable = None
        self._passed: list[tuple[Hashable, Step]] = []
        self._generations: OrderedDict[Hashable, list[tuple[Hashable, Step]]] = OrderedDict()

    def passed(self, token: Hashable, step: Mapping[int, torch.Tensor], *, starts: bool) -> None:
        """Note what a step passes.

        Args:
            token: its token; equal tokens mean equal bits.
            step: its values, which are copied.
            starts: whether a generation begins.
        """
        if starts:
            self._keep()
            timesteps = self._loop.timesteps()
            self._schedule = None if timesteps is None else tuple(timesteps.tolist())
        if all(token != earlier for earlier, _ in self._passed):  # Guidance branches share a step.
            self._passed.append((token, {i: private_copy(v) for i, v in step.items()}))

    def _keep(self) -> None:
        """Remember the generation that ended, unless it was cut short and we know how it goes on."""
        earlier = self._generations.get(self._schedule, [])
        if not (len(earlier) > len(self._passed) and self._goes_like(earlier)):
            self._generations[self._schedule] = self._passed
        self._generations.move_to_end(self._schedule)
        if len(self._generations) > _MAX_SCHEDULES:
            self._generations.popitem(last=False)
        self._passed = []

    def _goes_like(self, earlier: list[tuple[Hashable, Step]]) -> bool:
        return all(a[0] == b[0] for a, b in zip(self._passed, earlier, strict=False))

    def coming(self, step: Mapping[int, torch.Tensor]) -> list[Step]:
        """What the steps after ``step`` will pass, if all goes on as it seems; empty where nothing is known."""
        earlier = self._generations.get(self._schedule, [])
        rest = earlier[len(self._passed) :] if self._goes_like(earlier) else []
        return [values for _, values in rest] or self._from_timesteps(step)

    def _from_timesteps(self, step: Mapping[int, torch.Tensor]) -> list[Step]:
        timesteps = self._loop.timesteps()
        if timesteps is None:
            return []
        found = {i: rest for i, value in step.items() if (rest := _rest_of_form(timesteps, value)) is not None}
        if not found:
            return []
        length = min(len(rest) for rest in found.values())
        stays = {i: private_copy(value) for i, value in step.items() if i not in found}
        return [stays | {i: filled_like(step[i], rest[k]) for i, rest in found.items()} for k in range(length)]


def _rest_of_form(timesteps: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """The coming elements of the first form of the timesteps that has ``value``'s element among its own."""
    host = value.detach().cpu()
    element = host.flatten()[0]
    if not bool((host == element).all()):
        return None
    for form in timestep_forms(timesteps, value.dtype):
        (places,) = (form == element).nonzero(as_tuple=True)
        if len(places):
            return form[int(places[0]) + 1 :]
    return None
