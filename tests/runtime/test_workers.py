"""Threads share a compiled pipeline; other processes get an untouched one, or after a fork a compiled copy."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import queue
import threading
from typing import Any

import pytest
import torch
from twins import TinyDit, Twins, WideDit, answer_of_a_worker, same_bytes, tiny_inputs, wide_inputs

from dithoist import compile_denoiser, compile_pipeline, compile_step, report
from dithoist.models.small import build_pipeline, example_call

PROMPTS = ("a cat", "a dog")


def picture(pipe: Any, prompt: str, **call: Any) -> torch.Tensor:
    return pipe(**example_call("qwen-image", prompt=prompt, **call)).images  # type: ignore[no-any-return]


def in_threads(work: Any, arguments: Any) -> None:
    """Call ``work`` in a thread for each of ``arguments``; what one raises is raised here."""
    errors: queue.Queue[BaseException] = queue.Queue()

    def run(argument: Any) -> None:
        try:
            work(argument)
        except BaseException as error:
            errors.put(error)

    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors.empty():
        raise errors.get()


def test_two_threads_with_two_pipelines() -> None:
    """Neither finds what the other compiled, nor loses its own, though both compile at once."""
    expected = [picture(build_pipeline("qwen-image"), prompt) for prompt in PROMPTS]
    pipes = [compile_pipeline(build_pipeline("qwen-image"), backend="eager", strict=True) for _ in PROMPTS]

    def work(k: int) -> None:
        for _ in range(3):
            assert torch.equal(picture(pipes[k], PROMPTS[k]), expected[k])

    in_threads(work, range(2))
    for pipe in pipes:
        (found,) = report(pipe).denoisers
        assert (len(found.graphs), found.recompiles, found.fallbacks) == (2, 1, [])  # For two lengths of prompts.


@pytest.mark.parametrize("release_weights", [False, True], ids=["kept", "released"])
def test_two_threads_on_one_pipeline(release_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a scheduler of its own, as untouched pipelines need it too; the denoiser is one."""
    monkeypatch.setattr("dithoist.runtime.release.LEAST_BYTES", 1)
    untouched = build_pipeline("qwen-image")
    expected = [picture(untouched, prompt, steps=3 + k) for k, prompt in enumerate(PROMPTS)]
    pipe = compile_pipeline(build_pipeline("qwen-image"), backend="eager", strict=True, release_weights=release_weights)
    picture(pipe, "a cow")
    pipes = [pipe, type(pipe)(**pipe.components | {"scheduler": copy.deepcopy(pipe.scheduler)})]
    pipes[1].set_progress_bar_config(disable=True)

    def work(k: int) -> None:
        for _ in range(4):
            assert torch.equal(picture(pipes[k], PROMPTS[k], steps=3 + k), expected[k])

    in_threads(work, range(2))
    assert report(pipe).denoisers[0].fallbacks == []
    assert same_bytes(pipe.transformer, untouched.transformer)


def _to_file_and_back(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _to_file_and_back,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_compiled_module_are_untouched(way: str) -> None:
    twins = Twins(WideDit(), release_weights=True)
    for step in (2.0, 1.0):
        twins.check(**wide_inputs(0, step))
    other = COPIES[way](twins.compiled)
    assert other._compiled_call_impl is None
    assert same_bytes(other, twins.untouched)
    with torch.no_grad():
        assert torch.equal(other(**wide_inputs()), twins.untouched(**wide_inputs()))
    compile_denoiser(other, backend="eager", strict=True)
    twins.check(**wide_inputs(1))


def scaled(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    return x * timestep.exp()


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_compiled_step_are_the_function(way: str) -> None:
    assert COPIES[way](compile_step(scaled, backend="eager")) is scaled


@pytest.mark.parametrize(("method", "compiled"), [("fork", True), ("spawn", False)])
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_worker_gives_the_right_result(method: str, compiled: bool) -> None:
    twins = Twins(WideDit(), release_weights=True)
    for step in (2.0, 1.0):
        twins.check(**wide_inputs(0, step))
    expected = twins.check(**wide_inputs(3))
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=answer_of_a_worker, args=(twins.compiled, answers))
    process.start()
    was_compiled, made = answers.get(timeout=120)
    process.join(60)
    assert process.exitcode == 0
    assert was_compiled is compiled
    assert torch.equal(torch.from_numpy(made), expected)
    for step in (2.0, 1.0):  # Sending it away moved weights into shared memory.
        twins.check(**wide_inputs(1, step))
    assert same_bytes(twins.compiled, twins.untouched)


def test_a_thread_may_compile_while_another_runs() -> None:
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs())
    expected = {n: twins.untouched(**tiny_inputs(n, tokens=3 + n)).detach() for n in range(4)}

    def work(n: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                assert torch.equal(twins.compiled(**tiny_inputs(n, tokens=3 + n)), expected[n])

    in_threads(work, range(4))
