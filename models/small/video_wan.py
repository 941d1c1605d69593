"""Denoisers of videos: Wan and the classes that grew out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from .spec import HEADS, Denoiser, Draw, video_step

# With an image as condition, attention takes all but the last 512 tokens of the context for the image's.
_TEXT = 512
_IMAGE = 257


def _wan_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.padded_text(d.config.text_dim), "attention_kwargs": None}


def _wan_step(d: Draw, sigma: float) -> dict[str, Any]:
    return video_step(d, sigma, torch.int64)


def _image_request(d: Draw) -> dict[str, Any]:
    text = d.normal(d.batch, _TEXT, d.config.text_dim)
    text[:, d.prompt :] = 0
    return {
        "encoder_hidden_states": text,
        "encoder_hidden_states_image": d.normal(d.batch, _IMAGE, d.config.image_dim),
        "attention_kwargs": None,
    }


def _vace_request(d: Draw) -> dict[str, Any]:
    control = d.video(d.config.vace_in_channels)
    scale = torch.tensor([1.0] * len(d.config.vace_layers)).to(d.dtype)
    return {**_wan_request(d), "control_hidden_states": control, "control_hidden_states_scale": scale}


def _animate_request(d: Draw) -> dict[str, Any]:
    """The first frame is the reference, the others follow a pose and a face, four pictures of it a frame."""
    c = d.config
    frames, height, width = d.grid
    size = c.motion_encoder_size
    return {
        **_image_request(d),
        "pose_hidden_states": d.normal(d.batch, c.latent_channels, frames - 1, 2 * height, 2 * width),
        "face_pixel_values": d.normal(d.batch, 3, 4 * (frames - 2) + 1, size, size),
        "motion_encode_batch_size": c.motion_encoder_batch_size,
    }


def _animate_2_request(d: Draw) -> dict[str, Any]:
    """After the pass over the driving video, which leaves keys and values of every block behind."""
    c = d.config
    frames, height, width = d.grid
    seen = (frames - 1) * height * width
    cache = WanAnimate2KVCache(c.num_layers)
    for layer in range(c.num_layers):
        cache.get(layer).store(*(d.normal(1, seen, c.num_heads, c.dim // c.num_heads) for _ in range(2)))
    return {
        "encoder_hidden_states": [d.normal(d.prompt, c.text_dim)],
        "encoder_hidden_states_image": d.normal(1, _IMAGE, 1280),
        "condition_latents": [d.normal(c.in_dim - c.out_dim, frames, 2 * height, 2 * width)],
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "seq_len": d.tokens,
        "reference_grid_sizes": torch.tensor([[frames - 1, height, width]]),
        "origin_len": 4 * (frames - 2) + 1,
        "origin_area": [16 * height, 16 * width],
        "is_uncondtion": False,
    }


def _animate_2_step(d: Draw, sigma: float) -> dict[str, Any]:
    frames, height, width = d.grid
    return {
        "hidden_states": [d.normal(d.config.out_dim, frames, 2 * height, 2 * width)],
        "timestep": torch.stack([d.t(sigma)]),
    }


def _flow_map_step(d: Draw, sigma: float) -> dict[str, Any]:
    """With the timestep the step will arrive at, and a timestep for every frame."""
    frames, height, width = d.grid
    return {
        "hidden_states": d.normal(d.batch, frames, d.config.in_channels, 2 * height, 2 * width),
        "timestep": d.timestep(sigma).unsqueeze(-1).repeat((1, frames)),
        "r_timestep": d.timestep(d.next_sigma(sigma)).unsqueeze(-1).repeat((1, frames)),
    }


def _far_request(d: Draw) -> dict[str, Any]:
    """The first part of a video, before which nothing is cached."""
    frames, _, _ = d.grid
    heads, width = d.config.num_attention_heads, d.config.attention_head_dim
    full, small = (torch.zeros(2, d.batch, heads, n, width, dtype=d.dtype) for n in (d.tokens, d.tokens // 4))
    cache = {i: {"full_cache": full.clone(), "compressed_cache": small.clone()} for i in range(d.config.num_layers)}
    return {**_wan_request(d), "chunk_partition": [frames], "kv_cache": cache}


def _far_step(d: Draw, sigma: float) -> dict[str, Any]:
    # The module writes into the flags, so the pipeline copies them for each call.
    return {**_flow_map_step(d, sigma), "kv_cache_flag": {"num_cached_chunks": 0, "is_cache_step": False}}


def _forcing_request(d: Draw) -> dict[str, Any]:
    return {**_wan_request(d), "enable_diffusion_forcing": True, "fps": [0] * d.batch}


def _forcing_step(d: Draw, sigma: float) -> dict[str, Any]:
    """Every frame has a timestep of its own."""
    frames, _, _ = d.grid
    return {
        "hidden_states": d.video(d.config.in_channels),
        "timestep": d.t(sigma, torch.int64).repeat(frames).expand(d.batch, -1).clone(),
    }


def _helios_request(d: Draw) -> dict[str, Any]:
    """The second chunk of a video: frames before it, at three resolutions, come along."""
    frames, height, width = d.grid
    sizes = {"long": 4, "mid": 2, "short": 1}
    prefix, *history, new = torch.arange(1 + sum(sizes.values()) + frames).split([1, *sizes.values(), frames])
    history[-1] = torch.cat([prefix, history[-1]])
    request: dict[str, Any] = {**_wan_request(d), "indices_hidden_states": new[None]}
    for (name, _), indices in zip(sizes.items(), history, strict=True):
        shape = (d.batch, d.config.in_channels, len(indices), 2 * height, 2 * width)
        request[f"latents_history_{name}"] = d.normal(*shape)
        request[f"indices_latents_history_{name}"] = indices[None]
    return request


_TINY = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "text_dim": 40,
    "freq_dim": 32,
    "ffn_dim": 64,
}
_IMAGE_TINY = {**_TINY, "image_dim": 24, "added_kv_proj_dim": 32, "rope_max_seq_len": 64}

DENOISERS: Mapping[str, Denoiser] = {
    "wan": Denoiser(
        "WanTransformer3DModel",
        {**_TINY, "rope_max_seq_len": 64},
        _wan_request,
        _wan_step,
        {
            "num_layers": 12,
            "attention_head_dim": 64,
            "num_attention_heads": 6,
            "text_dim": 307,
            "freq_dim": 256,
            "ffn_dim": 1037,
        },
        ("num_layers",),
    ),
    "wan-vace": Denoiser(
        "WanVACETransformer3DModel",
        {**_TINY, "rope_max_seq_len": 64, "vace_layers": [0, 1], "vace_in_channels": 6},
        _vace_request,
        _wan_step,
        blocks=("num_layers",),
    ),
    "wan-animate": Denoiser(
        "WanAnimateTransformer3DModel",
        {
            **_IMAGE_TINY,
            "in_channels": 12,
            "latent_channels": 4,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 8,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 1,
        },
        _animate_request,
        _wan_step,
        blocks=("num_layers",),
    ),
    "wan-animate-2": Denoiser(
        "WanAnimate2Transformer3DModel",
        {
            "text_len": 16,
            "in_dim": 12,
            "dim": 32,
            "ffn_dim": 64,
            "freq_dim": 32,
            "text_dim": 40,
            "out_dim": 4,
            "num_heads": 2,
            "num_layers": 2,
        },
        _animate_2_request,
        _animate_2_step,
        blocks=("num_layers",),
    ),
    "chrono-edit": Denoiser(
        "ChronoEditTransformer3DModel",
        {**_IMAGE_TINY, "in_channels": 12},
        _image_request,
        _wan_step,
        blocks=("num_layers",),
    ),
    "any-flow": Denoiser(
        "AnyFlowTransformer3DModel",
        {**_TINY, "rope_max_seq_len": 64},
        _wan_request,
        _flow_map_step,
        blocks=("num_layers",),
    ),
    "any-flow-far": Denoiser(
        "AnyFlowFARTransformer3DModel",
        {**_TINY, "rope_max_seq_len": 64},
        _far_request,
        _far_step,
        blocks=("num_layers",),
    ),
    "skyreels-v2": Denoiser(
        "SkyReelsV2Transformer3DModel",
        {**_TINY, "rope_max_seq_len": 64},
        _forcing_request,
        _forcing_step,
        blocks=("num_layers",),
    ),
    "helios": Denoiser(
        "HeliosTransformer3DModel",
        {**_TINY, "rope_dim": (4, 6, 6)},
        _helios_request,
        video_step,
        blocks=("num_layers",),
    ),
}
