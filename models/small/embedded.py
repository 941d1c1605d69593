"""Small diffusers pipelines whose prompts are given as embeddings, so that they need no text encoder.

Pipeline, scheduler and denoisers are of the classes a checkpoint loads; a denoiser's configuration is the tiny one of
`denoisers.py`. There is a VAE only where the pipeline cannot do without one, so what a call gives is latents.

A pipeline is one entry of `EMBEDDED`. `pipelines.py` builds and calls these as it does those with text encoders.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from .denoisers import DENOISERS, build_denoiser

LENGTH = 16
"""Text tokens of a prompt, padding included; each byte is one, as far as there is room."""

NEGATIVE = "blurry, grey"
"""What guidance leads away from."""


@dataclass(frozen=True)
class Embedded:
    """A pipeline that is given embeddings.

    Attributes:
        class_name: of the pipeline in diffusers.
        denoisers: components that are called at each step, by the name of their small denoiser.
        scheduler: makes the scheduler a checkpoint of the family has.
        text: what a prompt is given as. Guidance needs a negative prompt, given alike as `negative_...`.
        guidance: the arguments that guide, with values above 1; at 1 there is no guidance.
        call: arguments of every call.
        config: values of the denoisers' configuration that differ from those of the small denoiser.
        parts: makes the other components, and what else the class is built from.
    """

    class_name: str
    denoisers: Mapping[str, str]
    scheduler: Callable[[], Any]
    text: Callable[[Prompts], dict[str, Any]]
    guidance: Mapping[str, float]
    call: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    parts: Callable[[], dict[str, Any]] = dict

    def build(self, dtype: torch.dtype, seed: int) -> DiffusionPipeline:
        """The pipeline; each denoiser has weights of its own."""
        kind = getattr(diffusers, self.class_name)
        built: dict[str, Any] = {
            component: build_denoiser(name, dtype=dtype, seed=seed + i, **self.config)
            for i, (component, name) in enumerate(self.denoisers.items())
        }
        built |= {"scheduler": self.scheduler(), **self.parts()}
        absent = [name for name in kind._get_signature_keys(kind)[0] if name not in built]
        pipe: DiffusionPipeline = kind(**dict.fromkeys(absent), **built)
        return pipe

    def arguments(self, prompts: list[str], guidance: bool, dtype: torch.dtype) -> dict[str, Any]:
        """What a call is given for `prompts`."""
        name = next(iter(self.denoisers.values()))
        config = {**DENOISERS[name].tiny, **self.config}
        arguments = {**self.call, **self.text(Prompts(prompts, config, dtype))}
        if not guidance:
            return {**arguments, **dict.fromkeys(self.guidance, 1.0)}
        nothing = self.text(Prompts([NEGATIVE] * len(prompts), config, dtype))
        return {**arguments, **{f"negative_{key}": value for key, value in nothing.items()}, **self.guidance}


@dataclass(frozen=True)
class Prompts:
    """Stands for a text encoder: embeddings that follow from the prompt alone.

    Attributes:
        texts: one for each picture.
        config: of the denoiser.
        dtype: of the embeddings.
    """

    texts: list[str]
    config: Mapping[str, Any]
    dtype: torch.dtype

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt that are not padding."""
        return [min(LENGTH, len(text.encode())) for text in self.texts]

    def tokens(self, width: str) -> torch.Tensor:
        """Embeddings ``[batch, LENGTH, config[width]]`` of all tokens, padding too."""
        return torch.stack([self._normal(text, LENGTH, self.config[width]) for text in self.texts])

    def mask(self, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Which tokens ``[batch, LENGTH]`` are not padding; padding is on the right."""
        return (torch.arange(LENGTH) < torch.tensor(self.lengths)[:, None]).to(dtype)

    def pooled(self, width: str) -> torch.Tensor:
        """Embeddings ``[batch, config[width]]`` of whole prompts."""
        return torch.stack([self._normal(f"pooled {text}", self.config[width]) for text in self.texts])

    def _normal(self, text: str, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        return torch.randn(shape, generator=generator).to(self.dtype)


def _shifted(**options: Any) -> Callable[[], Any]:
    """The usual scheduler, with a shift that is fixed or, given a base and a maximum, follows the picture's size."""
    return lambda: FlowMatchEulerDiscreteScheduler(use_dynamic_shifting="base_shift" in options, **options)


def _unipc() -> Any:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def _joint_and_pooled(p: Prompts) -> dict[str, Any]:
    return {
        "prompt_embeds": p.tokens("joint_attention_dim"),
        "pooled_prompt_embeds": p.pooled("pooled_projection_dim"),
    }


def _qwen_text(p: Prompts) -> dict[str, Any]:
    """As long as the longest prompt."""
    longest = max(p.lengths)
    return {
        "prompt_embeds": p.tokens("joint_attention_dim")[:, :longest],
        "prompt_embeds_mask": p.mask()[:, :longest],
    }


_PICTURE = {"height": 64, "width": 64}
_WAN = Embedded(
    "WanPipeline",
    {"transformer": "wan"},
    _unipc,
    lambda p: {"prompt_embeds": p.tokens("text_dim")},
    {"guidance_scale": 5.0},
    {"height": 32, "width": 32, "num_frames": 5},
)

EMBEDDED: Mapping[str, Embedded] = {
    "flux": Embedded(
        "FluxPipeline",
        {"transformer": "flux"},
        _shifted(base_shift=0.5, max_shift=1.15),
        _joint_and_pooled,
        {"true_cfg_scale": 3.0},
        {**_PICTURE, "guidance_scale": 3.5},
    ),
    "qwen-image": Embedded(
        "QwenImagePipeline",
        {"transformer": "qwen-image"},
        _shifted(base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02),
        _qwen_text,
        {"true_cfg_scale": 4.0},
        _PICTURE,
    ),
    "sd3": Embedded(
        "StableDiffusion3Pipeline",
        {"transformer": "sd3"},
        _shifted(shift=3.0),
        _joint_and_pooled,
        {"guidance_scale": 7.0},
        _PICTURE,
    ),
    "wan": _WAN,
    "wan-2.2": Embedded(
        "WanPipeline",
        {"transformer": "wan", "transformer_2": "wan"},
        _unipc,
        _WAN.text,
        {"guidance_scale": 4.0, "guidance_scale_2": 3.0},
        _WAN.call,
        # The second transformer takes the steps whose noise is below it.
        parts=lambda: {"boundary_ratio": 0.875},
    ),
}
"""Pipelines by short name."""
