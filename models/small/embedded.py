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
from diffusers import (
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SCMScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel

from .common import randomize
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
        guidance: the arguments that guide, with their values. None where a model is made to do without.
        call: arguments of every call.
        config: values of the denoisers' configuration that differ from those of the small denoiser.
        parts: makes the other components, and what else the class is built from.
        unguided: value of the arguments that guide at which there is no guidance.
    """

    class_name: str
    denoisers: Mapping[str, str]
    scheduler: Callable[[], Any]
    text: Callable[[Prompts], dict[str, Any]]
    guidance: Mapping[str, float]
    call: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    parts: Callable[[], dict[str, Any]] = dict
    unguided: float = 1.0

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
        if not (guidance and self.guidance):
            return {**arguments, **dict.fromkeys(self.guidance, self.unguided)}
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


def _tokens(width: str) -> Callable[[Prompts], dict[str, Any]]:
    return lambda p: {"prompt_embeds": p.tokens(width)}


def _masked(width: str) -> Callable[[Prompts], dict[str, Any]]:
    return lambda p: {"prompt_embeds": p.tokens(width), "prompt_attention_mask": p.mask()}


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


def _chroma_text(p: Prompts) -> dict[str, Any]:
    return {"prompt_embeds": p.tokens("joint_attention_dim"), "prompt_attention_mask": p.mask(p.dtype)}


def _hunyuan_text(p: Prompts) -> dict[str, Any]:
    return {**_masked("text_embed_dim")(p), "pooled_prompt_embeds": p.pooled("pooled_projection_dim")}


def _z_text(p: Prompts) -> dict[str, Any]:
    """Each prompt as long as it is."""
    return {"prompt_embeds": [row[:n] for row, n in zip(p.tokens("cap_feat_dim"), p.lengths, strict=True)]}


def _audio_text(p: Prompts) -> dict[str, Any]:
    return {"prompt_embeds": p.tokens("cross_attention_input_dim"), "attention_mask": p.mask()}


def _audio_parts() -> dict[str, Any]:
    """A VAE for its sampling rate, and what embeds the times of beginning and end."""
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 2],
        channel_multiples=[1, 2],
        decoder_channels=4,
        decoder_input_channels=8,
        audio_channels=1,
        sampling_rate=8,
    )
    return {"vae": vae, "projection_model": StableAudioProjectionModel(40, 40, 0, 512)}


def _picture_vae() -> Any:
    return diffusers.AutoencoderKL(**_VAE, latent_channels=4, shift_factor=0.1)


def _flux_controlnet_parts() -> dict[str, Any]:
    config = {**DENOISERS["flux"].tiny, "num_layers": 1, "num_single_layers": 1}
    return {"vae": _picture_vae(), "controlnet": randomize(diffusers.FluxControlNetModel(**config))}


def _sd3_controlnet_parts() -> dict[str, Any]:
    config = {**DENOISERS["sd3"].tiny, "num_layers": 1}
    return {"vae": _picture_vae(), "controlnet": randomize(diffusers.SD3ControlNetModel(**config))}


def _flux_2_parts() -> dict[str, Any]:
    """A VAE for its latents' statistics."""
    return {"vae": diffusers.AutoencoderKLFlux2(**_VAE, latent_channels=4), "is_distilled": False}


# It reduces a picture by 8, as those of checkpoints do.
_VAE: Mapping[str, Any] = {
    "block_out_channels": (4, 4, 4, 4),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
_PICTURE = {"height": 64, "width": 64}
# A picture to follow, but not in the last steps.
_CONTROL = {"control_image": torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64), "control_guidance_end": 0.7}
# Neither another size that the checkpoint knows, nor the default negative prompt.
_AS_GIVEN = {"use_resolution_binning": False, "negative_prompt": None}
_VIDEO = {"height": 32, "width": 32, "num_frames": 5}
_DPM_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
_WAN = Embedded(
    "WanPipeline",
    {"transformer": "wan"},
    _unipc,
    _tokens("text_dim"),
    {"guidance_scale": 5.0},
    _VIDEO,
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
    "flux-controlnet": Embedded(
        "FluxControlNetPipeline",
        {"transformer": "flux"},
        _shifted(base_shift=0.5, max_shift=1.15),
        _joint_and_pooled,
        {"true_cfg_scale": 3.0},
        {**_PICTURE, **_CONTROL, "guidance_scale": 3.5},
        parts=_flux_controlnet_parts,
    ),
    "sd3-controlnet": Embedded(
        "StableDiffusion3ControlNetPipeline",
        {"transformer": "sd3"},
        _shifted(shift=3.0),
        _joint_and_pooled,
        {"guidance_scale": 7.0},
        {**_PICTURE, **_CONTROL},
        parts=_sd3_controlnet_parts,
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
    "flux-2-klein": Embedded(
        "Flux2KleinPipeline",
        {"transformer": "flux-2"},
        _shifted(base_shift=0.5, max_shift=1.15, shift=3.0),
        _tokens("joint_attention_dim"),
        {"guidance_scale": 4.0},
        _PICTURE,
        {"guidance_embeds": False},
        _flux_2_parts,
    ),
    "chroma": Embedded(
        "ChromaPipeline",
        {"transformer": "chroma"},
        _shifted(base_shift=0.5, max_shift=1.15),
        _chroma_text,
        {"guidance_scale": 5.0},
        _PICTURE,
    ),
    "aura-flow": Embedded(
        "AuraFlowPipeline",
        {"transformer": "aura-flow"},
        _shifted(shift=1.73),
        _masked("joint_attention_dim"),
        {"guidance_scale": 3.5},
        _PICTURE,
    ),
    "cogview-4": Embedded(
        "CogView4Pipeline",
        {"transformer": "cogview-4"},
        _shifted(base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
        _tokens("text_embed_dim"),
        {"guidance_scale": 5.0},
        _PICTURE,
    ),
    "lumina-2": Embedded(
        "Lumina2Pipeline",
        {"transformer": "lumina-2"},
        _shifted(shift=6.0),
        _masked("cap_feat_dim"),
        {"guidance_scale": 4.0},
        _PICTURE,
    ),
    "z-image": Embedded(
        "ZImagePipeline",
        {"transformer": "z-image"},
        _shifted(shift=6.0),
        _z_text,
        {"guidance_scale": 5.0},
        _PICTURE,
        unguided=0.0,
    ),
    "pixart": Embedded(
        "PixArtSigmaPipeline",
        {"transformer": "pixart"},
        DPMSolverMultistepScheduler,
        _masked("caption_channels"),
        {"guidance_scale": 4.5},
        {**_PICTURE, **_AS_GIVEN},
    ),
    # A checkpoint that is told the picture's size, in a dict of tensors.
    "pixart-alpha": Embedded(
        "PixArtAlphaPipeline",
        {"transformer": "pixart"},
        DPMSolverMultistepScheduler,
        _masked("caption_channels"),
        {"guidance_scale": 4.5},
        {**_PICTURE, **_AS_GIVEN},
        {"sample_size": 128, "use_additional_conditions": True, "num_attention_heads": 3, "cross_attention_dim": 48},
    ),
    "sana": Embedded(
        "SanaPipeline",
        {"transformer": "sana"},
        lambda: DPMSolverMultistepScheduler(**_DPM_FLOW),
        _masked("caption_channels"),
        {"guidance_scale": 4.5},
        {"height": 128, "width": 128, **_AS_GIVEN},
        {"guidance_embeds": False, "timestep_scale": 1.0},
    ),
    "sana-sprint": Embedded(
        "SanaSprintPipeline",
        {"transformer": "sana"},
        SCMScheduler,
        _masked("caption_channels"),
        {},
        {"height": 128, "width": 128, "use_resolution_binning": False, "intermediate_timesteps": None},
    ),
    "hunyuan-video": Embedded(
        "HunyuanVideoPipeline",
        {"transformer": "hunyuan-video"},
        _shifted(shift=7.0),
        _hunyuan_text,
        {"true_cfg_scale": 3.0},
        _VIDEO,
    ),
    "ltx-video": Embedded(
        "LTXPipeline",
        {"transformer": "ltx-video"},
        _shifted(base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1),
        _masked("caption_channels"),
        {"guidance_scale": 3.0},
        {"height": 96, "width": 96, "num_frames": 9},
    ),
    # Checkpoints have the stochastic scheduler of this kind, which needs a further package.
    "stable-audio": Embedded(
        "StableAudioPipeline",
        {"transformer": "stable-audio"},
        lambda: EDMDPMSolverMultistepScheduler(
            sigma_min=0.3, sigma_max=500, sigma_data=1.0, sigma_schedule="exponential", prediction_type="v_prediction"
        ),
        _audio_text,
        {"guidance_scale": 7.0},
        {},
        {"global_states_input_dim": 80},
        _audio_parts,
    ),
}
"""Pipelines by short name."""
