"""Offload, casting, quantised weights and caches, as diffusers and accelerate put them on: pictures stay what they are.

Each is put on before or after compiling, and off again where it comes off. There is no GPU here, so a CPU is both where
weights are kept and where they are used; between calls they lie in other memory, on no device, on the disk, or in
another dtype. diffusers' `enable_sequential_cpu_offload` refuses a CPU, so accelerate's function beneath it is called.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers.hooks import ModelHook, apply_group_offloading, apply_layerwise_casting
from random_graphs import bits_equal
from torch import nn
from twins import Twins, WideDit, mapped, same_bytes, wide_inputs

from dithoist import DithoistWarning, compile_denoiser, compile_pipeline, report, restore
from dithoist.models.small import as_dtype, build_denoiser, build_pipeline, example_call, example_calls
from dithoist.runtime.report import DenoiserReport

CPU = torch.device("cpu")
CAT, DOG = "a red cat", "a wet dog"
Change = Callable[[Any], object]


class Pair:
    """Two pipelines with the same weights, of which the second is to be compiled."""

    def __init__(self, build: Callable[[], Any], name: str, **call: Any) -> None:
        self.pipes = build(), build()
        self._name = name
        self._call = call

    @property
    def compiled(self) -> Any:
        return self.pipes[1]

    def both(self, change: Change) -> None:
        for pipe in self.pipes:
            change(pipe)

    def check(self, prompt: str) -> torch.Tensor:
        """The latents of a picture, the same for both."""
        expected, actual = (self._draw(pipe, prompt) for pipe in self.pipes)
        assert expected.isfinite().all()
        assert bits_equal(actual, expected)
        return actual

    def _draw(self, pipe: Any, prompt: str) -> torch.Tensor:
        call = example_call(self._name, prompt=prompt, **self._call)
        return pipe(**call, return_dict=False)[0]  # type: ignore[no-any-return]

    @property
    def report(self) -> DenoiserReport:
        return report(self.compiled).denoisers[0]


def runs(denoiser: DenoiserReport, time: str) -> int:
    """How often the stage of a binding time ran, over all graphs."""
    return sum(graph.by_time[time].runs for graph in denoiser.graphs if time in graph.by_time)


@dataclass(frozen=True)
class Offload:
    """How it is put on, with a folder of its own, and off; and what the report calls it if nothing is compiled then."""

    on: Callable[[Any, Path], object]
    off: Change | None
    aside: str | None


def _remove_all_hooks(pipe: Any) -> None:
    pipe.remove_all_hooks()


def _dispatch(pipe: Any, folder: Path) -> None:
    """Half of the model on the disk."""
    places = {name: "disk" if i % 2 else "cpu" for i, (name, _) in enumerate(pipe.transformer.named_children())}
    accelerate.dispatch_model(pipe.transformer, places, main_device="cpu", offload_dir=folder)


OFFLOADS = {
    "model": Offload(lambda pipe, _: pipe.enable_model_cpu_offload(device="cpu"), _remove_all_hooks, None),
    "sequential": Offload(lambda p, _: accelerate.cpu_offload(p.transformer, CPU), _remove_all_hooks, "accelerate"),
    "device map": Offload(_dispatch, None, "accelerate"),
    "group, layers": Offload(
        lambda pipe, _: pipe.enable_group_offload(CPU, offload_type="leaf_level"), None, "group offload"
    ),
    # Dynamo takes the code of one block of a group for another's: this drew NaN.
    "group, blocks on the disk": Offload(
        lambda pipe, folder: pipe.enable_group_offload(CPU, num_blocks_per_group=2, offload_to_disk_path=str(folder)),
        None,
        "group offload",
    ),
    "casting": Offload(
        lambda p, _: p.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        None,
        "layerwise casting",
    ),
}


def _forwards(module: nn.Module) -> list[Any]:
    return [vars(m).get("forward") for m in module.modules()]


@pytest.mark.parametrize("first", ["compiled first", "offloaded first"])
@pytest.mark.parametrize("name", OFFLOADS)
def test_pictures_with_offload_have_the_bits_of_the_untouched_pipeline(name: str, first: str, tmp_path: Path) -> None:
    offload = OFFLOADS[name]
    pair = Pair(lambda: build_pipeline("sd3"), "sd3", steps=2)
    if first == "compiled first":
        compile_pipeline(pair.compiled, backend="eager")
        pair.check(CAT)
    for i, pipe in enumerate(pair.pipes):
        offload.on(pipe, tmp_path / str(i))
    if first == "offloaded first":
        compile_pipeline(pair.compiled, backend="eager")
    before = runs(pair.report, "request")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DithoistWarning)
        cat = pair.check(CAT)
        assert not torch.equal(pair.check(DOG), cat)
        assert torch.equal(pair.check(CAT), cat)
    said = [str(w.message) for w in caught if issubclass(w.category, DithoistWarning)]
    if offload.aside is None:
        assert said == pair.report.fallbacks == []
        assert runs(pair.report, "request") == before + 2  # A prompt each, though weights are elsewhere at each call.
        assert runs(pair.report, "model") == 1 + bool(before)
    else:
        (reason,) = pair.report.fallbacks
        assert reason.startswith(offload.aside)
        assert len(said) == 1
        assert runs(pair.report, "request") == before
    if offload.off is not None and first == "compiled first":
        pair.both(offload.off)
        before = pair.report.cache_hits
        pair.check(CAT)
        assert pair.report.cache_hits > before  # Compiled again.
    hooked = _forwards(pair.compiled.transformer)
    restore(pair.compiled)
    assert _forwards(pair.compiled.transformer) == hooked
    pair.check(DOG)


@pytest.mark.parametrize("name", [name for name, offload in OFFLOADS.items() if offload.aside])
def test_releasing_weights_that_offload_moves_is_refused_before_anything_changes(name: str, tmp_path: Path) -> None:
    pipe = build_pipeline("sd3")
    OFFLOADS[name].on(pipe, tmp_path)
    with pytest.raises(ValueError, match=rf"release_weights=True .*transformer: {OFFLOADS[name].aside}"):
        compile_pipeline(pipe, release_weights=True)
    assert pipe.transformer._compiled_call_impl is None


def test_strict_raises_what_the_report_says() -> None:
    module = compile_denoiser(WideDit().eval(), backend="eager", strict=True)
    accelerate.cpu_offload(module, CPU)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"accelerate's offload.*enable_model_cpu_offload\(\)"):
        module(**wide_inputs())


MODULE_OFFLOADS: dict[str, tuple[Change, bool]] = {
    "model": (lambda m: accelerate.cpu_offload_with_hook(m, torch.device("cpu:0")), True),
    "sequential": (lambda m: accelerate.cpu_offload(m, CPU), False),
    # A hook on the whole module that brings all of its weights for each call.
    "whole": (lambda m: add_hook_to_module(m, AlignDevicesHook(CPU, offload=True, place_submodules=True)), False),
    "group": (lambda m: apply_group_offloading(m, CPU, offload_type="leaf_level"), False),
    "casting": (lambda m: apply_layerwise_casting(m, torch.bfloat16, torch.float32), False),
}


@pytest.mark.parametrize("name", MODULE_OFFLOADS)
def test_weights_that_were_released_are_offloaded_like_others(name: str) -> None:
    offload, compiled = MODULE_OFFLOADS[name]
    torch.manual_seed(0)
    untouched = WideDit().eval()
    module = compile_denoiser(copy.deepcopy(untouched), backend="eager", release_weights=True)

    def check(seed: int) -> None:
        for step in (3.0, 2.0, 1.0):
            with torch.no_grad():
                expected, actual = (m(**wide_inputs(seed, step)) for m in (untouched, module))
            assert bits_equal(actual, expected)

    check(0)
    assert mapped(module.modulation.weight)
    for m in (untouched, module):
        offload(m)
    with nullcontext() if compiled else pytest.warns(DithoistWarning, match="runs as it was"):
        for seed in (0, 1, 0):
            check(seed)
    assert (report(module).denoisers[0].fallbacks == []) == compiled
    if compiled:
        assert mapped(module.modulation.weight)  # In other memory, and gone from there too.
        with torch.no_grad():
            for m in (untouched, module):
                m.modulation.weight.neg_()
        check(0)
    restore(module)
    check(1)
    if compiled:
        assert same_bytes(module, untouched)
        assert not mapped(module.modulation.weight)


def test_hooks_that_leave_weights_alone_are_captured_with_the_module() -> None:
    """One of diffusers on the whole module and one on a layer, put on and off after the first call."""

    class Louder(ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    twins = Twins(WideDit())
    plain = twins.check(**wide_inputs())
    for path in ("text_proj", ""):
        twins.both(lambda m, path=path: _registry(m.get_submodule(path)).register_hook(Louder(), "louder"))
        assert not torch.equal(twins.check(**wide_inputs()), plain)
        twins.check(**wide_inputs(1))
    twins.both(lambda m: _registry(m).remove_hook("louder"))
    assert torch.equal(twins.check(**wide_inputs()), plain)


def _registry(module: nn.Module) -> Any:
    return diffusers.HookRegistry.check_if_exists_or_initialize(module)


def small_flux() -> Any:
    """A block of each kind."""
    pipe = build_pipeline("flux")
    for blocks in ("transformer_blocks", "single_transformer_blocks"):
        setattr(pipe.transformer, blocks, getattr(pipe.transformer, blocks)[:1])
    return pipe


_ALWAYS = (-1, 1001)
CACHES: dict[str, Callable[[Any], Any]] = {
    "faster": lambda pipe: diffusers.FasterCacheConfig(
        spatial_attention_timestep_skip_range=(-1, 999),  # Not at the first step.
        current_timestep_callback=lambda: float(pipe._current_timestep),
        attention_weight_callback=lambda _: 0.5,
        is_guidance_distilled=True,
    ),
    "pyramid": lambda pipe: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=_ALWAYS,
        current_timestep_callback=lambda: 500,
    ),
    "taylor": lambda pipe: diffusers.TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float32
    ),
    "mag": lambda pipe: diffusers.MagCacheConfig(
        threshold=0.5, max_skip_steps=2, retention_ratio=0.1, num_inference_steps=3, mag_ratios=torch.full((3,), 0.97)
    ),
}  # test_real_pipelines.py has FirstBlockCache.


@pytest.mark.parametrize("name", CACHES)
def test_caches_of_diffusers_keep_what_they_keep_untouched(name: str) -> None:
    pair = Pair(small_flux, "flux", steps=3, guidance=False)
    plain = pair._draw(pair.pipes[0], CAT)
    pair.both(lambda pipe: pipe.transformer.enable_cache(CACHES[name](pipe)))
    compile_pipeline(pair.compiled, backend="eager", strict=True)
    cached = pair.check(CAT)
    assert not torch.equal(cached, plain)
    assert not torch.equal(pair.check(DOG), cached)
    assert pair.report.fallbacks == []
    if name == "mag":
        pair.both(lambda pipe: pipe.transformer.disable_cache())
        assert torch.equal(pair.check(CAT), plain)


def _latents(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Those of the first picture `[channels, frames, height, width]`, its tokens as a column."""
    return [kwargs["hidden_states"][0].T[:, None, :, None]]


