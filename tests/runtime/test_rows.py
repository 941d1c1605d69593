"""Rows of a schedule: known before their step, made together, and never used for another timestep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import bits_equal
from torch import nn
from twins import TinyDit, Twins, tiny_inputs

from dithoist.models.small import as_dtype
from dithoist.models.timesteps import FORMS
from dithoist.runtime.cache import HeldValues
from dithoist.runtime.device_schedule import private_copy
from dithoist.runtime.forecast import Forecast
from dithoist.runtime.identity import InputIdentity, host_value
from dithoist.runtime.loop import Loop
from dithoist.runtime.rows import HoistedStage


class Pipe:
    """What a loop asks of a pipeline: its scheduler."""

    def __init__(self, steps: int = 4) -> None:
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.scheduler.set_timesteps(steps)


def spelled(step: dict[int, torch.Tensor]) -> dict[int, Any]:
    """Tokens of a step."""
    identity = InputIdentity(HeldValues(0), "test")
    return {i: identity.token(value) for i, value in step.items()}


class TextModulation(TinyDit):
    """Modulation that depends on the prompt too, as in Flux and SD3."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, mask: Any = None) -> Any:
        pooled = self.text_proj(encoder_hidden_states).mean(1)
        scale, shift = self.modulation(torch.sin(timestep[:, None] * self.frequencies) + pooled).chunk(2, dim=-1)
        return self.body(hidden_states * (1 + scale[:, None]) + shift[:, None])


STEPS = (4.0, 3.0, 2.0, 1.0)


def generation(twins: Twins, seed: int, steps: tuple[float, ...] = STEPS) -> None:
    for step in steps:
        twins.check(**tiny_inputs(seed, step))


def test_a_loop_of_ones_own_is_known_from_its_second_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    rows = HoistedStage.rows

    def counted(self: HoistedStage, inputs: Any) -> Any:
        if type(self.gm).__name__ == "RequestScheduleStage":
            made.append(len(inputs))
        return rows(self, inputs)

    monkeypatch.setattr(HoistedStage, "rows", counted)
    twins = Twins(TextModulation(), release_weights=True)
    generation(twins, 0)
    assert made == [1, 1, 1, 1]
    generation(twins, 1)
    assert made[4:] == [4], "a new prompt has all its rows made at the first step"
    generation(twins, 2, STEPS[:2])
    generation(twins, 3)
    assert made[5:] == [4, 4], "a generation cut short is not forgotten"
    generation(twins, 4, (4.0, 2.5, 1.0))
    assert made[7:] == [4, 1], "another timestep has its own row"


def test_rows_come_with_the_bits_of_the_model_one_by_one_or_together() -> None:
    for options in ({}, {"release_weights": True}):
        twins = Twins(Wide(), **options)
        for seed in (0, 1, 0):
            for step in STEPS:
                twins.check(**wide(seed, step))


def test_rows_that_do_not_fit_are_made_when_their_step_comes() -> None:
    twins = Twins(TextModulation(), release_weights=True, max_cached_bytes=400)
    for seed in (0, 1, 2):
        generation(twins, seed)


@pytest.mark.parametrize(
    ("form", "dtype"), [*((k, torch.float32) for k in range(len(FORMS))), (1, torch.bfloat16), (3, torch.bfloat16)]
)
def test_the_scheduler_says_what_is_to_come(form: int, dtype: torch.dtype) -> None:
    pipe = Pipe()
    values = FORMS[form](pipe.scheduler.timesteps.to(dtype))
    passed = [t.expand(2) for t in values]
    coming = Forecast(Loop(pipe)).coming(spelled({0: passed[1], 1: torch.tensor([3.5])}))
    assert [bits_equal(step[0], later) for step, later in zip(coming, passed[2:], strict=True)] == [True, True]
    assert all(step[0].stride() == passed[0].stride() and step[1].item() == 3.5 for step in coming)


