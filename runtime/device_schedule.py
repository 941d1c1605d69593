"""Timesteps on an accelerator, known without waiting for them.

To read a timestep there the host would have to wait for all the work queued before it. So the scheduler's step index,
which the host has, says which timestep it must be, and a comparison is queued on the device instead of a wait. Its
result is read with the last step of the generation, before a picture can come out.

A value is taken as known if

* it is the same tensor object, unwritten, as one that was read (guidance, mostly); or
* it was known at the same step of an earlier generation with the same timesteps that began with the same value; or
* every form of the timesteps (:mod:`dithoist.models.timesteps`) that explains the values read so far in this
  generation gives the same bits, and two steps have been read.

The first step of a generation is always read, and so is the last: three waits or so in the first generation of a
schedule, two in later ones. If a comparison fails (somebody else moves the timesteps), the last step raises, because
earlier steps may have used a row of another timestep, and from then on every value is read.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..models.timesteps import timestep_forms
from .forecast import filled_like
from .identity import BITS, memory_span
from .loop import Loop
from .state import DithoistWarning

_MAX_SCHEDULES = 8
_MAX_BRANCHES = 8
_LEAST_READ = 2
_MISMATCH = (
    "the timesteps of a picture were not those of its scheduler (did a callback or a second loop change them?), so the "
    "picture would be wrong; make it again: from now on every timestep is read"
)


class ScheduleMismatch(RuntimeError):
    """A picture's timesteps were not those its scheduler announced; no fall-back could make it right."""


def private_copy(value: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, in memory of its own, with its strides (zeros of ``expand`` too)."""
    size = memory_span(value.shape, value.stride())
    flat = value.detach().as_strided((size,), (1,)).to("cpu", copy=True)
    return flat.as_strided(value.shape, value.stride())


def is_plain(value: object) -> bool:
    """Whether a value can be known beforehand: an ordinary tensor with elements."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout == torch.strided and value.numel() > 0 and not value.is_conj() and not value.is_neg()


class DeviceSchedule:
    """The timestep-like inputs of one captured graph."""

    def __init__(self, loop: Loop) -> None:
        self.host_reads = 0
        self._loop = loop
        self._schedule: Any = None
        self._bits: Hashable = None
        self._step: int | None = None
        self._calls: dict[int | None, int] = {}
        self._objects: dict[tuple[int, int], tuple[torch.Tensor, int, Hashable]] = {}
        self._first: dict[tuple[int, int], Hashable] = {}
        self._forms: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._known: OrderedDict[Hashable, dict[Hashable, torch.Tensor]] = OrderedDict({None: {}})

    def begin_call(self) -> None:
        """Find out from the scheduler which step this call belongs to."""
        schedule, step = self._loop.schedule, self._loop.step
        if schedule is not self._schedule or (step is None and self._step is not None):
            self._schedule = schedule
            self._bits = self._loop.timestep_numbers()
            self._known.setdefault(self._bits, {})
            self._known.move_to_end(self._bits)
            if len(self._known) > _MAX_SCHEDULES:
                self._known.popitem(last=False)
            self._calls, self._objects, self._first, self._forms = {}, {}, {}, {}
            if not self._loop.settle():  # Of a loop that was left before its last step.
                warnings.warn(f"dithoist: {_MISMATCH}", DithoistWarning, stacklevel=2)
        self._step = step
        self._calls[step] = min(self._calls.get(step, -1) + 1, _MAX_BRANCHES)

    def token(self, i: int, value: torch.Tensor, host_token: Callable[[torch.Tensor], Hashable]) -> Hashable:
        """The token of input ``i``, from its bits or from what they must be.

        Args:
            i: the input's position.
            value: its value, on the device.
            host_token: gives equal tokens to host tensors with equal bits.

        Raises:
            ScheduleMismatch: in the last step, if they were not what they had to be in an earlier one.
        """
        place = (i, self._calls[self._step])
        version = -1 if value.is_inference() else value._version
        known = self._objects.get(place)
        if known is not None and known[0] is value and known[1] == version != -1:
            return known[2]
        expected = self._expected(place, value)
        if expected is None:
            host = self._read_value(place, value, host_token)
        else:
            host = expected
            self._known[self._bits][place, self._first[place], self._step] = host  # Unless the comparison fails.
            bits = BITS[value.element_size()]
            self._loop.doubt((value.view(bits) != expected.to(value.device, non_blocking=True).view(bits)).any())
        token = host_token(host)
        self._objects[place] = (value, version, token)
        return token

    def _read_value(
        self, place: tuple[int, int], value: torch.Tensor, host_token: Callable[[torch.Tensor], Hashable]
    ) -> torch.Tensor:
        if self._is_last() and not self._loop.settle():
            raise ScheduleMismatch(_MISMATCH)
        self.host_reads += 1
        host = private_copy(value)
        if is_plain(value):
            self._narrow(place, host)
            first = self._first.setdefault(place, host_token(host))
            if self._step is not None:
                self._known[self._bits][place, first, self._step] = host
        return host

    def _is_last(self) -> bool:
        timesteps = self._loop.timesteps()
        return self._step is not None and timesteps is not None and self._step >= len(timesteps) - 1

    def _narrow(self, place: tuple[int, int], host: torch.Tensor) -> None:
        """Keep the forms of the timesteps that explain a value just read."""
        timesteps = self._loop.timesteps()
        if timesteps is None:
            return
        element = host.flatten()[0]
        forms = self._forms.get(place)
        if forms is None:
            forms = timestep_forms(timesteps, host.dtype)
        uniform = bool((host == element).all())
        at = slice(None) if self._step is None else slice(self._step, self._step + 1)
        self._forms[place] = [f for f in forms if uniform and bool((f[at] == element).any())]

    def _expected(self, place: tuple[int, int], value: torch.Tensor) -> torch.Tensor | None:
        """What the value must be, on the host, or ``None`` if it has to be read."""
        known_place = self._step is not None and place[1] < _MAX_BRANCHES and not self._is_last()
        if not (known_place and self._loop.trusted and is_plain(value)) or value.element_size() not in BITS:
            return None
        assert self._step is not None
        if place not in self._first:
            return None
        earlier = self._known[self._bits].get((place, self._first[place], self._step))
        if earlier is not None:
            same = (earlier.dtype, earlier.shape, earlier.stride()) == (value.dtype, value.shape, value.stride())
            return earlier if same else None
        if len(self._calls) <= _LEAST_READ:
            return None
        elements = {f[self._step].item(): f[self._step] for f in self._forms.get(place, ()) if self._step < len(f)}
        return filled_like(value, *elements.values()) if len(elements) == 1 else None