@pytest.mark.parametrize("name", ["sea", "text"])
def test_caches_that_no_small_pipeline_feeds(name: str) -> None:
    """One is told steps and noise levels, one goes by where the prompt lies in memory."""
    sea = diffusers.hooks.SeaCacheConfig(threshold=100.0, raw_vision_callback=_latents)
    family, config = {"sea": ("flux", sea), "text": ("nucleus-moe", diffusers.hooks.TextKVCacheConfig())}[name]
    untouched, compiled = (build_denoiser(family, blocks=1) for _ in range(2))
    compile_denoiser(compiled, backend="eager", strict=True)

    def draw(module: Any, seed: int) -> list[torch.Tensor]:
        made = []
        for i, call in enumerate(example_calls(family, module, steps=4, seed=seed)):
            with module.cache_context("cond", step_index=i, sigma=1 - i / 4, num_inference_steps=4), torch.no_grad():
                made.append(module(**call)[0])
        module._reset_stateful_cache()
        return made

    plain = draw(untouched, 0)
    for module in (untouched, compiled):
        module.enable_cache(config)
    for seed in (1, 0):
        expected, actual = draw(untouched, seed), draw(compiled, seed)
        assert all(map(bits_equal, actual, expected))
    assert all(map(torch.equal, expected, plain)) == (name == "text")  # That one only saves time.


