"""Whole steps of loops of one's own: what a step builds each time leaves the loop, and no number changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from random_graphs import bits_equal
from torch import Tensor, nn

from dithoist import DithoistWarning, compile_step, report, restore
from dithoist.models.small import Sizes, build_denoiser, example_calls

WIDTH, TOKENS, STEPS = 32, 6, 5


class Denoiser(nn.Module):
    """A prior branch, modulation by the timestep, masked attention."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = nn.Embedding(16, WIDTH)
        self.prior_projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", torch.linspace(0.1, 2.0, WIDTH))

    def forward(self, x: Any, t: Any, prior: Any, mask: Any) -> Any:
        scale, shift = self.modulation(torch.sin(t[:, None] * self.frequencies)).chunk(2, dim=-1)
        q, k, v = self.qkv((x + prior) * (1 + scale[:, None]) + shift[:, None]).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def schedule(intervals: torch.Tensor) -> torch.Tensor:
    """A warped schedule, as Ideogram 4's logit-normal one."""
    return torch.sigmoid(torch.logit(intervals.clamp(0.01, 0.99)) - 0.5)


def glm_like(denoiser: Denoiser) -> Callable[..., torch.Tensor]:
    """A forward that zeroes the prior's dropped rows out of place, at each step."""

    def step(latents: Any, timestep: Any, prior_token_id: Any, prior_token_drop: Any) -> Any:
        prior = denoiser.prior(prior_token_id).masked_fill(prior_token_drop.unsqueeze(-1), 0.0)
        return denoiser(latents, timestep, denoiser.prior_projector(prior), None)

    return step


def ideogram_like(denoiser: Denoiser) -> Callable[..., torch.Tensor]:
    """A step that reads its schedule on the host and builds both branches' masks and their metadata."""

    def metadata(valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = valid.sum(1)
        starts = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).int()
        return torch.nonzero(valid.flatten()).flatten(), starts

    def branch(latents: Any, t: Any, prior: Any, segments: Any) -> Any:
        mask = segments[:, None, :] == segments[:, :, None]
        rows, starts = metadata(segments > 0)
        packed = latents.flatten(0, 1)[rows] * starts[-1]
        out = denoiser(latents, t, prior, mask).flatten(0, 1)
        return out.index_add(0, rows, packed, alpha=0.01).view_as(latents)

    def step(z: Any, i: int, step_intervals: Any, guidance: Any, features: Any, segment_ids: Any) -> Any:
        now = schedule(step_intervals[i]).item()
        later = schedule(step_intervals[i + 1]).item()
        t = torch.full((z.shape[0],), now)
        conditional = branch(z, t, features, segment_ids)
        unconditional = branch(z, t, torch.zeros_like(features), (segment_ids > 1).int())
        velocity = unconditional + guidance[i] * (conditional - unconditional)
        return z + (later - now) * velocity

    return step


def glm_calls(seed: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    request = {"prior_token_id": torch.randint(16, (2, TOKENS)), "prior_token_drop": torch.rand(2, TOKENS) > 0.5}
    return [
        {"latents": torch.randn(2, TOKENS, WIDTH), "timestep": torch.full((2,), float(STEPS - k)), **request}
        for k in range(STEPS)
    ]


def ideogram_calls(seed: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    request = {
        "step_intervals": torch.linspace(1, 0, STEPS + 1),
        "guidance": torch.linspace(7, 3, STEPS),
        "features": torch.randn(2, TOKENS, WIDTH),
        "segment_ids": torch.randint(0, 3, (2, TOKENS)).clamp(max=2).index_fill(1, torch.tensor([0]), 2),
    }
    return [{"z": torch.randn(2, TOKENS, WIDTH), "i": k, **request} for k in range(STEPS)]


STEPS_OF = {"glm": (glm_like, glm_calls), "ideogram": (ideogram_like, ideogram_calls)}


def build(name: str, **options: Any) -> tuple[Callable[..., Any], Any, Callable[[int], list[dict[str, Any]]]]:
    torch.manual_seed(0)
    make, calls = STEPS_OF[name]
    step = make(Denoiser().eval())
    return step, compile_step(step, **{"backend": "eager", "strict": True} | options), calls


@pytest.mark.parametrize("name", STEPS_OF)
def test_every_step_has_the_bits_of_the_function(name: str) -> None:
    step, compiled, calls = build(name)
    for seed in (0, 1, 0):
        for call in calls(seed):
            with torch.no_grad():
                assert bits_equal(compiled(**call), step(**copy.deepcopy(call)))
    (denoiser,) = report(compiled).denoisers
    assert len(denoiser.graphs) == 1, "a step's index has no graph of its own"
    assert denoiser.fallbacks == []


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("glm", ["masked_fill", "embedding", "sin"]),
        ("ideogram", ["_local_scalar_dense", "nonzero", "cumsum", "sigmoid", "log", "sin", "eq.Tensor", "gt", "sum"]),
    ],
)
def test_the_body_holds_none_of_what_a_step_builds(name: str, gone: list[str]) -> None:
    _, compiled, calls = build(name)
    for call in calls(0):
        with torch.no_grad():
            compiled(**call)
    (graph,) = (next(iter(compiled.state.graphs)),)
    body = (graph.program.eager_body or graph.program.body).module
    targets = " ".join(str(n.target) for n in body.graph.nodes if n.op == "call_function")
    assert [word for word in gone if f"aten.{word}" in targets] == []
    report_of = report(compiled).denoisers[0].graphs[0]
    assert report_of.body_host_syncs == []


