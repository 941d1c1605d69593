"""What Dynamo captures in pieces: whole if a later call can be; if not, labels go from piece to piece."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from twins import TinyDit, Twins, tiny_inputs

from dithoist import compile_step, report
from dithoist.runtime import identity
from dithoist.runtime.backend import make_backend
from dithoist.runtime.settings import Settings
from dithoist.runtime.state import DenoiserState


class Rope:
    """Makes its table when it is first called, in a way that Dynamo does not follow."""

    table: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            with torch.device("cpu"):
                self.table = torch.linspace(0, 1, 8)
        return x + self.table.sin()


class Tables(TinyDit):
    """Breaks its graph at the first call, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()

    def forward(self, hidden_states: Any, **others: Any) -> Any:
        return super().forward(self.rope(hidden_states.sin()), **others)


class Breaking(TinyDit):
    """Breaks its graph at every call, behind a write that must be made once a call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states: Any, **others: Any) -> Any:
        self.calls += 1
        hidden_states = hidden_states + self.calls
        torch._dynamo.graph_break()
        return super().forward(hidden_states, **others)


def test_a_model_that_breaks_at_its_first_call_only_is_one_graph() -> None:
    twins = Twins(Tables())
    twins.check(**tiny_inputs(0, 4.0))
    assert twins.report.graph_breaks > 0
    for seed, step in ((0, 3.0), (0, 2.0), (1, 4.0), (1, 3.0), (1, 2.0)):
        twins.check(**tiny_inputs(seed, step))
        (graph,) = twins.report.graphs
        assert (twins.report.graph_breaks, twins.report.recompiles) == (0, 0)
    assert graph.calls == 5
    assert graph.by_time["step"].operations < graph.captured_operations


def test_a_model_that_breaks_at_every_call_is_captured_once() -> None:
    twins = Twins(Breaking())
    twins.check(**tiny_inputs(0, 4.0))
    graphs, breaks = len(twins.report.graphs), twins.report.graph_breaks
    assert breaks == 1
    for step in (3.0, 2.0, 1.0):
        twins.check(**tiny_inputs(0, step))
    assert (len(twins.report.graphs), twins.report.graph_breaks, twins.report.recompiles) == (graphs, breaks, 0)


def test_a_step_that_breaks_at_its_first_call_only_is_one_graph() -> None:
    denoiser, rope = TinyDit().eval(), Rope()

    def step(latents: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return latents - denoiser(rope(latents.sin()), t, text)

    compiled = compile_step(step, backend="eager", strict=True)
    for k, breaks in ((4.0, True), (3.0, False), (2.0, False)):
        inputs = tiny_inputs(0, k)
        args = inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"]
        with torch.no_grad():
            assert torch.equal(compiled(*args), step(*args))
        assert (report(compiled).denoisers[0].graph_breaks > 0) == breaks
    assert len(report(compiled).denoisers[0].graphs) == 1


class Pieces(nn.Module):
    """Its pieces hand each other values under names that say nothing, or something else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.text, self.time, self.out = nn.Linear(8, 8), nn.Linear(1, width), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        hidden_states = self.text(prompt)
        temb = self.time((2 * timestep[:, None]).sin())
        moved = self.out(x)
        torch._dynamo.graph_break()
        return moved * temb.sin().mean(-1)[:, None, None] + hidden_states.cos().mean(1, keepdim=True)


@pytest.mark.parametrize(("width", "temb"), [(8, "schedule"), (4096, "step")])
def test_a_piece_knows_when_the_one_before_it_knew_its_values(width: int, temb: str) -> None:
    """A large value that changes with the step could not be recognised at a later generation."""
    twins = Twins(Pieces(width))
    for seed in range(3):
        for step in (8.0, 7.0, 6.0, 5.0, 4.0, 3.0):
            inputs = tiny_inputs(seed, step)
            twins.check(inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"])
    (second,) = [graph for graph in twins.report.graphs if "temb" in graph.inputs]
    assert second.inputs == {"hidden_states": "request", "temb": temb, "moved": "step"}
    assert second.demoted + second.promoted == []


class Caching(nn.Module):
    """Its first call makes what every later one is given."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, cache: torch.Tensor | None = None) -> torch.Tensor:
        return x.sin() if cache is None else x * timestep[:, None, None].sin() + cache.cos()


def test_what_a_call_returned_is_an_argument_like_any_other_in_the_next() -> None:
    twins = Twins(Caching())
    cache = twins.check(torch.randn(2, 4, 8), torch.zeros(2))
    twins.check(torch.randn(2, 4, 8), torch.ones(2), cache)
    (reading,) = [graph for graph in twins.report.graphs if "cache" in graph.inputs]
    assert reading.inputs["cache"] == "request"


def test_what_is_made_of_a_timestep_does_not_tell_generations_apart() -> None:
    twins = Twins(Pieces(64))
    with mock.patch.object(identity, "_contents", wraps=identity._contents) as hashes:
        for seed in range(2):
            for step in (8.0, 7.0, 6.0, 5.0, 4.0, 3.0):
                inputs = tiny_inputs(seed, step)
                twins.check(inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"])
    assert hashes.call_count == len(twins.report.graphs) * 2


def test_keyword_arguments_have_labels_of_their_own_whatever_they_are_called_together() -> None:
    def function(x: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        return x + given["latents"] * given["sigma"].sin() + given["text"].cos()

    state = DenoiserState("function", Settings("eager"))
    compiled = torch.compile(function, backend=make_backend(state))
    values = {"latents": torch.ones(3), "sigma": torch.ones(1), "text": torch.ones(3)}
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(3), **values), function(torch.ones(3), **values))
    (graph,) = state.graphs
    labels = {graph.inputs[node].name: label.label for node, label in graph.labels.items()}
    assert labels == {"x": "step", "latents": "step", "sigma": "schedule", "text": "request"}
