"""Labels that prove wrong: found out within two requests, boundedly often, and never at the cost of a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from twins import TinyDit, Twins, tiny_inputs

STEPS = tuple(float(k) for k in range(8, 0, -1))


class Controlled(TinyDit):
    """A picture to start from, under a name like that of latents, and a second timestep under an unusual one."""

    def __init__(self) -> None:
        super().__init__()
        self.image_proj = nn.Linear(8, 8)

    def forward(
        self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any,
        image_latents: Any = None, ratio: Any = None,
    ) -> Any:  # fmt: skip
        if image_latents is not None:
            hidden_states = hidden_states + self.image_proj(image_latents)
        if ratio is not None:
            timestep = timestep + torch.cos(ratio)
        return super().forward(hidden_states, timestep, encoder_hidden_states)


def generation(twins: Twins, seed: int, **extra: Callable[[float], torch.Tensor]) -> None:
    for step in STEPS:
        inputs = tiny_inputs(seed, step)
        del inputs["mask"]
        twins.check(**inputs, **{name: make(step) for name, make in extra.items()})


def picture(seed: int) -> Callable[[float], torch.Tensor]:
    made = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))
    return lambda _: made


def test_an_input_of_the_step_that_stays_is_promoted_once() -> None:
    twins = Twins(Controlled())
    for seed in range(4):
        generation(twins, seed, image_latents=picture(seed))
    (graph,) = twins.report.graphs
    assert graph.promoted == ["image_latents"]
    assert graph.inputs["image_latents"] == "request"
    assert graph.demoted == []
    assert twins.runs("request") <= 1 + 4, "the second request onwards, once each"


def test_what_the_user_said_stays() -> None:
    twins = Twins(Controlled(), labels={"image_latents": "step"})
    for seed in range(3):
        generation(twins, seed, image_latents=picture(seed))
    assert twins.report.graphs[0].promoted == []


def test_a_second_timestep_is_found_to_be_one() -> None:
    twins = Twins(Controlled())
    for seed in range(4):
        generation(twins, seed, ratio=lambda step: torch.full((2,), step / 10))
    (graph,) = twins.report.graphs
    assert graph.inputs["ratio"] == "schedule"
    assert graph.demoted == ["ratio"]
    before = twins.runs("schedule")
    generation(twins, 9, ratio=lambda step: torch.full((2,), step / 10))
    assert twins.runs("schedule") == before, "its rows are held like those of any timestep"


def test_small_values_that_never_come_again_are_of_the_step() -> None:
    twins = Twins(Controlled())
    draws = torch.Generator().manual_seed(0)
    for seed in range(4):
        generation(twins, seed, ratio=lambda _: torch.rand(2, generator=draws))
    (graph,) = twins.report.graphs
    assert graph.inputs["ratio"] == "step"
    assert graph.demoted == ["ratio", "ratio"]


def test_an_input_that_is_written_in_place_is_not_promoted() -> None:
    twins = Twins(Controlled())
    image = torch.randn(2, 4, 8)
    for seed in range(3):
        generation(twins, seed, image_latents=lambda _: image.mul_(1.01))
    assert twins.report.graphs[0].promoted == []


@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=8), min_size=1, max_size=4))
def test_property_whatever_changes_when_every_call_has_the_bits(generations: list[list[int]]) -> None:
    twins = Twins(Controlled())
    pictures = [torch.randn(2, 4, 8) for _ in range(3)]
    for seed, chosen in enumerate(generations):
        for step, choice in zip(STEPS, chosen, strict=True):
            inputs = tiny_inputs(seed, step)
            del inputs["mask"]
            twins.check(**inputs, image_latents=pictures[choice], ratio=torch.full((2,), float(choice)))
    (graph,) = twins.report.graphs
    assert len(graph.demoted + graph.promoted) <= 2 * 2


def test_nothing_is_relabelled_where_nothing_is_wrong() -> None:
    twins = Twins(TinyDit())
    for seed in range(3):
        for step in STEPS:
            twins.check(**tiny_inputs(seed, step))
    assert twins.report.graphs[0].demoted + twins.report.graphs[0].promoted == []
