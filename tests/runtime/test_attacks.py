"""Ways to break the promise that somebody found, each kept as a test."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_graphs import bits_equal
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from twins import TinyDit, Twins, tiny_inputs

from dithoist import DithoistWarning, compile_denoiser, compile_pipeline, report, restore
from dithoist.models.small import build_pipeline, example_call
from dithoist.runtime.cache import MAX_ENTRIES, HeldValues

GENERATIONS: dict[str, list[list[float]]] = {
    "the same single step": [[3.0], [3.0], [3.0]],
    "stopped after one step": [[3.0, 2.0, 1.0], [3.0], [3.0, 2.0]],
    "another schedule": [[9.0, 6.0, 3.0], [8.0, 5.0], [7.0]],
    "one step, then another schedule": [[9.0, 6.0], [7.0], [8.0, 5.0]],
}


@pytest.mark.parametrize("generations", GENERATIONS.values(), ids=GENERATIONS.keys())
def test_weights_written_through_data_between_generations(generations: list[list[float]]) -> None:
    twins = Twins(TinyDit())
    for steps in generations:
        for step in steps:
            twins.check(**tiny_inputs(0, step))
        with torch.no_grad():
            twins.both(lambda m: (m.text_proj.weight.data.add_(0.5), m.modulation.weight.data.neg_()))


def test_weights_written_through_data_in_a_model_without_timesteps() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            return x + self.proj(prompt)

    twins = Twins(Model())
    for _ in range(3):
        twins.check(torch.ones(3), torch.ones(3))
        twins.both(lambda m: m.proj.weight.data.neg_())


def test_weights_made_in_inference_mode_have_no_version_counter() -> None:
    with torch.inference_mode():
        twins = Twins(TinyDit())
        for step in (3.0, 2.0, 1.0):
            twins.check(**tiny_inputs(0, step))
            twins.both(lambda m: m.text_proj.weight.mul_(2))
            twins.both(lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}))


def test_a_large_expanded_prompt() -> None:
    twins = Twins(TinyDit(512))
    prompt = torch.randn(1, 3, 512).expand(2, -1, -1)
    for step in (2.0, 1.0):
        twins.check(**tiny_inputs(0, step) | {"hidden_states": torch.randn(2, 4, 512), "encoder_hidden_states": prompt})
    assert twins.runs("request") == 1


@pytest.mark.parametrize(
    "value",
    [lambda c: nn.Parameter(c.real.clone()), lambda c: c.conj(), lambda c: c.conj().imag],
    ids=["parameter", "conj", "neg"],
)
def test_other_kinds_of_tensors_are_compared_by_their_bits_too(value: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            return x + timestep + (prompt * prompt).abs().sum()

    twins = Twins(Model())
    memory = torch.randn(4, dtype=torch.complex64)
    prompt = value(memory)
    for step in (3.0, 2.0, 1.0):
        expected = twins.untouched(torch.ones(4), torch.tensor(step), prompt)
        with torch.no_grad():
            assert torch.equal(twins.compiled(torch.ones(4), torch.tensor(step), prompt), expected)
        prompt.data.view(-1)[0] += 1


def test_a_literal_number_written_to_masked_rows_is_staged() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, timestep: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = x * timestep
            y[mask] = 0.5
            return torch.where(mask.unsqueeze(-1), 2.0, y + 1)

    twins = Twins(Model())
    for step in (2.0, 1.0):
        twins.check(torch.randn(2, 3, 8), torch.tensor(step), torch.tensor([[True, False, True]] * 2))
    (graph,) = twins.report.graphs
    assert graph.body_host_syncs == []
    assert twins.report.fallbacks == []


class Outputs(nn.Module):
    def forward(self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor, w: torch.Tensor) -> Any:
        e = prompt.exp()
        return e, e.view(-1), e[:1].expand(4, -1), x @ w, x @ w, x.transpose(0, 1).reshape(-1), timestep


def test_outputs_share_memory_where_the_models_did_and_nowhere_else() -> None:
    twins = Twins(Outputs())
    arguments = (torch.randn(2, 3, 3), torch.ones(1), torch.randn(2, 3), torch.randn(3, 3))
    expected, actual = twins.untouched(*arguments), twins.check(*arguments)

    def sharing(outputs: Any) -> list[list[bool]]:
        pointers = [o.untyped_storage().data_ptr() for o in outputs]
        return [[p == q for q in pointers] for p in pointers]

    assert sharing(actual) == sharing(expected)
    assert [o.stride() for o in actual] == [o.stride() for o in expected]


def test_an_error_in_the_body_leaves_the_random_state_as_the_model_would() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            return torch.rand(3) + self.table(x) + timestep

    twins = Twins(Model())
    twins.check(torch.tensor([1]), torch.ones(1))
    states = []
    for module in (twins.untouched, twins.compiled):
        torch.manual_seed(5)
        with torch.no_grad(), pytest.raises(IndexError):
            module(torch.tensor([9]), torch.ones(1))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_hooks_put_on_a_submodule_after_the_first_call_are_called() -> None:
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs())
    twins.both(lambda m: m.text_proj.register_forward_hook(lambda module, args, output: output * 2))
    twins.check(**tiny_inputs())
    twins.both(lambda m: m.body.register_forward_pre_hook(lambda module, args: (args[0] + 1,)))
    twins.check(**tiny_inputs())


def test_global_hooks_are_called_by_running_untouched() -> None:
    module = TinyDit().eval()
    expected = copy.deepcopy(module)
    compile_denoiser(module, backend="eager")
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    try:
        with torch.no_grad(), pytest.warns(DithoistWarning, match="global module hook"):
            actual = module(**tiny_inputs())
        with torch.no_grad():
            assert torch.equal(actual, expected(**tiny_inputs()))
    finally:
        handle.remove()


def test_private_copies_of_inputs_count_and_keep_to_the_bound() -> None:
    for limit in (0, 20_000):
        twins = Twins(TinyDit(512), max_cached_bytes=limit)
        for seed in range(4):
            inputs = {"hidden_states": torch.randn(2, 4, 512), "encoder_hidden_states": torch.randn(2, 3, 512)}
            for step in (2.0, 1.0):
                twins.check(**tiny_inputs(seed, step) | inputs)
        assert twins.report.bytes_held <= limit


def test_small_entries_are_bounded_in_number() -> None:
    held = HeldValues(10**9)
    for i in range(MAX_ENTRIES + 10):
        held.put(i, (torch.zeros(1),))
    assert len(held) == MAX_ENTRIES
    assert held.get(0) is None


def test_the_hash_of_a_weight_sees_rows_that_changed_places() -> None:
    from dithoist.runtime.identity import _contents

    eye = torch.eye(2048)
    swapped = eye.clone()
    swapped[[0, 2]] = eye[[2, 0]]
    assert _contents([eye]) != _contents([swapped])
    assert _contents([eye]) == _contents([eye.clone()])
    # Small whole numbers differ in a word's highest bits alone.
    numbers = torch.arange(3500.0).remainder(251)
    moved = numbers.clone()
    moved[5], moved[371] = numbers[371], numbers[5]
    assert _contents([numbers]) != _contents([moved])


def test_a_data_dependent_size_does_not_break_the_report() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, timestep: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x[x[:, 0] > 0] @ w + timestep

    twins = Twins(Model())
    twins.check(torch.randn(5, 3), torch.ones(1), torch.randn(3, 3))
    assert "aten.index.Tensor" in str(report(twins.compiled))


def test_a_dropped_module_keeps_nothing_alive() -> None:
    module = TinyDit().eval()
    compile_denoiser(module, backend="eager")
    with torch.no_grad():
        module(**tiny_inputs())
    weights = [weakref.ref(p) for p in (*module.parameters(), *module.buffers())]
    held = module._compiled_call_impl.state.held
    assert held.bytes > 0
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert [w() for w in weights] == [None] * len(weights)
    assert held.bytes == 0


def test_restore_leaves_no_attribute_behind() -> None:
    module = TinyDit()
    before = dict(vars(module))
    restore(compile_denoiser(module, backend="eager"))
    assert vars(module) == before


def test_a_model_that_calls_itself_otherwise() -> None:
    class Model(nn.Module):
        def __init__(this) -> None:
            super().__init__()
            this.proj = nn.Linear(3, 3)

        def forward(this, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            return x + timestep + this.proj(prompt)

    twins = Twins(Model())
    twins.check(torch.ones(3), torch.ones(1), torch.ones(3))
    assert set(twins.report.graphs[0].inputs) == {"x", "timestep", "prompt"}


def test_tracers_see_the_untouched_module() -> None:
    module = TinyDit().eval()
    compile_denoiser(module, backend="eager", strict=True)
    inputs = tuple(tiny_inputs().values())
    with torch.no_grad():
        expected = module(*inputs)
        assert torch.equal(torch.jit.trace(module, inputs)(*inputs), expected)
        assert torch.equal(make_fx(lambda *a: module(*a))(*inputs)(*inputs), expected)


def test_a_capture_that_fails_behind_a_graph_break_is_not_made_twice() -> None:
    class Model(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            torch._dynamo.graph_break()
            self.calls += 1
            return x @ prompt

    module = Model().eval()
    compile_denoiser(module, backend="eager")
    x = torch.zeros(2, 3)
    with torch.no_grad(), pytest.warns(DithoistWarning, match="behind a graph break"), pytest.raises(RuntimeError):
        module(x, torch.ones(1), torch.ones(7, 7))
    assert torch.equal(x, torch.ones(2, 3))
    with torch.no_grad():
        assert torch.equal(module(x, torch.ones(1), torch.ones(3, 3)), torch.full((2, 3), 6.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strict": "no"}, "strict='no' must be True or False"),
        ({"max_cached_bytes": 1.5}, "whole number of bytes"),
        ({"max_cached_bytes": "1GB"}, "whole number of bytes"),
        ({"max_cached_bytes": True}, "whole number of bytes"),
        ({"dynamic": "yes"}, "dynamic='yes' must be"),
        ({"labels": "timestep"}, "labels must map"),
        ({"labels": {"timestep": ["step"]}}, "is no binding time"),
    ],
)
def test_options_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        compile_denoiser(TinyDit(), **options)


def test_a_dump_folder_that_cannot_be_written_disables_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DITHOIST_DUMP", str(tmp_path / "file" / "below"))
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs())
    assert len(twins.report.graphs) == 1


class _Reads(nn.Module):
    """A denoiser whose forward is a function of the latents, the timestep, the prompt and a mask."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.function = function

    def forward(self, hidden_states: Any, timestep: Any, prompt: Any, mask: Any = None) -> Any:
        return self.function(self.project, hidden_states, timestep, prompt, mask)