def test_a_negative_index_is_what_it_is_in_the_function() -> None:
    step, compiled, calls = build("ideogram")
    call = calls(0)[0]
    with torch.no_grad():
        for i in (0, 2, -2, 1):
            assert bits_equal(compiled(**call | {"i": i}), step(**call | {"i": i}))


def test_an_index_in_a_tensor_and_positional_arguments() -> None:
    step, compiled, calls = build("ideogram")
    for call in calls(0):
        with torch.no_grad():
            assert bits_equal(compiled(*(call | {"i": torch.tensor(call["i"])}).values()), step(*call.values()))
    assert len(report(compiled).denoisers[0].graphs) == 1


def test_restore_and_gradients_call_the_function_itself() -> None:
    step, compiled, calls = build("glm", strict=False)
    with pytest.warns(DithoistWarning, match="gradients are enabled"):
        compiled(**calls(0)[0])
    assert restore(compiled) is compiled
    with torch.no_grad():
        assert bits_equal(compiled(**calls(0)[0]), step(**calls(0)[0]))
    assert report(compiled).denoisers[0].graphs == []


def test_bad_steps_are_refused() -> None:
    with pytest.raises(TypeError, match="use compile_denoiser"):
        compile_step(Denoiser())
    with pytest.raises(TypeError, match="must be a function, not int"):
        compile_step(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'latents'"):
        compile_step(glm_like(Denoiser()), labels={"latent": "step"})


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS_OF)
def test_inductor_compiles_a_step(name: str) -> None:
    step, compiled, calls = build(name, backend="inductor")
    for call in calls(0):
        with torch.no_grad():
            torch.testing.assert_close(compiled(**call), step(**call), rtol=1e-4, atol=1e-4)
    (denoiser,) = report(compiled).denoisers
    assert denoiser.fallbacks == []


def with_breaks_in_a_loop(x: Tensor, t: Tensor) -> Tensor:
    for _ in range(2):
        x = x * t
        print(end="")
        x = x + t
    return x


def with_a_quotient_and_its_rest(x: Tensor, i: int) -> Tensor:
    group, place = divmod(i, 3)
    return x * group + place


@pytest.mark.parametrize("step", [with_breaks_in_a_loop, with_a_quotient_and_its_rest])
def test_a_step_that_dynamo_gives_up_runs_as_it_was(step: Any) -> None:
    compiled = compile_step(step, backend="eager")
    x = torch.randn(2, 3)
    numbers = (2, 5, 7) if step is with_a_quotient_and_its_rest else torch.tensor([2.0, 5.0, 7.0])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DithoistWarning, message=".*Dynamo compiled nothing")
        for number in numbers:
            assert torch.equal(compiled(x, number), step(x, number))


def test_a_loop_around_a_denoiser_that_breaks_has_the_bits_of_the_step() -> None:
    module = build_denoiser("lumina-2")
    calls = example_calls("lumina-2", module, Sizes(), steps=2)

    def step(call: dict[str, Any], guidance: float) -> Tensor:
        results = []
        for scale in (1.0, 0.5):
            print(end="")
            results.append(module(**call)[0] * scale)
        return results[1] + guidance * (results[0] - results[1])

    compiled = compile_step(step, backend="eager")
    with torch.no_grad():
        for call in calls:
            assert torch.equal(compiled(call, 3.0), step(call, 3.0))


TABLE = [1.0, 0.7, 0.4]
USES_OF_AN_INDEX = {
    "an element of a list": lambda x, i: x * TABLE[i],
    "an element of an array": lambda x, i: x * float(np.array(TABLE)[i]),
    "odd or even": lambda x, i: x if i % 2 else x * 2,
    "a part of a tensor": lambda x, i: x.unbind(0)[i] + 1,
    "in a condition": lambda x, i: x * (i and 3),
}


@pytest.mark.parametrize("use", USES_OF_AN_INDEX)
def test_an_index_may_be_used_as_any_number(use: str) -> None:
    """Where it cannot be left unknown, each has a graph."""
    function = USES_OF_AN_INDEX[use]
    compiled = compile_step(function, backend="eager", strict=True)
    with torch.no_grad():
        for i in (0, 2, 1, 0, 2):
            x = torch.randn(3, 2)
            assert torch.equal(compiled(x, i), function(x, i))
    (found,) = report(compiled).denoisers
    assert found.fallbacks == []
    with torch.no_grad(), pytest.raises(IndexError):
        compile_step(USES_OF_AN_INDEX["a part of a tensor"], backend="eager")(torch.randn(3, 2), 3)


DECISIONS: dict[str, Any] = {
    "a scale, if there is one": lambda x, t: x * t.item() if t.item() else x,
    "a count or one": lambda x, t: x + (int((x > t).sum()) or 1),
    "lengths that are not 0": lambda x, t: x + sum(n * t for n in (x > t).sum(1).tolist() if n),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_the_host_may_decide_by_a_number_it_reads(name: str) -> None:
    """What a graph without host reads cannot, so that the number is read, as any ``torch.compile`` reads it."""
    step = DECISIONS[name]
    compiled = compile_step(step, backend="eager", strict=True)
    with torch.no_grad():
        for t in (2.0, 0.0, 0.5, 0.0):
            x = torch.randn(3, 4)
            assert torch.equal(compiled(x, torch.tensor(t)), step(x, torch.tensor(t)))
    (found,) = report(compiled).denoisers
    assert found.fallbacks == []
