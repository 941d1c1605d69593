"""Whatever fails, and wherever somebody presses Ctrl-C: the picture is right, and the model is whole."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from twins import TinyDit, Twins, WideDit, mapped, same_bytes, tiny_inputs, wide_inputs

import dithoist
from dithoist import DithoistWarning, clear_caches, compile_denoiser, compile_pipeline, report, restore
from dithoist.models.small import build_pipeline, example_call
from dithoist.runtime import denoiser, release, rows, table


def failing(error: BaseException, at: int) -> Callable[..., Any]:
    """A back end that raises ``error`` when it compiles for the ``at``-th time, and runs the graph as it is else."""
    count = itertools.count(1)

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        if next(count) == at:
            raise error
        return gm.forward

    return backend


def test_a_back_end_that_fails_in_the_middle_costs_one_graph() -> None:
    module = TinyDit().eval()
    untouched = copy.deepcopy(module)
    compile_denoiser(module, backend=failing(RuntimeError("no registers left"), at=2), dynamic=False)

    def check(tokens: int) -> None:
        for step in (2.0, 1.0):
            call = tiny_inputs(0, step, tokens=tokens)
            with torch.no_grad():
                assert torch.equal(module(**call), untouched(**call))

    check(4)
    with pytest.warns(DithoistWarning, match=r"no registers left.*`dithoist doctor` says what works"):
        check(5)
    for tokens in (6, 5, 4):  # A second warning would fail this test.
        check(tokens)
    assert len(report(module).denoisers[0].graphs) == 2


@pytest.mark.parametrize("release_weights", [False, True], ids=["kept", "released"])
@pytest.mark.parametrize("at", [1, 3])
def test_without_memory_for_a_row_the_picture_still_comes(
    at: int, release_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "LEAST_BYTES", 1)
    count = itertools.count(1)

    def scarce(run: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if next(count) == at:
                raise MemoryError
            return run(*args)

        return wrapped

    monkeypatch.setattr(rows.HoistedStage, "__call__", scarce(rows.HoistedStage.__call__))
    monkeypatch.setattr(rows.HoistedStage, "rows", scarce(rows.HoistedStage.rows))
    untouched = build_pipeline("qwen-image")
    pipe = compile_pipeline(build_pipeline("qwen-image"), backend="eager", release_weights=release_weights)
    with pytest.warns(DithoistWarning, match="memory ran out, so what was held .* was freed"):
        first = pipe(**example_call("qwen-image")).images
    assert torch.equal(first, untouched(**example_call("qwen-image")).images)
    for prompt in ("a cat", "a dog"):
        call = [example_call("qwen-image", prompt=prompt) for _ in range(2)]
        assert torch.equal(pipe(**call[0]).images, untouched(**call[1]).images)
    assert same_bytes(pipe.transformer, untouched.transformer)
    assert next(count) > 2 * at  # Hoisting goes on.


OUT_OF_MEMORY = {
    "Python": MemoryError("a row"),
    "the CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    "a device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
}


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_when_memory_runs_out_less_is_held(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(WideDit(), strict=False)
    twins.check(**wide_inputs(0, 3.0))
    held = twins.compiled._compiled_call_impl.state.held
    kept, runs = held.bytes, twins.runs("schedule")
    with monkeypatch.context() as patch:
        patch.setattr(rows.HoistedStage, "__call__", mock.Mock(side_effect=OUT_OF_MEMORY[error]))
        with pytest.warns(DithoistWarning, match="memory ran out"):
            twins.check(**wide_inputs(0, 2.0))
    for step in (3.0, 2.0, 1.0):
        twins.check(**wide_inputs(0, step))
        assert 0 < held.bytes <= held.max_bytes == kept // 2
    assert twins.runs("schedule") == runs + 3


def test_memory_that_never_suffices_for_hoisted_work_costs_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    scarce = mock.Mock(side_effect=MemoryError)
    twins = Twins(WideDit(), strict=False)
    monkeypatch.setattr(rows.HoistedStage, "__call__", scarce)
    with pytest.warns(DithoistWarning, match="memory ran out"):
        twins.check(**wide_inputs(0, 3.0))
    for step in (2.0, 1.0):  # A second warning would fail this test.
        twins.check(**wide_inputs(0, step))


def test_memory_that_the_model_itself_lacks_is_the_callers_to_know() -> None:
    class Greedy(TinyDit):
        def forward(self, **inputs: Any) -> torch.Tensor:
            return super().forward(**inputs) + inputs["hidden_states"].new_zeros(2**50).sum()

    module = compile_denoiser(Greedy().eval(), backend="eager", strict=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="can't allocate memory"):
        module(**tiny_inputs())


POINTS: dict[str, tuple[Any, str]] = {
    "a stage": (rows._Rows, "_call"),
    "the body": (table.StageCall, "run"),
    "making rows": (table.Table, "_make_rows"),
    "release": (release.ReleasedWeights, "release"),
    "moving a weight": (release, "_move"),
    "forgetting a weight": (release.ReleasedWeights, "forget"),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_pipeline_stopped_at_any_point_is_whole(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "LEAST_BYTES", 1)
    untouched = build_pipeline("qwen-image")
    pipe = compile_pipeline(build_pipeline("qwen-image"), backend="eager", strict=True, release_weights=True)

    def check(prompt: str) -> None:
        call = [example_call("qwen-image", prompt=prompt) for _ in range(2)]
        assert torch.equal(pipe(**call[0]).images, untouched(**call[1]).images)

    owner, name = POINTS[point]
    function, count = getattr(owner, name), itertools.count(1)

    def stopped(*args: Any) -> Any:
        if next(count) == (1 if point == "release" else 3):
            raise KeyboardInterrupt
        return function(*args)

    def draw_until_stopped() -> None:
        for prompt in ("a cat", "a dog", "a cow"):
            check(prompt)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stopped)
        with pytest.raises(KeyboardInterrupt):
            draw_until_stopped()
    assert same_bytes(pipe.transformer, untouched.transformer)
    for prompt in ("a cat", "a dog"):
        check(prompt)
    assert same_bytes(pipe.transformer, untouched.transformer)
    restore(pipe)
    assert same_bytes(pipe.transformer, untouched.transformer)
    assert not any(mapped(weight) for weight in pipe.transformer.parameters())


RUNTIME = str(Path(next(iter(dithoist.__path__))).resolve() / "runtime")


def stopped_at_line(number: int, call: Callable[[], object]) -> bool:
    """``call()``, ended by Ctrl-C at the ``number``-th line of our run time; whether it got there."""
    lines = itertools.count(1)

    def in_ours(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and next(lines) == number:
            raise KeyboardInterrupt
        return in_ours

    def trace(frame: Any, _event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        return in_ours if str(Path(path).resolve()).startswith(RUNTIME) else None

    enabled = torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(enabled)  # Stopped on the way out of a ``with``, it would not have been left.
    return False


def stops(call: Callable[[], object], *, stride: int) -> Any:
    """Stop ``call`` at every ``stride``-th line, once at each, until it comes through."""
    number = 1
    while stopped_at_line(number, call):
        yield number
        number += stride


def test_a_call_stopped_at_any_line_leaves_everything_right() -> None:
    twins = Twins(WideDit(), release_weights=True)
    for step in (3.0, 2.0, 1.0):
        twins.check(**wide_inputs(0, step))

    def afresh() -> None:
        """All that a call can do: weights in other memory, a new prompt, no row held."""
        clear_caches(twins.compiled)
        twins.both(lambda m: (m.double().float(), m.modulation.weight.data.neg_()))
        with torch.no_grad():
            twins.compiled(**wide_inputs(1, 3.0))

    tried = 0
    for number in stops(afresh, stride=7):
        tried += 1
        assert same_bytes(twins.compiled, twins.untouched), f"stopped at line {number}"
        for step in (2.0, 1.0):  # The loop goes on, as if nothing had been.
            twins.check(**wide_inputs(1, step))
    assert tried > 50
    assert twins.report.fallbacks == []
    assert twins.report.bytes_released > 0


def test_a_restore_stopped_at_any_line_can_be_repeated() -> None:
    module = WideDit().eval()
    untouched = copy.deepcopy(module)

    def compiled_and_released() -> None:
        compile_denoiser(module, backend="eager", strict=True, release_weights=True)
        with torch.no_grad():
            module(**wide_inputs())

    for number in range(1, 200, 5):
        compiled_and_released()
        assert mapped(module.modulation.weight)
        done = not stopped_at_line(number, lambda: restore(module))
        assert same_bytes(module, untouched), f"stopped at line {number}"
        if denoiser.compiled_denoiser(module) is not None:
            restore(module)
        assert not any(mapped(weight) for weight in module.parameters()), f"stopped at line {number}"
        if done:
            break
    assert done


def test_a_first_call_stopped_while_it_compiles_compiles_at_the_next() -> None:
    module = TinyDit().eval()
    untouched = copy.deepcopy(module)
    compile_denoiser(module, backend=failing(KeyboardInterrupt(), at=1), strict=True)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            module(**tiny_inputs())
        assert torch.equal(module(**tiny_inputs()), untouched(**tiny_inputs()))
    assert len(report(module).denoisers[0].graphs) == 1


def test_a_graph_stopped_while_it_is_staged_anew_is_staged_at_the_next_call() -> None:
    """In between it would be half old and half new, and see no change of weights that only the old half reads."""
    module = TinyDit(512).eval()
    untouched = copy.deepcopy(module)
    compile_denoiser(module, backend=failing(KeyboardInterrupt(), at=2), strict=True)
    steps = itertools.count(1000, -1)

    def check(prompt: torch.Tensor) -> None:
        call = tiny_inputs(0, float(next(steps))) | {"hidden_states": torch.randn(2, 4, 512)}
        call["encoder_hidden_states"] = prompt
        with torch.no_grad():
            expected = untouched(**call)
            assert torch.equal(module(**call), expected)

    prompts: list[torch.Tensor] = []

    def change_the_prompt_at_each_step() -> None:
        for _ in range(100):
            prompts.append(torch.randn(2, 3, 512))
            check(prompts[-1])

    with pytest.raises(KeyboardInterrupt):
        change_the_prompt_at_each_step()
    for _ in range(3):
        check(prompts[-1])
        with torch.no_grad():
            for m in (module, untouched):
                m.text_proj.weight.neg_()
    (graph,) = report(module).denoisers[0].graphs
    assert graph.demoted == ["encoder_hidden_states"]
    assert graph.promoted == []
