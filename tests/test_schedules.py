"""Real pipelines under every kind of schedule, weights kept and released: the untouched pipeline's bits."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor

from dithoist import compile_pipeline, report
from dithoist.models.small import build_pipeline, example_call
from dithoist.runtime import identity, release, staged

FAMILIES = ("flux", "qwen-image", "sd3", "wan", "glm-image", "ideogram-4")
CAT, DOG = 'a sign that says "CAT"', 'a wall with "DOGS" on it'


class Pair:
    """A pipeline as it is, and a compiled copy that must give the same bits."""

    def __init__(self, name: str, pipe: DiffusionPipeline | None = None, **options: Any) -> None:
        self.name = name
        self.untouched = pipe or build_pipeline(name)
        self.compiled = copy.deepcopy(self.untouched)
        compile_pipeline(self.compiled, backend="eager", strict=True, **options)

    def check(self, **call: Any) -> None:
        extra = {k: call.pop(k) for k in ("image", "strength", "sigmas") if k in call}
        expected = self.untouched(**example_call(self.name, **call), **extra, return_dict=False)[0]
        actual = self.compiled(**example_call(self.name, **call), **extra, return_dict=False)[0]
        assert torch.equal(actual, expected), f"{call}: largest error {(actual - expected).abs().max()}"

    def both(self, change: Any) -> None:
        change(self.untouched)
        change(self.compiled)

    @property
    def denoisers(self) -> list[Any]:
        return report(self.compiled).denoisers


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "LEAST_BYTES", 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_and_step_counts_in_turn_with_released_weights(name: str) -> None:
    pair = Pair(name, release_weights=True)
    for prompt, steps in ((CAT, 3), (DOG, 3), (CAT, 5), (DOG, 3)):
        pair.check(prompt=prompt, steps=steps)
    for denoiser in pair.denoisers:
        assert denoiser.bytes_released > 0
        assert denoiser.fallbacks == []


@pytest.mark.parametrize("name", [*FAMILIES, "pixart", "hunyuan-video", "lumina-2"])
def test_fast_is_as_exact_as_promised(name: str) -> None:
    """A picture of three steps in float32: errors of single products, carried through a small random model."""
    pair = Pair(name, numerics="fast")
    for prompt in (CAT, DOG):
        call = {"prompt": prompt, "steps": 3}
        expected = pair.untouched(**example_call(name, **call), return_dict=False)[0]
        actual = pair.compiled(**example_call(name, **call), return_dict=False)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    notes = [n for d in pair.denoisers for g in d.graphs for n in g.notes if n.startswith("rows")]
    assert notes == []


FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
SCHEDULERS = {
    "Euler": lambda: diffusers.EulerDiscreteScheduler(),
    "Heun": lambda: diffusers.HeunDiscreteScheduler(),
    "DPM++ multistep": lambda: diffusers.DPMSolverMultistepScheduler(**FLOW),
    "DPM++ singlestep": lambda: diffusers.DPMSolverSinglestepScheduler(**FLOW),
    "UniPC": lambda: diffusers.UniPCMultistepScheduler(**FLOW),
    "flow matching Euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow matching Heun": lambda: diffusers.FlowMatchHeunDiscreteScheduler(),
}


@pytest.mark.filterwarnings("ignore:.*scale_model_input")
@pytest.mark.parametrize("release_weights", [False, True])
def test_schedulers_in_turn(release_weights: bool) -> None:
    pair = Pair("wan", release_weights=release_weights)
    for make in SCHEDULERS.values():
        pair.both(lambda pipe, make=make: setattr(pipe, "scheduler", make()))
        for prompt, steps in ((CAT, 3), (DOG, 4)):
            pair.check(prompt=prompt, steps=steps)


@pytest.mark.parametrize("release_weights", [False, True])
def test_custom_sigmas_and_pictures_to_start_from(release_weights: bool) -> None:
    text_to_image = build_pipeline("flux")
    pair = Pair("flux", text_to_image, release_weights=release_weights)
    pair.check(prompt=CAT, steps=3, sigmas=[1.0, 0.6, 0.1])
    pair.check(prompt=DOG, steps=3, sigmas=[1.0, 0.5, 0.1])
    image_to_image = diffusers.FluxImg2ImgPipeline(**text_to_image.components)
    # Its VAE would say so; given latents, it is not asked for more.
    image_to_image.latent_channels = channels = 4
    image_to_image.image_processor = VaeImageProcessor(vae_latent_channels=channels)
    image_to_image.set_progress_bar_config(disable=True)
    pair = Pair("flux", image_to_image, release_weights=release_weights)
    picture = torch.randn(1, channels, 8, 8)
    for prompt, strength in ((CAT, 0.6), (DOG, 0.6), (DOG, 0.9), (CAT, 0.3)):
        pair.check(prompt=prompt, steps=6, image=picture, strength=strength)


def test_rows_are_made_before_the_loop_and_weights_read_once_a_picture() -> None:
    """Flux's rows depend on the prompt; with weights away, all of a picture's are made at its first step."""
    pair = Pair("flux", release_weights=True)
    pair.check(prompt=CAT, steps=8)
    runs = pair.denoisers[0].graphs[0].by_time["request+schedule"].runs
    before = pair.denoisers[0].bytes_read_back
    pair.check(prompt=DOG, steps=8)
    (denoiser,) = pair.denoisers
    read = denoiser.bytes_read_back - before
    made = denoiser.graphs[0].by_time["request+schedule"].runs - runs
    assert made == 8, "the negative prompt is the one it was"
    # Once for the rows, and once for each guidance branch to see whether they changed.
    assert read <= 3 * denoiser.bytes_released


@pytest.mark.parametrize("name", ["flux", "qwen-image", "sd3", "wan"])
def test_on_an_accelerator_the_loop_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (identity, staged):
        monkeypatch.setattr(module, "reads_wait", lambda device: True)
    pair = Pair(name)
    steps = 8
    for prompt in (CAT, DOG):
        pair.check(prompt=prompt, steps=steps)
    reads = []
    for count in (steps, 4 * steps, 4 * steps):
        before = pair.denoisers[0].host_reads
        pair.check(prompt=CAT, steps=count)
        reads.append(pair.denoisers[0].host_reads - before)
    assert reads[0] == reads[2] > 0, "as often in a long loop as in a short one"
    assert reads[1] <= 2 * reads[0], "a schedule that was never seen"
