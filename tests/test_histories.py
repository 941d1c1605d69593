"""Whatever happens to a compiled pipeline, it draws what its untouched twin draws.

A history is a list of things users do to a pipeline, in any order: prompts, sizes, schedulers, guidance, callbacks
that interfere with the loop, LoRA, edited weights, dtypes, attention, restoring, copying, saving. Each is done to both
twins; then both draw, and the latents of every step must have the same bits. Each pipeline (``history_twins.py``) is
run with its weights released and not.

One rule follows a documented limit: weights written through ``.data`` are noticed when the next generation starts, so
no callback writes them that way.

Compiling takes a hundred times as long as drawing, so histories share it: a twin that came through a history whole is
put back as it was (attributes and bits of its modules, nothing held) and serves the next. A twin that did not is
never used again, so a failure repeats without what went before.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.utils import logging
from history_twins import FAMILIES, CompiledTwin, Request, louder
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from random_graphs import bits_equal
from torch import nn

from dithoist import compile_pipeline, restore
from dithoist.runtime import identity, release

Change = Callable[[Any], object]


class Stop(Exception):
    """Raised by a callback in the middle of a loop."""


def layer(pipe: Any, name: str) -> Any:
    """A layer, under its LoRA if there is one."""
    found = pipe.transformer.get_submodule(name)
    return getattr(found, "base_layer", found)


def _stop(pipe: Any, tensors: Request) -> Request:
    raise Stop


def _interrupt(pipe: Any, tensors: Request) -> Request:
    pipe._interrupt = True
    return {}


def _edit_weights(pipe: Any, tensors: Request) -> Request:
    for module in pipe.transformer.modules():
        if isinstance(module, nn.Linear):
            module.weight.neg_()
    return {}


def _edit_tensors(*names: str) -> Any:
    def edit(pipe: Any, tensors: Request) -> Request:
        for name in names:
            tensors[name].neg_()
        return {}

    return edit


def _replace_tensors(*names: str) -> Any:
    return lambda pipe, tensors: {name: tensors[name].flip(0, -1) for name in names}


CALLBACKS: dict[str, Callable[[Any, Request], Request]] = {
    "interrupt": _interrupt,
    "raise": _stop,
    "replace the prompt": _replace_tensors("prompt_embeds"),
    "replace the latents": _replace_tensors("latents"),
    "replace both": _replace_tensors("prompt_embeds", "latents"),
    "edit the prompt": _edit_tensors("prompt_embeds"),
    "edit the latents": _edit_tensors("latents"),
    "edit the weights": _edit_weights,
}

# All keep the scale of the numbers, so that a hundred edits leave numbers that differ.
TENSOR_EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda t: t.neg_(),
    "through .data": lambda t: t.data.neg_(),
    "other .data": lambda t: setattr(t, "data", t.data.flip(0)),
    "through the storage": lambda t: t.untyped_storage().copy_(t.detach().flip(-1).contiguous().untyped_storage()),
}
LAYER_EDITS: dict[str, Callable[[Any], object]] = {
    **{name: lambda m, edit=edit: edit(m.weight) for name, edit in TENSOR_EDITS.items()},
    "another parameter": lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach().flip(0), requires_grad=False)),
    "bias": lambda m: m.bias.neg_(),
}


_whole: dict[tuple[str, bool], list[CompiledTwin]] = {}


class Histories(RuleBasedStateMachine):
    """Rules change both twins, or what they are asked for; after each, both draw."""

    @initialize(name=st.sampled_from(sorted(FAMILIES)), release_weights=st.booleans())
    def start(self, name: str, release_weights: bool) -> None:
        self.family = FAMILIES[name]
        self.options = {
            "backend": "eager", "strict": True, "dynamic": self.family.dynamic, "release_weights": release_weights,
        }  # fmt: skip
        self.whole = _whole.setdefault((name, release_weights), [])
        self.agreed = False
        self.twin = self.whole.pop() if self.whole else CompiledTwin(self.family, self.options)
        self.twin.reset()
        self.compiled = self.twin.pipe
        self.untouched = copy.deepcopy(self.twin.pristine)
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
        self.seed, self.batch, self.pixels, self.steps, self.guidance = 0, 1, 32, 2, True
        self.scale: float | None = None
        self.lora = "none"
        self.callback: str | None = None
        self.new_prompt(0)

    def teardown(self) -> None:
        if getattr(self, "agreed", False) and not self.twin.worn:
            self.whole.append(self.twin)

    def both(self, change: Change) -> None:
        """Do the same to both twins."""
        self.agreed = False
        with torch.no_grad():
            for pipe in (self.untouched, self.compiled):
                change(pipe)

    def draw(self, pipe: Any, prompt: Request) -> list[torch.Tensor]:
        """Latents after each step."""
        seen: list[torch.Tensor] = []

        def callback(pipe: Any, step: int, _time: Any, tensors: Request) -> Request:
            seen.append(tensors["latents"].clone())
            return CALLBACKS[self.callback](pipe, tensors) if self.callback and step == 0 else {}

        call = {
            name: value.to(pipe.transformer.dtype) if value.is_floating_point() else value
            for name, value in prompt.items()
            if self.guidance or "negative" not in name
        }
        call[self.family.kwargs] = None if self.scale is None else {"scale": self.scale}
        try:
            images = pipe(
                **call,
                **{self.family.guidance: 2.0 if self.guidance else 1.0},
                height=self.pixels, width=self.pixels, num_inference_steps=self.steps,
                generator=torch.Generator().manual_seed(self.seed), output_type="latent",
                callback_on_step_end=callback, callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
            ).images  # fmt: skip
        except Stop:
            return seen
        return [*seen, images]

    @invariant()
    def the_twins_agree(self) -> None:
        self.agreed = False
        expected, actual = (self.draw(p, q) for p, q in zip((self.untouched, self.compiled), self.prompts, strict=True))
        self.callback = None
        assert len(actual) == len(expected)
        for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert bits_equal(a, b), f"latents {step} differ"
        self.agreed = True

    # What is asked for.

    @rule(seed=st.integers(0, 3))
    def new_prompt(self, seed: int) -> None:
        self.prompts = [self.family.prompt(seed, self.batch) for _ in range(2)]

    @rule(how=st.sampled_from(sorted(TENSOR_EDITS)))
    def edit_the_prompt(self, how: str) -> None:
        for prompt in self.prompts:
            for value in prompt.values():
                if value.is_floating_point():
                    TENSOR_EDITS[how](value)

    @rule()
    def equal_prompt_in_new_tensors(self) -> None:
        self.prompts = [{name: value.clone() for name, value in prompt.items()} for prompt in self.prompts]

    @rule(batch=st.integers(1, 2), pixels=st.sampled_from([32, 48]))
    def resize(self, batch: int, pixels: int) -> None:
        self.batch, self.pixels = batch, pixels
        self.new_prompt(0)

    @rule(data=st.data())
    def other_scheduler(self, data: st.DataObject) -> None:
        make = data.draw(st.sampled_from(self.family.schedulers))
        self.both(lambda pipe: setattr(pipe, "scheduler", make()))

    @rule(steps=st.integers(1, 3), seed=st.integers(0, 1))
    def other_steps_and_noise(self, steps: int, seed: int) -> None:
        self.steps, self.seed = steps, seed

    @rule()
    def switch_guidance(self) -> None:
        self.guidance = not self.guidance

    @rule(what=st.sampled_from(sorted(CALLBACKS)))
    def interfere_in_mid_loop(self, what: str) -> None:
        self.callback = what

    # LoRA.

    @precondition(lambda self: self.lora == "none")
    @rule(seed=st.integers(0, 1))
    def load_lora(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        state = {}
        for name in self.family.weights:
            weight = layer(self.compiled, name).weight
            for part, shape in (("A", (2, weight.shape[1])), ("B", (weight.shape[0], 2))):
                state[f"transformer.{name}.lora_{part}.weight"] = 0.2 * torch.randn(shape, generator=generator)
        self.both(lambda pipe: pipe.load_lora_weights(dict(state), adapter_name="style"))
        self.lora = "loaded"

    @precondition(lambda self: self.lora == "loaded")
    @rule(weight=st.sampled_from([0.5, 2.0]), change=st.sampled_from(["set_adapters", "disable_lora", "enable_lora"]))
    def scale_lora(self, weight: float, change: str) -> None:
        arguments = ("style", weight) if change == "set_adapters" else ()
        self.both(lambda pipe: getattr(pipe, change)(*arguments))

    @precondition(lambda self: self.lora == "loaded")
    @rule(scale=st.sampled_from([None, 0.5]))
    def scale_lora_by_the_call(self, scale: float | None) -> None:
        self.scale = scale

    @precondition(lambda self: self.lora == "loaded")
    @rule(scale=st.sampled_from([0.5, 1.0]))
    def fuse_lora(self, scale: float) -> None:
        self.both(lambda pipe: pipe.fuse_lora(components=["transformer"], lora_scale=scale))
        self.lora, self.scale = "fused", None

    @precondition(lambda self: self.lora == "fused")
    @rule()
    def unfuse_lora(self) -> None:
        self.both(lambda pipe: pipe.unfuse_lora(components=["transformer"]))
        self.lora = "loaded"

    @precondition(lambda self: self.lora != "none")
    @rule()
    def unload_lora(self) -> None:
        self.both(lambda pipe: pipe.unload_lora_weights())
        self.lora, self.scale = "none", None

    # The model.

    @rule(data=st.data(), how=st.sampled_from(sorted(LAYER_EDITS)))
    def edit_a_layer(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(self.family.weights))
        self.both(lambda pipe: LAYER_EDITS[how](layer(pipe, name)))

    @rule(assign=st.booleans())
    def load_state_dict(self, assign: bool) -> None:
        def load(pipe: Any) -> None:
            state = pipe.transformer.state_dict()
            pipe.transformer.load_state_dict({k: v.flip(0) if v.ndim else v for k, v in state.items()}, assign=assign)

        self.both(load)

    @rule(dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def cast(self, dtype: torch.dtype) -> None:
        self.both(lambda pipe: pipe.to(dtype))

    @precondition(lambda self: self.family is FAMILIES["qwen-image"])
    @rule(backend=st.sampled_from(["native", "_native_math"]))
    def switch_attention(self, backend: str) -> None:
        self.both(lambda pipe: pipe.transformer.set_attention_backend(backend))

    @rule(loud=st.booleans())
    def set_attn_processor(self, loud: bool) -> None:
        processor = louder(self.family.processor) if loud else self.family.processor
        self.both(lambda pipe: pipe.transformer.set_attn_processor(processor()))

    # The compiler.

    @rule()
    def restore_and_compile_again(self) -> None:
        self.agreed = False
        state = self.compiled.transformer._compiled_call_impl.state
        restore(self.compiled)
        assert self.compiled.transformer._compiled_call_impl is None
        assert state.released.bytes(self.compiled.transformer.parameters()) == 0
        self.the_twins_agree()
        compile_pipeline(self.compiled, **self.options)

    @rule()
    def copy_the_compiled_twin(self) -> None:
        """A copy is not compiled: from now on it is the untouched twin."""
        copied = copy.deepcopy(self.compiled)
        assert copied.transformer._compiled_call_impl is None
        assert_same_weights(copied.transformer, self.untouched.transformer)
        self.untouched = copied

    @rule()
    def save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("untouched", "compiled")]
            for pipe, path in zip((self.untouched, self.compiled), paths, strict=True):
                pipe.transformer.save_pretrained(path)
            saved = [{f.name: f.read_bytes() for f in path.iterdir()} for path in paths]
        assert saved[0] == saved[1]


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    x, y = a.state_dict(), b.state_dict()
    assert list(x) == list(y)
    assert all(bits_equal(x[name], y[name]) for name in x)


def run_histories(machine: type[Histories], **options: Any) -> None:
    """Run histories of up to eight rules: a dozen, always the same, in CI, and 1,000 random ones by ``make fuzz``."""
    options = {"max_examples": 12 if settings.default.derandomize else 1000, "stateful_step_count": 8} | options
    run_state_machine_as_test(machine, settings=settings(**options))


@pytest.fixture(autouse=True)
def _own_twins() -> Iterator[None]:
    """No test gets another's twins, and diffusers keeps its advice to itself."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)
    _whole.clear()


def test_property_whatever_happens_the_twins_agree() -> None:
    run_histories(Histories)


class QuickHistories(Histories):
    """Without the rules that make Dynamo compile again."""

    resize = switch_guidance = cast = switch_attention = set_attn_processor = load_lora = None


_check = identity.WeightsIdentity.check


def _shallow(self: Any, weights: Any, *, deep: bool) -> Any:
    return _check(self, weights, deep=False)


@pytest.mark.parametrize(
    "mutant",
    [
        mock.patch.object(identity.InputIdentity, "token", return_value=0),
        mock.patch.object(identity.WeightsIdentity, "check", _shallow),
        mock.patch.object(release.ReleasedWeights, "restore", return_value=None),
    ],
    ids=["every input is the same", "weights are never compared by their bytes", "restore forgets released weights"],
)
def test_histories_find(mutant: Any) -> None:
    with mutant, pytest.raises((AssertionError, RuntimeError)):
        run_histories(QuickHistories, max_examples=100, derandomize=True, database=None, phases=[Phase.generate])
