"""The denoising loop as the host sees it: which generation, which step, and what its timesteps are.

A pipeline's scheduler says all three (:class:`Loop`). :class:`Generations` also recognises the loops that nobody
told us of, by what is passed to the denoiser.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

_MAX_LOOPS = 64
_MAX_STEPS = 4096


class Loop:
    """The loop of a diffusers pipeline, through its scheduler.

    Of no pipeline, a loop nothing is known of; of several that share the denoiser, only when a generation begins.
    """

    def __init__(self, pipe: object = None) -> None:
        self._pipes = [weakref.ref(pipe)] if pipe is not None else []
        self._seen: list[Any] = []
        self._generation = object()
        self._read: tuple[Any, int] = (None, 0)
        self._timesteps: torch.Tensor | None = None
        self._doubts: dict[torch.device, torch.Tensor] = {}
        self.trusted = True
        """Whether the scheduler's word was always true."""

    def join(self, other: Loop) -> None:
        """The pipelines of ``other`` use the denoiser too."""
        known = {id(pipe()) for pipe in self._pipes}
        self._pipes += [pipe for pipe in other._pipes if id(pipe()) not in known]

    def _schedulers(self) -> list[Any]:
        pipes = [pipe() for pipe in self._pipes]
        if None in pipes:
            self._pipes = [pipe for pipe in self._pipes if pipe() is not None]
        return [scheduler for pipe in pipes if (scheduler := getattr(pipe, "scheduler", None)) is not None]

    @property
    def generation(self) -> object:
        """Another object in each generation: ``set_timesteps`` makes a new tensor at its start."""
        now = [getattr(scheduler, "timesteps", None) for scheduler in self._schedulers()]
        if len(now) != len(self._seen) or any(a is not b for a, b in zip(now, self._seen, strict=True)):
            self._seen, self._generation = now, object()
        return self._generation

    @property
    def schedule(self) -> Any:
        """The timesteps of the one scheduler there is."""
        schedulers = self._schedulers()
        return getattr(schedulers[0], "timesteps", None) if len(schedulers) == 1 else None

    @property
    def step(self) -> int | None:
        """Index into the timesteps; ``None`` in the first step, and of schedulers that do not count."""
        schedulers = self._schedulers()
        step = getattr(schedulers[0], "step_index", None) if len(schedulers) == 1 else None
        return step if isinstance(step, int) else None

    def timesteps(self) -> torch.Tensor | None:
        """The timesteps on the host, one-dimensional; read from an accelerator once a generation."""
        schedule = self.schedule
        if not isinstance(schedule, torch.Tensor) or schedule.ndim != 1 or not schedule.numel():
            return None
        seen = (schedule, -1 if schedule.is_inference() else schedule._version)
        if self._read[0] is not schedule or self._read[1] != seen[1]:
            self._read, self._timesteps = seen, schedule.detach().cpu().clone()
        return self._timesteps

    def timestep_numbers(self) -> Hashable:
        """What tells one schedule from another: its timesteps as numbers, or ``None``."""
        timesteps = self.timesteps()
        return None if timesteps is None else tuple(timesteps.tolist())

    def doubt(self, failed: torch.Tensor) -> None:
        """Keep the result of a comparison, a boolean still under way on its device, until :meth:`settle`."""
        earlier = self._doubts.get(failed.device)
        self._doubts[failed.device] = failed if earlier is None else earlier | failed

    def settle(self) -> bool:
        """Wait for the comparisons kept since the last time; whether none failed. One that did ends all trust."""
        doubts, self._doubts = self._doubts, {}
        failed = any(bool(flag) for flag in doubts.values())
        self.trusted = self.trusted and not failed
        return not failed


@dataclass
class _Progress:
    """How far the loop of one guidance branch has come: schedule tokens so far, and the last timestep."""

    seen: set[Hashable] = field(default_factory=set)
    position: float | None = None


class Generations:
    """Recognises the first call of each generation.

    Taking a step for a new loop costs a pass over the hoisted weights, no more.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._generation: object = None
        self._progress: dict[Hashable, _Progress] = {}
        self._direction = 0.0  # The way timesteps went the last time they went on.

    def starts(self, request: Hashable, schedule: Hashable, position: float | None) -> bool:
        """Whether this call begins a loop: a new request, a step that was there before, or one the other way.

        A pipeline's loop is known by its scheduler; the rest is for loops nobody told us of.

        Args:
            request: token of what is fixed for a generation.
            schedule: token of what the step passes.
            position: the timestep as a number, if it is known.
        """
        generation = self._loop.generation
        progress = self._progress.get(request)
        move = 0.0
        if progress is not None and position is not None and progress.position is not None:
            move = position - progress.position
        restarted = generation is not self._generation or (
            progress is not None
            and (schedule in progress.seen or len(progress.seen) > _MAX_STEPS or move * self._direction < 0)
        )
        self._generation = generation
        if restarted or len(self._progress) >= _MAX_LOOPS:
            self._progress.clear()
        if progress is None or restarted:
            progress = self._progress[request] = _Progress()
        elif move:
            self._direction = move
        starts = not progress.seen
        progress.seen.add(schedule)
        progress.position = position
        return starts
