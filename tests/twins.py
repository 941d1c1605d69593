"""A small denoiser and its untouched twin, for tests that ask for the same bits whatever happens."""

from __future__ import annotations

import copy
from typing import Any

import torch
from random_graphs import bits_equal
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from dithoist import compile_denoiser, report
from dithoist.runtime.report import DenoiserReport


class TinyDit(nn.Module):
    """Text projection (request), modulation (schedule), a masked prior (request), and a body."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.text_proj = nn.Linear(width, width)
        self.modulation = nn.Linear(width, 2 * width)
        self.body = nn.Linear(width, width)
        self.register_buffer("frequencies", torch.linspace(0.1, 2.0, width))

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        scale, shift = self.modulation(torch.sin(timestep[:, None] * self.frequencies)).chunk(2, dim=-1)
        text = self.text_proj(encoder_hidden_states)
        if mask is not None:
            text = text.masked_fill(mask.unsqueeze(-1), 0.0)
        hidden_states = hidden_states * (1 + scale[:, None]) + shift[:, None] + text.mean(1, keepdim=True)
        return self.body(hidden_states)


class Twins:
    """A compiled module and a copy of it that stays as it was."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        torch.manual_seed(0)
        self.untouched = module.eval()
        self.compiled = copy.deepcopy(module)
        compile_denoiser(self.compiled, backend="eager", **({"strict": True} | options))

    def check(self, *args: Any, **kwargs: Any) -> Any:
        """Call both with equal arguments and equal random state; the results must have the same bits, and so must
        the tensors that the arguments hold afterwards."""
        copied = copy.deepcopy((args, kwargs))
        with torch.no_grad():
            state = torch.get_rng_state()
            expected = self.untouched(*copied[0], **copied[1])
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            actual = self.compiled(*args, **kwargs)
            assert torch.equal(torch.get_rng_state(), after), "drew another number of random values"
        _assert_same(actual, expected)
        _assert_same(tensors((args, kwargs)), tensors(copied))
        return actual

    def both(self, change: Any) -> None:
        """Apply ``change(module)`` to both."""
        change(self.untouched)
        change(self.compiled)

    @property
    def report(self) -> DenoiserReport:
        return report(self.compiled).denoisers[0]

    def runs(self, time: str) -> int:
        """How often the stage of a binding time ran, over all graphs."""
        return sum(g.by_time[time].runs for g in self.report.graphs if time in g.by_time)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _assert_same(actual: Any, expected: Any) -> None:
    (actual_leaves, actual_form), (expected_leaves, expected_form) = tree_flatten(actual), tree_flatten(expected)
    assert actual_form == expected_form
    for a, e in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(e, torch.Tensor):
            assert bits_equal(a, e), f"{a} is not {e}"
        else:
            assert a == e


def tiny_inputs(seed: int = 0, step: float = 1.0, *, tokens: int = 4, text: int = 3) -> dict[str, torch.Tensor]:
    """Arguments for :class:`TinyDit`: latents by seed and step, text by seed, timestep by step."""
    latents = torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(1000 * seed + int(step)))
    prompt = torch.randn(2, text, 8, generator=torch.Generator().manual_seed(seed))
    return {
        "hidden_states": latents,
        "timestep": torch.full((2,), step),
        "encoder_hidden_states": prompt,
        "mask": torch.tensor([[False, True, False]] * 2)[:, :text],
    }


WIDTH = 256
"""Of a denoiser whose weights fill pages: they can be released."""


class WideDit(TinyDit):
    """Wide enough that its weights are released."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


def wide_inputs(seed: int = 0, step: float = 1.0) -> dict[str, torch.Tensor]:
    """Arguments for :class:`WideDit`, as those for :class:`TinyDit`."""
    found = tiny_inputs(seed, step)
    return {k: v.repeat(1, 1, WIDTH // 8) if v.ndim == 3 else v for k, v in found.items()}


def mapped(weight: torch.Tensor) -> bool:
    """Whether the weight lies in a mapped file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, *_, path = [*line.split(maxsplit=5), ""][:6]
            start, stop = (int(n, 16) for n in place.split("-"))
            if start <= weight.data_ptr() < stop:
                return "dithoist-" in path or "(deleted)" in line
    raise AssertionError("the weight lies nowhere")


def same_bytes(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return list(x) == list(y) and all(torch.equal(x[k], y[k]) for k in x)


def answer_of_a_worker(module: nn.Module, answers: Any) -> None:
    """For another process, which imports this file: whether ``module`` is compiled there, and what it gives."""
    torch.set_num_threads(1)
    with torch.no_grad():
        made = module(**wide_inputs(3))
    answers.put((module._compiled_call_impl is not None, made.numpy()))
