"""The small denoisers are complete and worth testing against: they run, repeat, and react to all they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import diffusers.models.transformers
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dithoist.models.small import DENOISERS, Sizes, build_denoiser, example_calls
from dithoist.models.small.spec import no_request

# What the published configurations of the bench's families say where their classes' defaults say otherwise, and how
# many parameters the checkpoints have.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "flux": (11.90e9, {"guidance_embeds": True}),
    "qwen-image": (20.43e9, {}),
    "sd3": (
        8.06e9,
        {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "qk_norm": "rms_norm"},
    ),
    "wan": (14.29e9, {}),
    "pixart": (0.61e9, {"caption_channels": 4096, "use_additional_conditions": False}),
    "glm-image": (6.93e9, {"num_attention_heads": 32, "attention_head_dim": 128}),
    "ideogram-4": (9.28e9, {}),
    "hunyuan-video": (12.82e9, {}),
}
MODULATION = re.compile(r"norm\w*\.linear|_mod\.|time_proj|adaln")
NO_BFLOAT16 = {"sana-wm"}  # its camera rays refuse bfloat16 on a CPU


@pytest.fixture(scope="module", params=DENOISERS)
def built(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, build_denoiser(request.param)


def run(module: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    """The prediction; sound that comes with a picture, and caches, are left out."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        output = module(**call)
    prediction = output if isinstance(output, torch.Tensor) else output[0]
    return torch.cat([leaf.flatten().float() for leaf in tree_leaves(prediction)])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def request_of(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments that are the same objects in each call."""
    return {name: value for name, value in calls[0].items() if all(call[name] is value for call in calls)}


def times_of(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in call.items() if k == "t" or ("time" in k and isinstance(v, torch.Tensor))}


def test_outputs_repeat_and_react(built: tuple[str, nn.Module]) -> None:
    name, module = built
    calls = example_calls(name, module, steps=2)
    first, second = (run(module, call) for call in calls)
    assert first.isfinite().all()
    assert second.isfinite().all()
    assert 0.3 < second.std() < 10
    assert torch.equal(run(module, example_calls(name, module, steps=2)[1]), second)
    assert distance(first, second) > 0.3
    other = request_of(example_calls(name, module, steps=2, seed=1))
    if DENOISERS[name].request is not no_request:
        assert distance(run(module, {**calls[1], **other}), second) > 0.01
    # The second step of three has the latents of the second of two.
    assert distance(run(module, example_calls(name, module)[1]), second) > 0.003


def test_request_values_are_the_same_objects_and_timesteps_are_not(built: tuple[str, nn.Module]) -> None:
    name, module = built
    calls = example_calls(name, module)
    assert all(call.keys() == calls[0].keys() for call in calls)
    for argument in calls[0].keys() - request_of(calls).keys():
        assert len({id(call[argument]) for call in calls}) == len(calls)
    assert times_of(calls[0])
    for call, other in zip(calls, example_calls(name, module, seed=1), strict=True):
        assert all(torch.equal(times_of(other)[k], v) for k, v in times_of(call).items())


def test_sizes(built: tuple[str, nn.Module]) -> None:
    name, module = built
    run(module, example_calls(name, module, Sizes(tokens=64, prompt=16), steps=1)[0])
    assert run(module, example_calls(name, module, Sizes(batch=2), steps=1)[0]).isfinite().all()


@pytest.mark.parametrize("name", [name for name in DENOISERS if name not in NO_BFLOAT16])
def test_bfloat16(name: str) -> None:
    module = build_denoiser(name, dtype=torch.bfloat16)
    assert run(module, example_calls(name, module, steps=1)[0]).isfinite().all()


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    one, again, other = (build_denoiser("flux", seed=seed) for seed in (0, 0, 1))
    example_calls("flux", one)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not one.training
    for a, b, c in zip(one.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_parts_that_checkpoints_keep_in_float32_stay_so() -> None:
    dtypes = {name: p.dtype for name, p in build_denoiser("wan", dtype=torch.bfloat16).named_parameters()}
    assert dtypes["condition_embedder.time_embedder.linear_1.weight"] == torch.float32
    assert dtypes["blocks.0.attn1.to_q.weight"] == torch.bfloat16


@pytest.mark.parametrize("name", [name for name, entry in DENOISERS.items() if entry.blocks])
def test_depth(name: str) -> None:
    entry = DENOISERS[name]
    module = build_denoiser(name, blocks=2 * entry.tiny[entry.blocks[0]])
    assert {key: module.config[key] for key in entry.blocks} == {key: 2 * entry.tiny[key] for key in entry.blocks}


def test_several_kinds_of_blocks_keep_their_ratio() -> None:
    config = build_denoiser("flux", "bench", blocks=1).config
    assert (config.num_layers, config.num_single_layers) == (1, 2)
    with pytest.raises(ValueError, match="depth"):
        build_denoiser("hidream", blocks=4)


@pytest.mark.parametrize(("name", "close"), [("qwen_image", "'qwen-image'"), ("Flux", "'flux'"), ("zzz", "")])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str, close: str) -> None:
    with pytest.raises(ValueError, match="Known names: flux, qwen-image") as caught:
        build_denoiser(name)
    assert close in str(caught.value)
    with pytest.raises(ValueError, match=f"'{name}'"):
        example_calls(name, nn.Module())


def test_a_picture_is_square() -> None:
    with pytest.raises(ValueError, match="square"):
        example_calls("flux", build_denoiser("flux"), Sizes(tokens=15))


def on_meta(name: str, config: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = getattr(diffusers.models.transformers, DENOISERS[name].class_name)(**config)
    return module


def parameters(module: nn.Module, kind: re.Pattern[str] = re.compile("")) -> int:
    return sum(p.numel() for name, p in module.named_parameters() if kind.search(name))


def modulation(module: nn.Module) -> float:
    return parameters(module, MODULATION) / parameters(module)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_bench_configuration_has_the_proportions_of_the_published_one(name: str) -> None:
    entry = DENOISERS[name]
    assert entry.bench is not None
    size, config = PUBLISHED[name]
    published = on_meta(name, config)
    assert parameters(published) == pytest.approx(size, rel=0.01)
    bench = on_meta(name, entry.bench)
    assert modulation(bench) == pytest.approx(modulation(published), abs=0.03)
    depth = published.config[entry.blocks[0]] / entry.bench[entry.blocks[0]]
    as_deep = on_meta(name, {**entry.bench, **{key: round(depth * entry.bench[key]) for key in entry.blocks}})
    assert modulation(as_deep) == pytest.approx(modulation(published), abs=0.003)


def test_only_families_of_the_bench_have_a_configuration_for_it() -> None:
    assert {name for name, entry in DENOISERS.items() if entry.bench} == set(PUBLISHED)
    with pytest.raises(ValueError, match="bench"):
        build_denoiser("lumina", "bench")