def test_of_values_that_are_no_timesteps_nothing_is_known() -> None:
    forecast = Forecast(Loop(Pipe()))
    assert forecast.coming(spelled({0: torch.tensor([3.14])})) == []
    assert forecast.coming(spelled({0: torch.tensor([1000.0, 0.0])})) == []
    assert forecast.coming({0: 17}) == [], "the token of a large one does not spell it out"
    assert Forecast(Loop()).coming(spelled({0: torch.tensor([1000.0])})) == []


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=5), st.data())
def test_property_a_forecast_is_a_generation_that_was(generations: list[list[int]], data: st.DataObject) -> None:
    forecast = Forecast(Loop())
    seen: list[list[int]] = []
    for steps in generations:
        passed: list[int] = []
        for k, step in enumerate(steps):
            now = spelled({0: torch.tensor([float(step)])})
            forecast.passed(now, starts=k == 0)
            passed += [step] if step not in passed else []
            coming = [int(s[0].item()) for s in forecast.coming(now)]
            assert not coming or passed + coming in seen
        seen.append(passed)


@pytest.mark.parametrize("make", [private_copy, lambda value: host_value(spelled({0: value})[0])])
def test_a_copy_and_what_a_token_spells_keep_bits_and_strides(make: Any) -> None:
    for value in (
        torch.arange(6.0).view(2, 3).t(), torch.tensor([2.0]).expand(3, 4), torch.tensor(5.0),
        torch.tensor([[True], [False]]).expand(2, 3), torch.arange(6).view(2, 3)[:, ::2], torch.ones(3).bfloat16(),
    ):  # fmt: skip
        copy = make(value)
        assert bits_equal(copy, value)
        assert copy.stride() == value.stride()
        assert copy.data_ptr() != value.data_ptr()


class Wide(TextModulation):
    def __init__(self) -> None:
        super().__init__(128)
        self.deep = nn.Sequential(nn.SiLU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128))

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, mask: Any = None) -> Any:
        emb = torch.sin(timestep[:, None] * self.frequencies) + self.text_proj(encoder_hidden_states).mean(1)
        scale, shift = self.modulation(self.deep(emb.to(hidden_states.dtype))).chunk(2, dim=-1)
        return self.body(hidden_states * (1 + scale[:, None]) + shift[:, None])


def wide(seed: int, step: float) -> dict[str, torch.Tensor]:
    return {k: v.repeat(1, 1, 16) if v.ndim == 3 else v for k, v in tiny_inputs(seed, step).items()}


# Error of the fast rows against float64, over the untouched model's own in its dtype.
FAST_TOLERANCE = {torch.float32: 1.5, torch.bfloat16: 1.5, torch.float16: 1.5}


@pytest.mark.parametrize("dtype", FAST_TOLERANCE)
@pytest.mark.parametrize("release", [False, True])
def test_fast_rows_are_as_near_to_float64_as_the_model_is(dtype: torch.dtype, release: bool) -> None:
    torch.manual_seed(0)
    twins = Twins(Wide().to(dtype), numerics="fast", release_weights=release)
    exact = Wide().double()
    exact.load_state_dict(twins.untouched.state_dict())
    own = fast = 0.0
    for seed in (0, 1):
        for step in STEPS:
            typed = as_dtype(wide(seed, step), dtype)
            with torch.no_grad():
                reference = exact(**as_dtype(typed, torch.float64))
                own = max(own, (twins.untouched(**typed) - reference).abs().max().item())
                fast = max(fast, (twins.compiled(**typed) - reference).abs().max().item())
    assert 0 < fast <= FAST_TOLERANCE[dtype] * own
    assert not [n for g in twins.report.graphs for n in g.notes if n.startswith("rows")]


def test_fast_rows_carry_nan_and_infinity() -> None:
    twins = Twins(Wide(), numerics="fast")
    for seed in (0, 1):
        for step in STEPS:
            inputs = wide(seed, step)
            inputs["encoder_hidden_states"][0, 0, 0] = torch.inf if seed else torch.nan
            with torch.no_grad():
                expected, actual = twins.untouched(**inputs), twins.compiled(**inputs)
            torch.testing.assert_close(actual, expected, equal_nan=True)


def test_what_has_no_batched_form_is_made_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no batching rule")

    monkeypatch.setattr(torch.func, "vmap", refuse)
    twins = Twins(TextModulation(), numerics="fast")
    for seed in (0, 1):
        generation(twins, seed)
    assert "made one by one, not as a batch: NotImplementedError" in " ".join(twins.report.graphs[0].notes)
