"""Timesteps on an accelerator: known without waiting for them, and never taken for another.

There is no accelerator here, so the tests say that reading a CPU tensor would wait, and a dispatch mode raises where
the host reads a value that depends on what was passed to the denoiser.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from random_graphs import bits_equal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from twins import TinyDit

from dithoist import report
from dithoist.runtime import identity, staged
from dithoist.runtime.denoiser import prepare_denoiser
from dithoist.runtime.device_schedule import ScheduleMismatch
from dithoist.runtime.loop import Loop
from dithoist.runtime.settings import Settings
from dithoist.runtime.state import DithoistWarning


class OnDevice(TorchDispatchMode):
    """Follows the tensors of a device and counts how often the host waits for one of them."""

    READS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self._storages: dict[int, torch.UntypedStorage] = {}

    def put(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage  # Held, so that no other gets its place.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        here = any(t.untyped_storage()._cdata in self._storages for t in tensors)
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if here and (name in self.READS or (name == "_to_copy" and kwargs.get("device") == torch.device("cpu"))):
            self.waits += 1
        elif here:
            self.put(*(t for t in tree_leaves(result) if isinstance(t, torch.Tensor)))
        return result


class GuidedDit(TinyDit):
    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, guidance: Any = None) -> Any:
        hidden_states = hidden_states if guidance is None else hidden_states + torch.cos(guidance)[:, None, None]
        return super().forward(hidden_states, timestep, encoder_hidden_states)


class DevicePipe:
    """A loop as pipelines write it, over a module and its untouched twin; what is passed lies on the device."""

    def __init__(self, scheduler: Any = None, form: Any = lambda t: t / 1000, **options: Any) -> None:
        self.scheduler = scheduler or FlowMatchEulerDiscreteScheduler()
        self.form = form
        torch.manual_seed(0)
        self.untouched = GuidedDit().eval()
        self.compiled = copy.deepcopy(self.untouched)
        settings = Settings(backend="eager", strict=True, **options)
        prepare_denoiser(self.compiled, "transformer", settings, loop=Loop(self)).install()

    def run(
        self, *, steps: int = 6, seed: int = 0, guidance: float | None = None, branches: int = 1, stop: int = 99
    ) -> list[int]:
        """One generation, bitwise equal to the twin's; how often the host waited at each step."""
        waits = []
        self.scheduler.set_timesteps(steps)
        latents = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))
        prompts = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed + k)) for k in range(branches)]
        scale = torch.full((2,), guidance) if guidance is not None else None
        mode = OnDevice()
        for t in self.scheduler.timesteps[:stop]:
            before = mode.waits
            noise = torch.zeros(())
            for prompt in prompts:
                timestep = self.form(t.expand(2).clone())
                inputs = {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": prompt}
                inputs |= {"guidance": scale} if scale is not None else {}
                mode.put(*inputs.values())
                with torch.no_grad():
                    expected = self.untouched(**inputs)
                    with watching(mode):
                        actual = self.compiled(**inputs)
                assert bits_equal(actual, expected)
                noise = noise + actual
            waits.append(mode.waits - before)
            latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
        return waits


@contextmanager
def watching(mode: OnDevice) -> Iterator[None]:
    """The mode around every staged call; around the whole module Dynamo would not compile."""
    call = staged.StagedGraph.__call__

    def watched(self: Any, args: list[Any]) -> Any:
        with mode:
            return call(self, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged.StagedGraph, "__call__", watched)
        yield


@pytest.fixture(autouse=True)
def reading_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (identity, staged):
        monkeypatch.setattr(module, "reads_wait", lambda device: True)


def test_two_steps_and_the_last_are_read_and_later_only_the_first_and_the_last() -> None:
    pipe = DevicePipe()
    assert pipe.run() == [1, 1, 0, 0, 0, 2]  # With the last comes the outcome of the comparisons.
    assert pipe.run(seed=1) == [1, 0, 0, 0, 0, 2]
    assert pipe.run(steps=4) == [1, 1, 0, 2]
    assert pipe.run(seed=2) == [1, 0, 0, 0, 0, 2]
    assert report(pipe.compiled).denoisers[0].graphs[0].by_time["schedule"].runs == 6 + 2  # 1000 and 1 are in both.


def test_rows_made_ahead_ask_the_device_for_nothing_more() -> None:
    pipe = DevicePipe(release_weights=True)
    assert pipe.run() == [1, 1, 0, 0, 0, 2]
    assert pipe.run(seed=1) == [1, 0, 0, 0, 0, 2]


def test_guidance_branches_wait_no_more_often_in_the_loop() -> None:
    pipe = DevicePipe()
    assert pipe.run(branches=2) == [2, 2, 0, 0, 0, 3]
    assert pipe.run(branches=2, seed=5) == [2, 0, 0, 0, 0, 3]


def test_another_guidance_scale_is_seen() -> None:
    pipe = DevicePipe()
    for guidance in (3.5, 7.0, 3.5):
        assert pipe.run(guidance=guidance)[2:5] == [0, 0, 0]


USUAL = {
    "t": lambda t: t,
    "t - 1": lambda t: t - 1,
    "1 - t/1000": lambda t: 1 - t / 1000,
    "rounded after": lambda t: (t / 1000).bfloat16(),
    "rounded before": lambda t: t.bfloat16() / 1000,
}


@pytest.mark.parametrize("form", USUAL.values(), ids=USUAL)
def test_the_forms_pipelines_pass(form: Any) -> None:
    pipe = DevicePipe(form=form)
    for seed in range(3):
        waits = pipe.run(steps=12, seed=seed)
        assert waits[3:-1] == [0] * 8


def test_an_unusual_form_is_read_once_a_schedule() -> None:
    pipe = DevicePipe(form=lambda t: torch.log(t + 1))
    assert pipe.run() == [1, 1, 1, 1, 1, 1]
    assert pipe.run(seed=1) == [1, 0, 0, 0, 0, 2]


def test_heun_calls_twice_a_step() -> None:
    pipe = DevicePipe(FlowMatchHeunDiscreteScheduler())
    for seed in range(3):
        waits = pipe.run(steps=5, seed=seed)
        assert len(waits) == 9
        assert waits[2:-1] == [0] * 6


def test_timesteps_that_are_not_the_schedulers_raise_before_the_picture_is_done() -> None:
    pipe = DevicePipe()
    pipe.run()

    def bent(t: torch.Tensor) -> torch.Tensor:
        return t / 1000 + 0.125 * (t / 1000 > 0.3).logical_and(t / 1000 < 0.7)

    pipe.form = bent
    with pytest.raises((ScheduleMismatch, AssertionError)) as caught:
        ignore_bits(pipe)
    assert caught.type is ScheduleMismatch
    assert pipe.run() == [1] * 6, "from now on each is read"


def test_a_loop_left_early_says_so_at_the_next() -> None:
    pipe = DevicePipe()
    pipe.run()
    pipe.form = lambda t: t / 1000 + 0.125 * (t / 1000 > 0.3).logical_and(t / 1000 < 0.7)
    with ignored_bits():
        pipe.run(stop=5)
    with pytest.warns(DithoistWarning, match="were not those of its scheduler"):
        pipe.run()


@contextmanager
def ignored_bits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "bits_equal", lambda *_: True)
        yield


def ignore_bits(pipe: DevicePipe) -> None:
    with ignored_bits():
        pipe.run()
