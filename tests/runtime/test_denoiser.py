"""``compile_denoiser``: in place, reversible, never in the way, and clear about bad input."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from twins import TinyDit, Twins, tiny_inputs

import dithoist
from dithoist import DithoistWarning, compile_denoiser, report, restore
from dithoist.runtime import table


def test_the_module_stays_what_it_was_and_restore_undoes_it() -> None:
    module = TinyDit().eval()
    before = dict(module.__dict__)
    keys = list(module.state_dict())
    assert compile_denoiser(module, backend="eager") is module
    assert isinstance(module, TinyDit)
    assert list(module.state_dict()) == keys
    with torch.no_grad():
        module(**tiny_inputs())
    assert restore(module) is module
    assert module._compiled_call_impl is None
    assert {k: v for k, v in module.__dict__.items() if k != "_compiled_call_impl"} == before
    with pytest.raises(ValueError, match="was not compiled"):
        restore(module)


def test_a_previous_compile_of_the_users_comes_back() -> None:
    module = TinyDit().eval()
    module.compile(backend="eager")
    theirs = module._compiled_call_impl
    compile_denoiser(module, backend="eager")
    restore(module)
    assert module._compiled_call_impl is theirs


def test_compiling_twice_keeps_what_is_held_and_new_options_take_effect() -> None:
    module = TinyDit().eval()
    compile_denoiser(module, backend="eager")
    with torch.no_grad():
        module(**tiny_inputs())
    compile_denoiser(module, backend="eager")
    assert report(module).denoisers[0].bytes_held > 0
    compile_denoiser(module, backend="eager", max_cached_bytes=0)
    assert report(module).denoisers[0].graphs == []
    restore(module)
    assert module._compiled_call_impl is None


def test_copies_and_pickles_are_untouched_modules() -> None:
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs())
    for other in (copy.deepcopy(twins.compiled), pickle.loads(pickle.dumps(twins.compiled))):
        assert other._compiled_call_impl is None
        with torch.no_grad():
            assert torch.equal(other(**tiny_inputs()), twins.untouched(**tiny_inputs()))


def test_training_mode_and_gradients_run_uncompiled_with_one_warning() -> None:
    module = TinyDit()
    compile_denoiser(module.eval(), backend="eager")
    with pytest.warns(DithoistWarning, match="gradients are enabled"):
        module(**tiny_inputs()).sum().backward()
    module(**tiny_inputs())  # A second warning would fail this test.
    assert module.body.weight.grad is not None
    module.train()
    with torch.no_grad(), pytest.warns(DithoistWarning, match="training mode"):
        module(**tiny_inputs())
    found = report(module).denoisers[0]
    assert found.graphs == []
    assert len(found.fallbacks) == 2


def test_one_variable_turns_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITHOIST_DISABLE", "1")
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs())
    assert twins.report.graphs == []
    monkeypatch.setenv("DITHOIST_DISABLE", "0")
    twins.check(**tiny_inputs())
    assert len(twins.report.graphs) == 1


def test_the_force_eager_stance_is_honoured() -> None:
    twins = Twins(TinyDit())
    with torch.compiler.set_stance("force_eager"):
        twins.check(**tiny_inputs())
    assert twins.report.graphs == []


def test_any_back_end_of_torch_compile_is_taken() -> None:
    seen = []

    def mine(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        seen.append(len(examples))
        return gm.forward

    for backend in (mine, "aot_eager"):
        module = TinyDit().eval()
        compile_denoiser(module, backend=backend, strict=True)
        with torch.no_grad():
            assert torch.equal(module(**tiny_inputs()), copy.deepcopy(module)(**tiny_inputs()))
    assert seen == [6]  # Inputs of the body.


def test_torch_compile_finds_us_by_name() -> None:
    assert "dithoist" in torch.compiler.list_backends(exclude_tags=())
    module = TinyDit().eval()
    compiled = torch.compile(module, backend="dithoist", options={"backend": "eager"})
    with torch.no_grad():
        for step in (2.0, 1.0):
            assert torch.equal(compiled(**tiny_inputs(0, step)), module(**tiny_inputs(0, step)))


def broken_backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
    raise RuntimeError("this back end is broken")


def test_a_broken_back_end_falls_back_with_one_warning_that_names_the_cause() -> None:
    module = TinyDit().eval()
    expected = copy.deepcopy(module)
    compile_denoiser(module, backend=broken_backend)
    with torch.no_grad():
        with pytest.warns(DithoistWarning, match="this back end is broken"):
            first = module(**tiny_inputs(0, 2.0))
        assert torch.equal(first, expected(**tiny_inputs(0, 2.0)))
        assert torch.equal(module(**tiny_inputs(0, 1.0)), expected(**tiny_inputs(0, 1.0)))
    assert "this back end is broken" in report(module).denoisers[0].fallbacks[0]


def test_a_call_that_dynamo_does_not_compile_is_reported() -> None:
    module = TinyDit().eval()
    expected = copy.deepcopy(module)
    compile_denoiser(module, backend="eager", dynamic=False)

    def run() -> None:
        for tokens in range(2, 40):
            inputs = tiny_inputs(0, 1.0, tokens=tokens)
            assert torch.equal(module(**inputs), expected(**inputs))

    with torch.no_grad(), pytest.warns(DithoistWarning, match="nothing for a call; 32 captures are the limit; restore"):
        run()


@pytest.mark.parametrize("good", [0, 2], ids=["mistaken first", "mistaken later"])
def test_after_a_mistaken_call_right_ones_are_captured(good: int) -> None:
    """Dynamo gives up a function that raises while it is traced."""
    twins = Twins(TinyDit())
    for step in range(good):
        twins.check(**tiny_inputs(0, float(step)))
    mistakes: list[dict[str, Any]] = [{"timestep": None}, {"hidden_states": torch.zeros(2, 4, 9)}, {"mask": "none"}]
    for mistake in mistakes:
        with torch.no_grad():
            with pytest.raises(Exception) as expected:  # noqa: PT011  Whatever the model says.
                twins.untouched(**(tiny_inputs() | mistake))
            with pytest.raises(expected.type, match=re.escape(str(expected.value))):
                twins.compiled(**(tiny_inputs() | mistake))
        for step in (2.0, 1.0, 0.0):
            twins.check(**tiny_inputs(0, step))
    runs = twins.runs("schedule")
    twins.check(**tiny_inputs(1, 1.0))
    assert twins.runs("schedule") == runs > 0  # The row of this step is held.
    assert (len(twins.report.graphs), twins.report.fallbacks) == (1, [])


def test_strict_raises_instead() -> None:
    module = TinyDit().eval()
    compile_denoiser(module, backend=broken_backend, strict=True)
    with torch.no_grad(), pytest.raises(Exception, match="this back end is broken"):
        module(**tiny_inputs())


def test_a_failure_of_ours_at_run_time_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TinyDit().eval()
    expected = copy.deepcopy(module)
    compile_denoiser(module, backend="eager")

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no room for a table")

    monkeypatch.setattr(table.Table, "extend", fail)
    with torch.no_grad(), pytest.warns(DithoistWarning, match="no room for a table"):
        assert torch.equal(module(**tiny_inputs()), expected(**tiny_inputs()))
    assert torch.no_grad()(module)(**tiny_inputs()).shape == (2, 4, 8)


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + self.table(ids) + timestep


def test_errors_of_the_model_are_raised_in_its_own_words_and_change_nothing() -> None:
    module = Raising().eval()
    compile_denoiser(module, backend="eager")
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    with torch.no_grad():
        module(torch.zeros(2, 3), torch.ones(()), good)
        with pytest.raises(IndexError, match="index out of range"):
            module(torch.zeros(2, 3), torch.ones(()), bad)
        with pytest.raises(RuntimeError, match="must match the size"):
            module(torch.zeros(5, 3), torch.ones(()), good)
        module(torch.zeros(2, 3), torch.ones(()), good)
    found = report(module).denoisers[0]
    assert found.fallbacks == []
    assert found.graphs[0].by_time["step"].runs == 2


def test_bad_input_is_refused_before_anything_changes() -> None:
    module = TinyDit().eval()
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (module, {"labels": {"timestp": "schedule"}}, ValueError, "did you mean 'timestep'"),
        (module, {"labels": {"timestep": "shedule"}}, ValueError, "did you mean 'schedule'"),
        (module, {"backend": "inducter"}, ValueError, "did you mean 'inductor'"),
        (module, {"backend": 3}, TypeError, "name or a callable"),
        (module, {"backend": "dithoist"}, ValueError, "compile with itself"),
        (module, {"max_cached_bytes": -1}, ValueError, "at least 0"),
        (module, {"bakend": "eager"}, TypeError, "did you mean 'backend'"),
        (lambda x: x, {}, TypeError, r"must be a torch\.nn\.Module, not function"),
        (torch.compile(module), {}, ValueError, "wrapped by torch.compile"),
        (torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), {}, ValueError, "compiled by torch.jit; pass the module"),
        (nn.Sequential(nn.LazyLinear(2)), {}, ValueError, "without a shape; call it once"),
    ]
    for target, options, error, message in cases:
        with pytest.raises(error, match=message):
            compile_denoiser(target, **options)
    assert module._compiled_call_impl is None
    for call in (report, restore):
        with pytest.raises(ValueError, match="was not compiled"):
            call(module)
        with pytest.raises(TypeError, match="DiffusionPipeline"):
            call(3)


def test_two_threads_on_one_module_get_right_results() -> None:
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs())
    wrong: list[tuple[int, int]] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            for step in range(20):
                inputs = tiny_inputs(seed, float(step % 5))
                if not torch.equal(twins.compiled(**inputs), twins.untouched(**inputs)):
                    wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_dropping_the_module_frees_what_is_held() -> None:
    module = TinyDit().eval()
    compile_denoiser(module, backend="eager")
    with torch.no_grad():
        module(**tiny_inputs())
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_public_names() -> None:
    assert set(dithoist.__all__) == {
        "DithoistWarning", "Explanation", "Report", "clear_caches", "compile_denoiser", "compile_pipeline",
        "compile_step", "explain", "report",
        "restore",
    }  # fmt: skip
