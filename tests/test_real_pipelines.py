"""Whole pipelines of every family, untouched against compiled: the same bits, and no graph more than it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from PIL import Image
from random_graphs import bits_equal

from dithoist import compile_pipeline, report
from dithoist.models.small import EMBEDDED, build_pipeline, example_call
from dithoist.runtime.report import DenoiserReport

CAT, DOG = "a red cat", "a wet dog"  # Of one length.


class Pair:
    """A pipeline as it is, and another with the same weights that is compiled."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.name = name
        self.dtype = dtype
        self.untouched = build_pipeline(name, dtype=dtype)
        self.compiled = compile_pipeline(build_pipeline(name, dtype=dtype), backend="eager", strict=True)

    def both(self, change: Callable[[Any], object]) -> None:
        """Apply `change(pipe)` to both."""
        change(self.untouched)
        change(self.compiled)

    def check(self, more: Callable[[], Mapping[str, Any]] = dict, **call: Any) -> torch.Tensor:
        """The latents of a call, which are the same for both. `more` makes further arguments, for each anew."""
        expected, actual = (self._run(pipe, more, call) for pipe in (self.untouched, self.compiled))
        assert expected.isfinite().all()
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), f"{call}: largest error {(actual - expected).abs().max()}"
        return actual

    def _run(self, pipe: Any, more: Callable[[], Mapping[str, Any]], call: Mapping[str, Any]) -> torch.Tensor:
        torch.manual_seed(0)
        arguments = example_call(self.name, dtype=self.dtype, **call) | dict(more())
        return pipe(**arguments, return_dict=False)[0]  # type: ignore[no-any-return]

    @property
    def denoisers(self) -> list[DenoiserReport]:
        return report(self.compiled).denoisers

    @property
    def graphs(self) -> list[int]:
        """How many graphs each denoiser has been captured as."""
        return [len(denoiser.graphs) for denoiser in self.denoisers]

    @property
    def hoisted_runs(self) -> list[dict[str, int]]:
        """How often each stage outside of the loop ran."""
        return [
            {time: work.runs for time, work in graph.by_time.items() if time != "step"}
            for denoiser in self.denoisers
            for graph in denoiser.graphs
        ]


# The host reads the lengths of prompts: there the graph breaks, and what comes after is not known by its arguments.
BREAKS = {"lumina-2": 3}


@pytest.mark.parametrize("name", EMBEDDED)
def test_latents_have_the_bits_of_the_untouched_pipeline(name: str) -> None:
    pair = Pair(name)
    cat = pair.check(prompt=CAT)
    assert torch.equal(pair.check(prompt=CAT), cat)
    graphs, runs = pair.graphs, pair.hoisted_runs
    assert not torch.equal(pair.check(prompt=CAT, seed=1), cat)
    if name not in BREAKS:
        assert pair.hoisted_runs == runs  # Another picture of the same prompt runs what is in the loop, no more.
    assert not torch.equal(pair.check(prompt=DOG), cat)
    stronger = {key: scale + 1 for key, scale in EMBEDDED[name].guidance.items()}
    assert torch.equal(pair.check(lambda: stronger, prompt=CAT), cat) == (not stronger)
    pair.check(prompt=CAT, steps=2)
    assert pair.graphs == graphs  # Prompt, seed, scale and number of steps compile nothing.
    unguided = [pair.check(prompt=prompt, guidance=False) for prompt in (CAT, DOG)]
    assert torch.equal(unguided[0], cat) == (not stronger)
    assert not torch.equal(*unguided)
    for denoiser in pair.denoisers:
        assert denoiser.fallbacks == []
        assert denoiser.graph_breaks == BREAKS.get(name, 0)
        assert not any(graph.demoted for graph in denoiser.graphs)
        assert sum(graph.hoisted_weights for graph in denoiser.graphs) > 0


@pytest.mark.parametrize("name", ["flux", "sd3", "wan", "stable-audio"])
def test_bfloat16(name: str) -> None:
    pair = Pair(name, torch.bfloat16)
    assert not torch.equal(*(pair.check(prompt=prompt, seed=1) for prompt in (CAT, DOG)))
    assert all(denoiser.fallbacks == [] for denoiser in pair.denoisers)


