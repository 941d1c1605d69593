"""Floats under dynamic sizes, where AOTAutograd drops ``alpha``: same bits, and graphs only for floats beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import Twins

from dithoist import report
from dithoist.runtime import backend


class Alpha(nn.Module):
    """What Cosmos does to its positions, and other ways to write ``alpha``."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, hidden_states: Tensor, timestep: Tensor, gain: float = 2.0, other: float = 1.0) -> Tensor:
        norm = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True)
        norm = torch.add(self.eps, norm, alpha=(norm.numel() / hidden_states.numel()) ** 0.5)
        shifted = hidden_states.add(timestep[:, None, None], alpha=gain)
        return hidden_states / norm + shifted + torch.sub(gain, hidden_states, alpha=3) * other


def run(dynamic: bool | None) -> Any:
    twins = Twins(Alpha(), dynamic=dynamic)
    for tokens in (4, 5, 6):
        for gain in (2.0, 3.0):
            for other in (1.0, 0.5, 0.25):
                twins.check(torch.randn(2, tokens, 8), torch.ones(2), gain, other)
    (found,) = report(twins.compiled).denoisers
    return found


@pytest.mark.parametrize("dynamic", [True, None])
def test_floats_beside_alpha_keep_the_bits(dynamic: bool | None) -> None:
    found = run(dynamic)
    assert found.fallbacks == []
    assert len(found.graphs) <= 7, "a graph for each gain, not for each other float"


def test_without_that_the_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, PyTorch has mended it and `runtime/floats.py` can go."""
    monkeypatch.setattr(backend, "keep_floats_beside_alpha", lambda gm: None)
    with pytest.raises(AssertionError):
        run(True)
