"""The capture state: nestable, restored on exceptions, one for each thread; and the two bodies it chooses from."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from twins import Twins

from dithoist import report
from dithoist.runtime import table
from dithoist.runtime.capture import breakable_cuda_graph, is_capturing, is_in_breakable_cuda_graph


def test_blocks_nest_and_are_left_as_they_were_found() -> None:
    assert not is_in_breakable_cuda_graph()
    with breakable_cuda_graph():
        assert is_in_breakable_cuda_graph()
        assert is_capturing()
        with breakable_cuda_graph(False):
            assert not is_in_breakable_cuda_graph()
            assert not is_capturing()
        assert is_in_breakable_cuda_graph()
    assert not is_in_breakable_cuda_graph()


def test_an_exception_restores_the_state() -> None:
    def fail() -> None:
        with breakable_cuda_graph():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not is_in_breakable_cuda_graph()


def test_another_thread_has_a_state_of_its_own() -> None:
    seen = []
    with breakable_cuda_graph():
        thread = threading.Thread(target=lambda: seen.append(is_in_breakable_cuda_graph()))
        thread.start()
        thread.join()
    assert seen == [False]


class Masked(nn.Module):
    """Fills rows of a fresh value by a mask of the request."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * 2).masked_fill(mask.unsqueeze(-1), 0.5) + timestep


def test_the_state_at_call_time_chooses_the_body_and_switching_recompiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, bool]] = []
    run = table.StageCall.run

    def watched(self: table.StageCall, values: list[Any]) -> Any:
        ran.append(
            (self.stage.time.label if self.stage.capture_safe else "rows", "index_fill_" in self.stage.module.code)
        )
        return run(self, values)

    monkeypatch.setattr(table.StageCall, "run", watched)
    twins = Twins(Masked())
    mask = torch.tensor([[True, False, True]])
    for step, capturing in enumerate([True, False, True, False]):
        with breakable_cuda_graph(capturing):
            twins.check(torch.randn(1, 3, 8), torch.tensor([float(step)]), mask)
    captured, eager = ("step", False), ("step", True)
    assert ran == [captured, ("rows", False), eager, captured, eager]
    (denoiser,) = report(twins.compiled).denoisers
    assert len(denoiser.graphs) == 1
    assert denoiser.recompiles == 0


@pytest.mark.cuda
def test_a_capture_on_the_current_stream_is_seen() -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        assert is_capturing()
        x + 1
    assert not is_capturing()