@pytest.mark.parametrize("name", ["qwen-image", "z-image"])
def test_prompts_of_any_length(name: str) -> None:
    """These give embeddings as long as the prompt: after the second length, one graph serves all."""
    pair = Pair(name)
    for prompt in (CAT, "a horse"):
        pair.check(prompt=prompt, guidance=False)
    graphs = pair.graphs
    for prompt in ("a big bird", "a cow", CAT):
        pair.check(prompt=prompt, guidance=False)
    assert pair.graphs == graphs
    assert all(denoiser.fallbacks == [] for denoiser in pair.denoisers)


def test_several_prompts_at_once_are_padded_and_masked() -> None:
    pair = Pair("qwen-image")
    short, long = pair.check(prompt=["a cow", "a horse"], guidance=False)
    assert not torch.equal(short, long)
    assert pair.denoisers[0].fallbacks == []


def test_wan_changes_to_its_second_transformer_at_the_boundary() -> None:
    pair = Pair("wan-2.2")
    for ratio, calls in ((0.875, [4, 4]), (0.0, [8, 0]), (1.0, [0, 8])):
        before = [sum(graph.calls for graph in denoiser.graphs) for denoiser in pair.denoisers]
        pair.both(lambda pipe, ratio=ratio: pipe.register_to_config(boundary_ratio=ratio))
        pair.check(prompt=CAT, steps=4)
        after = [sum(graph.calls for graph in denoiser.graphs) for denoiser in pair.denoisers]
        assert [a - b for a, b in zip(after, before, strict=True)] == calls
    assert pair.graphs == [1, 1]


@pytest.mark.parametrize("name", ["flux-controlnet", "sd3-controlnet"])
def test_residuals_of_a_controlnet_change_at_every_step(name: str) -> None:
    pair = Pair(name)
    followed = pair.check(prompt=CAT, steps=8)
    graphs = pair.graphs
    assert not torch.equal(pair.check(lambda: {"controlnet_conditioning_scale": 0.5}, prompt=CAT, steps=8), followed)
    assert not torch.equal(pair.check(lambda: {"control_guidance_end": 0.2}, prompt=CAT, steps=8), followed)
    assert pair.graphs == graphs
    (denoiser,) = pair.denoisers
    assert denoiser.fallbacks == []
    assert not any(graph.demoted for graph in denoiser.graphs)
    # Both branches are given the same residuals, so what is held is not theirs.
    assert denoiser.graphs[0].by_time["request"].runs <= 2


def test_sd3_skips_layers_in_an_extra_branch() -> None:
    """A third forward in some of the steps, with fewer blocks and half the batch."""
    pair = Pair("sd3")
    plain = pair.check(prompt=CAT, steps=5)
    skipping = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.1, "skip_layer_guidance_stop": 0.7}
    skipped = pair.check(lambda: skipping, prompt=CAT, steps=5)
    assert not torch.equal(skipped, plain)
    assert torch.equal(pair.check(prompt=CAT, steps=5), plain)
    assert pair.graphs == [2]


def ip_adapter() -> dict[str, Any]:
    """A checkpoint for the small Flux: embeddings of 24 become 4 tokens of width 40, read by its two double blocks."""
    generator = torch.Generator().manual_seed(0)

    def linear(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        weight, bias = torch.randn(rows, columns + 1, generator=generator).split([columns, 1], dim=1)
        return {f"{name}.weight": weight / columns**0.5, f"{name}.bias": bias[:, 0]}

    norm = {"norm.weight": torch.ones(40), "norm.bias": torch.zeros(40)}
    layers = [linear(f"{block}.to_{kind}_ip", 32, 40) for block in range(2) for kind in "kv"]
    return {
        "image_proj": {**linear("proj", 4 * 40, 24), **norm},
        "ip_adapter": {name: value for layer in layers for name, value in layer.items()},
    }


def looks(seed: int) -> Callable[[], dict[str, Any]]:
    """The arguments for a picture that an IP-adapter shall follow."""

    def make() -> dict[str, Any]:
        picture = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(seed))
        return {"ip_adapter_image_embeds": [picture], "negative_ip_adapter_image_embeds": [torch.zeros(1, 1, 24)]}

    return make


