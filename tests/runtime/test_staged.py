"""When held values may be used again: every trap has a test, and every test asks for the untouched bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import TinyDit, Twins, tiny_inputs

from dithoist.models.small import as_dtype


def with_prompt(prompt: torch.Tensor, step: float, seed: int = 0) -> dict[str, torch.Tensor]:
    return tiny_inputs(seed, step) | {"encoder_hidden_states": prompt}


def test_a_loop_runs_request_work_once_and_schedule_work_once_a_step() -> None:
    twins = Twins(TinyDit())
    for generation in range(3):
        for step in (3.0, 2.0, 1.0):
            twins.check(**tiny_inputs(seed=generation % 2, step=step))
    assert twins.runs("request") == 2
    assert twins.runs("schedule") == 3
    assert twins.runs("step") == 9
    assert len(twins.report.graphs) == 1


def test_two_guidance_branches_alternate_and_share_the_schedule_rows() -> None:
    twins = Twins(TinyDit())
    for step in (3.0, 2.0, 1.0):
        for branch in (0, 1):
            twins.check(**tiny_inputs(seed=branch, step=step))
    assert twins.runs("request") == 2
    assert twins.runs("schedule") == 3


EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda t: t.mul_(2),
    "through .data, which has a version counter of its own": lambda t: t.data.mul_(2),
    "through NumPy, which leaves no trace on the tensor": lambda t: t.numpy().__imul__(2),
    "through another view of the memory": lambda t: t.detach().view(-1)[0].fill_(9),
    "the sign of a zero": lambda t: t.numpy().__imul__(-1),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("width", [8, 512], ids=["small", "large"])
def test_a_prompt_edited_in_mid_loop(edit: Callable[[torch.Tensor], object], width: int) -> None:
    twins = Twins(TinyDit(width))
    prompt = torch.zeros(2, 3, width) if "zero" in str(edit) else torch.randn(2, 3, width)
    for step in (4.0, 3.0, 2.0, 1.0):
        inputs = tiny_inputs(0, step) | {"hidden_states": torch.randn(2, 4, width)}
        twins.check(**inputs | {"encoder_hidden_states": prompt})
        if step == 3.0:
            edit(prompt)
    assert twins.runs("request") == 2


def test_a_prompt_replaced_in_mid_loop() -> None:
    twins = Twins(TinyDit())
    first, second = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    for step, prompt in ((3.0, first), (2.0, second), (1.0, first)):
        twins.check(**with_prompt(prompt, step))
    assert twins.runs("request") == 2


def test_an_equal_prompt_in_a_new_object_at_each_step_is_recognised() -> None:
    twins = Twins(TinyDit(512))
    prompt = torch.randn(2, 3, 512)
    for step in range(8):
        inputs = tiny_inputs(0, float(step)) | {"hidden_states": torch.randn(2, 4, 512)}
        twins.check(**inputs | {"encoder_hidden_states": prompt.clone()})
    assert twins.runs("request") == 1
    assert twins.report.graphs[0].demoted == []


def test_a_request_input_that_changes_at_each_step_is_demoted_and_the_report_says_so() -> None:
    twins = Twins(TinyDit())
    for step in range(12):
        twins.check(**with_prompt(torch.randn(2, 3, 8), float(step)))
    (graph,) = twins.report.graphs
    assert graph.demoted == ["encoder_hidden_states"]
    assert graph.inputs["encoder_hidden_states"] == "step"
    assert graph.inputs["mask"] == "request"
    assert "schedule" in graph.by_time


class Stateful(nn.Module):
    """Keeps a tensor of its own that is another at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(3)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return x + self.state.exp() * timestep


def test_a_tensor_of_the_model_that_changes_at_each_step_is_demoted() -> None:
    twins = Twins(Stateful())
    for step in range(12):
        twins.check(torch.randn(3), torch.tensor([float(step)]))
        value = torch.randn(3)
        twins.both(lambda m, value=value: setattr(m, "state", value.clone()))
    (graph,) = twins.report.graphs
    assert graph.demoted == ["state"]