def _fill(x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[mask] = value
    return x


def _joined(x: torch.Tensor, change: Any) -> torch.Tensor:
    a, b = change(x).chunk(2, 1)
    return torch.cat([change(a), change(b)], 1)


COMPLEX = torch.randn(2, 4, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
REAL = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
BYTES = torch.arange(64, dtype=torch.uint8).view(2, 4, 8)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda p, x, t, c, m: _joined(x * t, torch.conj) + p(c).sum(), COMPLEX),
        (lambda p, x, t, c, m: _joined(x * t, torch._neg_view) + p(c).sum(), REAL),
        (lambda p, x, t, c, m: torch.view_as_real((x * t).conj().resolve_conj()) + p(c).sum(), COMPLEX),
        (lambda p, x, t, c, m: (_fill(x * t, m, -0.0), p(c).sum()), COMPLEX),
        (lambda p, x, t, c, m: (torch.where(m[..., None], -0.0, x * t), p(c).sum()), COMPLEX),
        (lambda p, x, t, c, m: torch.cat([(y := x * t)[:, :2], y[:, 2:], torch.empty(0)], 1) + p(c).sum(), REAL),
        (lambda p, x, t, c, m: torch.where(m[..., None], torch.tensor(1e300, dtype=torch.float64), x) * t, REAL),
        (lambda p, x, t, c, m: (torch.where(m[..., None], torch.tensor(300), x), p(c).sum() * t), BYTES),
    ],
    ids=["conj of conj", "neg of neg", "resolved", "complex -0.0", "where -0.0", "empty piece", "overflow", "wraps"],
)
def test_copies_and_fills_of_odd_tensors(function: Any, x: torch.Tensor) -> None:
    twins = Twins(_Reads(function))
    mask = torch.tensor([[True, False, True, False]] * 2)
    for step in (2.0, 1.0):
        twins.check(x, torch.tensor(step), torch.ones(3, 8), mask)