def test_an_ip_adapter_is_loaded_scaled_and_unloaded() -> None:
    """The pipeline puts its embeddings into a dict, from which the model takes them out at each call."""
    pair = Pair("flux")
    plain = pair.check(prompt=CAT)
    pair.both(lambda pipe: pipe.transformer._load_ip_adapter_weights(ip_adapter()))
    first, second = (pair.check(looks(seed), prompt=CAT) for seed in (0, 1))
    assert not torch.equal(first, plain)
    assert not torch.equal(second, first)
    for scale in (0.3, 0.6):
        pair.both(lambda pipe, scale=scale: pipe.set_ip_adapter_scale(scale))
        assert not torch.equal(pair.check(looks(0), prompt=CAT, steps=6), first)
    (denoiser,) = pair.denoisers
    assert len(denoiser.graphs) == 3  # Without it, with it, and with a scale that is known only when called.
    assert denoiser.fallbacks == []
    assert not any(graph.demoted for graph in denoiser.graphs)
    pair.both(lambda pipe: pipe.unload_ip_adapter())
    assert torch.equal(pair.check(prompt=CAT), plain)


def test_a_cache_of_diffusers_keeps_its_branches_apart() -> None:
    """Its hooks skip blocks by what the latents were, and keep that by the name of `cache_context`."""
    pair = Pair("wan")
    plain = pair.check(prompt=CAT, steps=6)
    pair.both(lambda pipe: pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5)))
    cached = pair.check(prompt=CAT, steps=6)
    assert not torch.equal(cached, plain)
    pair.check(prompt=DOG, steps=6)
    assert torch.equal(pair.check(prompt=CAT, steps=6), cached)
    pair.both(lambda pipe: pipe.transformer.disable_cache())
    assert torch.equal(pair.check(prompt=CAT, steps=6), plain)
    assert pair.denoisers[0].fallbacks == []


def pictures(seed: int, count: int = 1) -> Callable[[], dict[str, Any]]:
    """The arguments for pictures that GLM-Image shall edit, with the tokens its prior would make of them."""

    def make() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(256, (count, 64, 64, 3), generator=generator).to(torch.uint8)
        return {
            "image": [Image.fromarray(each.numpy()) for each in pixels],
            "prior_token_image_ids": [torch.randint(64, (16 * count,), generator=generator)],
            "source_image_grid_thw": [torch.tensor([[1, 4, 4]] * count)],
            "prior_token_ids": torch.randint(64, (1, 16), generator=generator),
        }

    return make


def test_glm_image_edits_pictures_through_its_cache_of_keys_and_values() -> None:
    """A Python object holds them: written for each picture, read with guidance's prompt, skipped without one."""
    pair = Pair("glm-image")
    first, second = (pair.check(pictures(seed), prompt=CAT) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert pair.graphs == [3]
    assert not torch.equal(pair.check(pictures(0), prompt=DOG, steps=6), first)
    assert torch.equal(pair.check(pictures(0), prompt=CAT), first)
    pair.check(pictures(0), prompt=CAT, guidance=False)
    assert pair.graphs == [3]
    pair.check(pictures(2, count=2), prompt=CAT)
    (denoiser,) = pair.denoisers
    assert denoiser.fallbacks == []
    assert denoiser.graph_breaks == 0
    assert not any(graph.demoted for graph in denoiser.graphs)


ODD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("place", ["latents", "prompt", "hoisted weight", "weight of the loop"])
def test_nan_and_infinity_come_out_as_they_do_untouched(place: str, value: float) -> None:
    pair = Pair("sd3")
    clean = pair.check(prompt=CAT)
    more: dict[str, torch.Tensor] = {}
    if place == "latents":
        more["latents"] = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
        more["latents"][0, 0, 0, 0] = value
    elif place == "prompt":
        more["prompt_embeds"] = example_call("sd3", prompt=CAT)["prompt_embeds"].clone()
        more["prompt_embeds"][0, 0, 0] = value
    else:
        name = "transformer_blocks.0." + ("norm1.linear" if place == "hoisted weight" else "attn.to_q")
        with torch.no_grad():
            pair.both(lambda pipe: pipe.transformer.get_submodule(name).weight[0, 0].fill_(value))
    drawn = [pair._run(pipe, lambda: copy.deepcopy(more), {"prompt": CAT}) for pipe in (pair.untouched, pair.compiled)]
    assert not bool(drawn[0].isfinite().all())
    assert bits_equal(*drawn)
    assert all(denoiser.fallbacks == [] for denoiser in pair.denoisers)
