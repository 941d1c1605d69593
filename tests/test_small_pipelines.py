"""The small pipelines are worth testing against: they run, repeat, and react to everything they are given."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch.nn.utils import parameters_to_vector

from dithoist.models.small import EMBEDDED, FAMILIES, build_pipeline, example_call

NAMES = sorted(FAMILIES)
OTHER = 'A dog beside a door with a sign that says "CLOSED"'
EVERY_KIND = [(name, dtype) for name in NAMES for dtype in (torch.float32, torch.bfloat16)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tiny operations of the prior model cost more to share than to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=EVERY_KIND, ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('torch.')}")
def kind(request: pytest.FixtureRequest) -> tuple[str, DiffusionPipeline]:
    name, dtype = request.param
    return name, build_pipeline(name, dtype=dtype)


def latents(pipe: DiffusionPipeline, name: str, *, extra: dict[str, Any] | None = None, **call: Any) -> torch.Tensor:
    images = pipe(**example_call(name, **call), **(extra or {})).images
    assert isinstance(images, torch.Tensor)
    assert images.isfinite().all()
    return images.float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_latents_repeat_and_react(kind: tuple[str, DiffusionPipeline]) -> None:
    name, pipe = kind
    first = latents(pipe, name)
    assert 0.5 < first.std() < 10
    assert torch.equal(latents(pipe, name), first)
    assert distance(latents(pipe, name, prompt=OTHER), first) > 0.03
    assert distance(latents(pipe, name, seed=1), first) > 0.5
    assert distance(latents(pipe, name, guidance=False), first) > 0.05


def test_batch_of_two_prompts(kind: tuple[str, DiffusionPipeline]) -> None:
    name, pipe = kind
    one, two = latents(pipe, name, prompt=["A plain door", OTHER], steps=2)
    assert one.shape == latents(pipe, name, steps=2)[0].shape
    assert distance(one, two) > 0.5


def test_picture(kind: tuple[str, DiffusionPipeline]) -> None:
    name, pipe = kind
    first, again = (pipe(**example_call(name, output_type="pil")).images[0] for _ in range(2))
    assert first.size == (64, 64)
    assert first.tobytes() == again.tobytes()
    assert len(set(first.tobytes())) > 50  # not one flat colour


@pytest.mark.parametrize("name", [*NAMES, *EMBEDDED])
def test_weights_follow_the_seed_and_leave_the_global_generator_alone(name: str) -> None:
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    pipes = [build_pipeline(name, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    for key, component in pipes[0].components.items():
        if isinstance(component, torch.nn.Module):
            assert not component.training
            weights, again, other = (parameters_to_vector(getattr(p, key).parameters()) for p in pipes)
            assert torch.equal(weights, again)
            assert not torch.equal(weights, other)


def test_glm_image_reacts_to_prior_tokens_and_to_text_alone() -> None:
    pipe = build_pipeline("glm-image")
    prior = torch.arange(16).reshape(1, 16)
    first = latents(pipe, "glm-image", extra={"prior_token_ids": prior})
    assert distance(latents(pipe, "glm-image", extra={"prior_token_ids": prior + 16}), first) > 0.1
    assert distance(latents(pipe, "glm-image", prompt=OTHER, extra={"prior_token_ids": prior}), first) > 0.03


def test_ideogram_4_has_two_transformers() -> None:
    pipe = build_pipeline("ideogram-4")
    pairs = zip(pipe.transformer.parameters(), pipe.unconditional_transformer.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs)


def test_the_transformers_of_wan_2_2_have_weights_of_their_own() -> None:
    pipe = build_pipeline("wan-2.2")
    first, second = (parameters_to_vector(m.parameters()) for m in (pipe.transformer, pipe.transformer_2))
    assert not torch.equal(first, second)


def test_embeddings_follow_from_the_prompt_alone() -> None:
    first, again, other = (example_call("flux", prompt=prompt)["prompt_embeds"] for prompt in ("cat", "cat", "dog"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    both = example_call("flux", prompt=["cat", "dog"], dtype=torch.bfloat16)
    assert torch.equal(both["prompt_embeds"], torch.cat([first, other]).bfloat16())
    assert not torch.equal(*both["pooled_prompt_embeds"])


def test_only_those_with_text_encoders_have_a_demo() -> None:
    with pytest.raises(ValueError, match="'flux' has no configuration for 'demo'"):
        build_pipeline("flux", "demo")


@pytest.mark.parametrize(("name", "close"), [("glm_image", "'glm-image'"), ("Ideogram4", "'ideogram-4'"), ("zzz", "")])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str, close: str) -> None:
    with pytest.raises(ValueError, match="Known names: glm-image, ideogram-4") as caught:
        example_call(name)
    assert close in str(caught.value)
    with pytest.raises(ValueError, match=f"'{name}'"):
        build_pipeline(name)