def test_masks_of_dynamic_lengths_are_filled_in_place() -> None:
    def attention(project: Any, x: Any, time: Any, prompt: Any, mask: Any) -> Any:
        keys = project(prompt)
        return ((x @ keys.mT) * time).masked_fill(mask[:, None], float("-inf")).softmax(-1) @ keys

    twins = Twins(_Reads(attention))
    for length in (4, 5, 6):
        mask = torch.arange(length).expand(2, length) > 2
        twins.check(REAL, torch.tensor(1.0), torch.randn(2, length, 8), mask)
    assert twins.report.fallbacks == []


def test_a_product_with_a_dynamic_size_or_a_python_timestep() -> None:
    twins = Twins(_Reads(lambda p, x, t, c, m: x * x.shape[1] * t + p(c).sum()))
    for tokens, time in ((4, 999), (5, 800), (6, 600)):
        twins.check(torch.randn(2, tokens, 8), time, torch.ones(3, 8))


def test_an_argument_called_a_weight_is_compared_by_its_bits() -> None:
    twins = Twins(_Reads(lambda p, x, t, c, m: x + p(c).sum() * t), labels={"prompt": "model"})
    prompt = torch.randn(3, 8)
    for step in (3.0, 2.0, 1.0):
        twins.check(REAL, torch.tensor(step), prompt)
        prompt.numpy()[:] += 1


def test_pipelines_that_share_a_denoiser() -> None:
    """One-step pictures with falling sigmas look like one generation; each pipeline's scheduler says they are not."""
    untouched = build_pipeline("flux")
    compiled = copy.deepcopy(untouched)
    compile_pipeline(compiled, backend="eager", strict=True)
    others = [type(p)(**p.components | {"scheduler": copy.deepcopy(p.scheduler)}) for p in (untouched, compiled)]
    compile_pipeline(others[1], backend="eager", strict=True)

    def check(pipes: list[Any], sigma: float) -> None:
        expected, actual = (p(**example_call("flux", prompt="cat", steps=1), sigmas=[sigma]).images for p in pipes)
        assert bits_equal(actual, expected)
        for pipe in (untouched, compiled):
            pipe.transformer.context_embedder.weight.data.mul_(1.5)  # As fusing LoRA does.

    for sigma in (0.9, 0.7, 0.5):
        check(others, sigma)
        check([untouched, compiled], sigma)