class Packed(torch.Tensor):
    """A weight kept as 8-bit integers and a scale for each row, as quantising libraries have them."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype, device=scale.device)
        return made

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers = integers
        self.scale = scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> Packed:
        return Packed(parts["integers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Packed(*(func(part) for part in (args[0].integers, args[0].scale)))
        if func is torch.ops.aten._to_copy.default:
            return Packed(args[0].integers, func(args[0].scale, **kwargs))
        args = [a.integers * a.scale if isinstance(a, Packed) else a for a in args]
        return func(*args, **(kwargs or {}))


def pack(module: nn.Module) -> None:
    for layer in (module.text_proj, module.modulation, module.body):
        layer.weight = nn.Parameter(Packed.of(layer.weight.detach()), requires_grad=False)


@pytest.mark.parametrize("first", ["compiled first", "packed first"])
@pytest.mark.parametrize("release_weights", [False, True])
def test_weights_of_a_tensor_subclass_are_hoisted_edited_and_released_like_others(
    first: str, release_weights: bool
) -> None:
    module = WideDit().eval()
    if first == "packed first":
        pack(module)
    twins = Twins(module, release_weights=release_weights)
    if first == "compiled first":
        twins.check(**wide_inputs())
        twins.both(pack)

    def pictures() -> None:
        for seed in (0, 1):
            for step in (3.0, 2.0, 1.0):
                twins.check(**wide_inputs(seed, step))

    pictures()
    assert twins.runs("request") == 2 + (first == "compiled first")
    integers = twins.compiled.modulation.weight.integers
    assert mapped(integers) == release_weights
    held = twins.compiled._compiled_call_impl.state.held
    assert max(size for _, size in held._entries.values()) < integers.nbytes  # Not the weights, unpacked.
    with torch.no_grad():
        twins.both(lambda m: m.modulation.weight.integers.neg_())
    pictures()
    with torch.no_grad():
        twins.both(lambda m: m.text_proj.weight.scale.data.mul_(2))
    pictures()
    restore(twins.compiled)
    assert not mapped(twins.compiled.modulation.weight.integers)
    assert bits_equal(twins.compiled.modulation.weight.integers, twins.untouched.modulation.weight.integers)


def test_weights_of_a_tensor_subclass_move_after_the_first_call() -> None:
    """By ``swap_tensors``, which refuses a tensor that tracing has left a weak reference to."""
    module = WideDit().eval()
    pack(module)
    twins = Twins(module)
    for dtype in (torch.float32, torch.float64, torch.float32):
        twins.both(lambda m, dtype=dtype: m.to(dtype))
        assert twins.compiled.modulation.weight.scale.dtype == dtype
        for step in (3.0, 2.0, 1.0):
            twins.check(**as_dtype(wide_inputs(0, step), dtype))
    assert twins.report.fallbacks == []


@pytest.mark.parametrize("first", ["compiled first", "quantised first"])
@pytest.mark.parametrize(
    ("config", "dtype", "options"),
    [
        ("Int8WeightOnlyConfig", torch.float32, {}),
        ("Int8DynamicActivationInt8WeightConfig", torch.float32, {}),
        ("Float8WeightOnlyConfig", torch.bfloat16, {}),
        ("IntxWeightOnlyConfig", torch.bfloat16, {}),
        ("IntxWeightOnlyConfig", torch.bfloat16, {"weight_dtype": torch.int4}),
    ],
)
def test_weights_quantised_by_torchao(config: str, dtype: torch.dtype, options: dict[str, Any], first: str) -> None:
    quantisation = pytest.importorskip("torchao.quantization")

    def quantise(module: nn.Module) -> None:
        quantisation.quantize_(module, getattr(quantisation, config)(**options))

    def check(seed: int, step: float) -> torch.Tensor:
        return twins.check(**as_dtype(wide_inputs(seed, step), dtype))  # type: ignore[no-any-return]

    module = WideDit().eval().to(dtype)
    if first == "quantised first":
        quantise(module)
    twins = Twins(module)
    if first == "compiled first":
        plain = check(0, 3.0)
        twins.both(quantise)
        assert not torch.equal(check(0, 3.0), plain)
    before = twins.runs("request")
    for seed in (1, 2):
        for step in (3.0, 2.0, 1.0):
            check(seed, step)
    assert twins.runs("request") == before + 2
    twins.both(lambda m: m._apply(torch.clone))  # As ``.to(device)`` does it, by ``swap_tensors``.
    check(2, 3.0)
    assert twins.report.fallbacks == []