class Scaled(nn.Linear):
    """With a number that is no tensor, as LoRA layers and IP-adapters have."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_a_number_of_the_model_that_is_changed_between_generations() -> None:
    """Once it has changed, Dynamo passes it as a tensor, which it makes anew for each call."""
    module = TinyDit()
    module.text_proj = Scaled(8, 8)
    twins = Twins(module)
    for scale in (1.0, 0.3, 0.7):
        twins.both(lambda m, scale=scale: setattr(m.text_proj, "scale", scale))
        for step in range(8):
            twins.check(**tiny_inputs(step=step))
    assert (twins.runs("request"), twins.runs("schedule")) == (3, 16)  # The second graph has rows of its own.
    assert not any(graph.demoted for graph in twins.report.graphs)


def test_many_one_step_generations_demote_nothing() -> None:
    twins = Twins(TinyDit())
    for seed in range(12):
        twins.check(**tiny_inputs(seed, 1.0))
    assert twins.report.graphs[0].demoted == []


def test_inference_tensors_have_no_version_counter() -> None:
    twins = Twins(TinyDit())
    with torch.inference_mode():
        prompt = torch.randn(2, 3, 8)
        for step in (3.0, 2.0, 1.0):
            twins.check(**with_prompt(prompt, step))
            prompt.mul_(1.5)
    assert twins.runs("request") == 3


WEIGHT_EDITS: dict[str, Callable[[TinyDit], object]] = {
    "in place": lambda m: m.text_proj.weight.mul_(2),
    "schedule weight in place": lambda m: m.modulation.weight.mul_(2),
    "buffer in place": lambda m: m.frequencies.mul_(2),
    "new parameter": lambda m: setattr(m.text_proj, "weight", nn.Parameter(m.text_proj.weight * 2)),
    "storage replaced through .data": lambda m: setattr(m.text_proj.weight, "data", m.text_proj.weight.data * 2),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "load_state_dict, assign": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "body weight only": lambda m: m.body.weight.mul_(2),
}


@pytest.mark.parametrize("edit", WEIGHT_EDITS.values(), ids=WEIGHT_EDITS.keys())
def test_weights_changed_in_mid_loop(edit: Callable[[TinyDit], object]) -> None:
    twins = Twins(TinyDit())
    for step in (3.0, 2.0, 1.0):
        twins.check(**tiny_inputs(0, step))
        if step == 2.0:
            with torch.no_grad():
                twins.both(edit)


def test_weights_written_through_data_are_seen_at_the_next_generation() -> None:
    """LoRA fusing does this (``weight.data += delta``): no version counter and no pointer moves."""
    twins = Twins(TinyDit())
    for generation in range(3):
        for step in (3.0, 2.0, 1.0):
            twins.check(**tiny_inputs(0, step))
        with torch.no_grad():
            twins.both(lambda m: m.text_proj.weight.data.add_(0.5))
            if generation:
                twins.both(lambda m: m.modulation.weight.data.neg_())


def test_a_changed_dtype_is_another_graph() -> None:
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs(0, 1.0))
    twins.both(lambda m: m.to(torch.bfloat16))
    twins.check(**as_dtype(tiny_inputs(0, 1.0), torch.bfloat16))


def test_other_sizes_are_other_graphs_and_going_back_recompiles_nothing() -> None:
    twins = Twins(TinyDit(), dynamic=False)
    for tokens in (4, 6, 4, 6):
        twins.check(**tiny_inputs(0, 1.0, tokens=tokens))
    assert len(twins.report.graphs) == 2
    assert twins.report.recompiles == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_dynamic_sizes(dynamic: bool | None) -> None:
    twins = Twins(TinyDit(), dynamic=dynamic)
    for seed, tokens, text in ((0, 4, 3), (1, 6, 2), (2, 5, 3), (0, 7, 2), (0, 4, 3)):
        for step in (2.0, 1.0):
            twins.check(**tiny_inputs(seed, step, tokens=tokens, text=text))
    assert len(twins.report.graphs) <= 3


class Aliasing(nn.Module):
    """Returns an input, views of inputs, and values known before the loop."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> Any:
        cached = prompt.exp()
        row = timestep * 2
        return x + cached, prompt, prompt.view(-1), cached, cached.view(-1)[1:], row, x, cached


def test_outputs_that_are_inputs_or_held_values_may_be_written_by_the_caller() -> None:
    twins = Twins(Aliasing())
    prompt = torch.randn(2, 3)
    for step in range(3):
        outputs = twins.check(torch.randn(2, 3), torch.tensor([float(step)]), prompt)
        assert outputs[1].data_ptr() == prompt.data_ptr()
        for output in (outputs[0], *outputs[3:6]):
            output.fill_(7.0)


class Writing(nn.Module):
    """Writes its inputs, and a buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        timestep -= 1
        prompt.mul_(0.5)
        self.calls += 1
        return x * timestep.sin() + prompt.exp() + self.calls


def test_models_that_write_their_inputs_and_buffers() -> None:
    twins = Twins(Writing())
    prompts = [torch.ones(3), torch.ones(3)]
    for step in range(4):
        steps = [torch.full((1,), float(step)) for _ in range(2)]
        x = torch.randn(3)
        with torch.no_grad():
            expected = twins.untouched(x, steps[0], prompts[0])
            actual = twins.compiled(x, steps[1], prompts[1])
        assert torch.equal(actual, expected)
        assert torch.equal(steps[0], steps[1])
        assert torch.equal(prompts[0], prompts[1])
    assert twins.compiled.calls == twins.untouched.calls == 4


class Noisy(nn.Module):
    """Draws noise inside forward, some of it from nothing but a request input."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(prompt) * prompt.exp() + torch.randn(3) + timestep


def test_random_draws_stay_in_the_body_in_their_order() -> None:
    twins = Twins(Noisy())
    prompt = torch.randn(3)
    results = [twins.check(torch.zeros(3), torch.tensor([1.0]), prompt) for _ in range(3)]
    assert not torch.equal(results[0], results[1])


def test_one_tensor_in_two_roles() -> None:
    twins = Twins(TinyDit())
    for step in range(3):
        shared = torch.randn(2, 4, 8)
        twins.check(shared, torch.full((2,), float(step)), shared)


def test_nan_and_infinity_pass_through_as_they_are() -> None:
    twins = Twins(TinyDit())
    for name in ("hidden_states", "encoder_hidden_states", "timestep"):
        for value in (float("nan"), float("inf"), -float("inf")):
            inputs = tiny_inputs(0, 1.0)
            inputs[name].view(-1)[0] = value
            twins.check(**inputs)
            twins.check(**inputs)


def test_latents_labelled_as_anything_else_cost_speed_and_no_number() -> None:
    for label in ("request", "schedule"):
        twins = Twins(TinyDit(), labels={"hidden_states": label, "encoder_hidden_states": "step"})
        for step in range(8):
            twins.check(**tiny_inputs(0, float(step)))


@pytest.mark.parametrize("limit", [0, 100, 10**9])
def test_a_small_bound_on_held_bytes_is_kept(limit: int) -> None:
    twins = Twins(TinyDit(), max_cached_bytes=limit)
    for step in range(6):
        for seed in (0, 1):
            twins.check(**tiny_inputs(seed, float(step)))
    held = twins.compiled._compiled_call_impl.state.held
    assert held.bytes <= limit
    assert (held.evictions == 0) == (limit == 10**9)
