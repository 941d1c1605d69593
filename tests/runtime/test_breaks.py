"""What Dynamo captures in pieces at the first call, and whole if the second can be."""

from __future__ import annotations

from typing import Any

import torch
from twins import TinyDit, Twins, tiny_inputs

from dithoist import compile_step, report


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
