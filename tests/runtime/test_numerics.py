"""What decides about the last bits of a product besides its operands: where they lie, and PyTorch's switches.

Values held from before a change are not what the model would compute after it.
"""

from __future__ import annotations

import torch
from random_graphs import bits_equal
from torch import nn
from twins import Twins


class Pooled(nn.Module):
    """A product that reads an input of the request as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(64, 64)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return hidden_states * timestep + self.text(pooled)


def test_equal_prompts_that_lie_otherwise() -> None:
    """A product of two rows takes its path by its operands' addresses."""
    twins = Twins(Pooled())
    prompt, latents = torch.randn(2, 64), torch.randn(2, 64)
    room = torch.empty(2 * 64 + 32)
    for shift in (0, 1, 4, 6, 0):
        start = (-room.data_ptr() % 64) // 4 + shift
        placed = room[start : start + 128].view(2, 64).copy_(prompt)
        with torch.no_grad():
            expected = twins.untouched(latents, torch.ones(1), placed)
            assert bits_equal(twins.compiled(latents, torch.ones(1), placed), expected)


def test_the_precision_of_products_changed_between_calls() -> None:
    twins = Twins(Pooled())
    latents, prompt = torch.randn(2, 64), torch.randn(2, 64)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            twins.check(latents, torch.ones(1), prompt)
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_precision_of_products_by_its_new_names() -> None:
    """Asking by the old name raises then."""
    twins = Twins(Pooled())
    latents, prompt = torch.randn(2, 64), torch.randn(2, 64)
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        for precision in ("tf32", "ieee", "tf32"):
            products.fp32_precision = precision
            twins.check(latents, torch.ones(1), prompt)
    finally:
        products.fp32_precision = before
    assert twins.runs("request") == 2


def test_a_library_switched_off_between_calls() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(16, 16, 3, padding=1)

        def forward(
            self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
        ) -> torch.Tensor:
            return hidden_states * timestep + self.conv(encoder_hidden_states)

    twins = Twins(Convolved())
    latents, prompt = torch.randn(2, 16, 300), torch.randn(2, 16, 300)
    for enabled in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=enabled):
            twins.check(latents, torch.ones(()), prompt)
    assert twins.runs("request") == 2
