"""What a denoiser will be passed at the coming steps, before it is passed.

Two sources, both of them guesses that whoever uses one has to check against the value that comes:

* the *last generation* with the same timesteps, step by step as it was;
* the *scheduler's timesteps*, in the one of the usual forms (:mod:`dithoist.models.timesteps`) that gives the bits of
  what is passed now; inputs that are no form of them (guidance) are taken to stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

import torch

from ..models.timesteps import timestep_forms
from .identity import host_value, memory_span
from .loop import Loop

Tokens = Mapping[int, Hashable]
"""What one step passes, by the input's position, as :mod:`dithoist.runtime.identity` knows it."""

Step = dict[int, torch.Tensor]
"""The same as tensors on the host, with the strides they came with."""

_MAX_SCHEDULES = 8


def filled_like(value: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
    """A host tensor with the shape, strides and dtype of ``value``, every element the number ``element``."""
    size = memory_span(value.shape, value.stride())
    return element.to(value.dtype).expand(size).contiguous().as_strided(value.shape, value.stride())


class Forecast:
    """The coming steps of one captured graph."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._schedule: Hashable = None
        self._passed: list[Tokens] = []
        self._generations: OrderedDict[Hashable, list[Tokens]] = OrderedDict()

    def passed(self, tokens: Tokens, *, starts: bool) -> None:
        """Note what a step passes: tokens by position. ``starts`` says whether a generation begins."""
        if starts:
            self._keep()
            self._schedule = self._loop.timestep_numbers()
        if tokens not in self._passed:  # Guidance branches share a step.
            self._passed.append(dict(tokens))

    def _keep(self) -> None:
        """Remember the generation that ended, unless it was cut short and we know how it goes on."""
        earlier = self._generations.get(self._schedule, [])
        if not (len(earlier) > len(self._passed) and self._goes_like(earlier)):
            self._generations[self._schedule] = self._passed
        self._generations.move_to_end(self._schedule)
        if len(self._generations) > _MAX_SCHEDULES:
            self._generations.popitem(last=False)
        self._passed = []

    def _goes_like(self, earlier: list[Tokens]) -> bool:
        return all(a == b for a, b in zip(self._passed, earlier, strict=False))

    def coming(self, tokens: Tokens) -> list[Step]:
        """What the steps after that of ``tokens`` will pass, if all goes on as it seems; empty if nothing is known."""
        earlier = self._generations.get(self._schedule, [])
        rest = earlier[len(self._passed) :] if self._goes_like(earlier) else []
        return _steps(rest) or self._from_timesteps(tokens)

    def _from_timesteps(self, tokens: Tokens) -> list[Step]:
        timesteps = self._loop.timesteps()
        now = _steps([tokens])
        if timesteps is None or not now:
            return []
        forms = {i: rest for i, value in now[0].items() if (rest := _rest_of_form(timesteps, value)) is not None}
        length = min((len(rest) for rest in forms.values()), default=0)
        return [now[0] | {i: filled_like(now[0][i], rest[k]) for i, rest in forms.items()} for k in range(length)]


def _steps(passed: Sequence[Tokens]) -> list[Step]:
    """Values from tokens, which spell out all but large ones: the bits were read once and are not read again."""
    steps = []
    for tokens in passed:
        step = {i: value for i, token in tokens.items() if (value := host_value(token)) is not None}
        if not step or len(step) < len(tokens):
            return []
        steps.append(step)
    return steps


def _rest_of_form(timesteps: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """The coming elements of the first form of the timesteps that has ``value``'s element among its own."""
    element = value.flatten()[0]
    if not bool((value == element).all()):
        return None
    for form in timestep_forms(timesteps, value.dtype):
        (places,) = (form == element).nonzero(as_tuple=True)
        if len(places):
            return form[int(places[0]) + 1 :]
    return None
