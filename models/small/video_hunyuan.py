"""Denoisers of videos: HunyuanVideo and its like, in which text and video attend to each other as one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .spec import HEADS, ROPE, Denoiser, Draw, video_step


def _cast_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": d.video(d.config.in_channels), "timestep": d.timestep(sigma).to(d.dtype)}


def _hunyuan_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "encoder_attention_mask": d.mask(d.dtype),
        "pooled_projections": d.normal(d.batch, d.config.pooled_projection_dim),
        "guidance": torch.tensor([6.0] * d.batch, dtype=d.dtype) * 1000.0,
        "attention_kwargs": None,
    }


def _framepack_request(d: Draw) -> dict[str, Any]:
    """A part of a video, sampled from the end to the beginning: later frames come along, at three resolutions."""
    c = d.config
    frames, height, width = d.grid
    past = {"clean": 2, "history_2x": 2, "history_4x": 16}
    # Before these are the first frame, which is clean, and those yet to be made.
    prefix, _, new, one, two, four = torch.arange(1 + 3 + frames + 19).split([1, 3, frames, 1, 2, 16])
    request = {
        **_hunyuan_request(d),
        "image_embeds": d.normal(d.batch, 9, c.image_proj_dim),
        "indices_latents": new,
        "indices_latents_clean": torch.cat([prefix, one]),
        "indices_latents_history_2x": two,
        "indices_latents_history_4x": four,
    }
    for name, count in past.items():
        request[f"latents_{name}"] = d.normal(
            d.batch, c.in_channels, count, height * c.patch_size, width * c.patch_size
        )
    return request


def _hunyuan_15_request(d: Draw) -> dict[str, Any]:
    """Text to video: a picture to start from would be given as embeddings that are not zero."""
    c = d.config
    glyphs = max(1, d.prompt // 2)
    valid = torch.arange(glyphs) < max(1, glyphs - 1)
    return {
        "image_embeds": torch.zeros(d.batch, 9, c.image_embed_dim, dtype=d.dtype),
        "attention_kwargs": None,
        "encoder_hidden_states": d.text(c.text_embed_dim),
        "encoder_attention_mask": d.mask(d.dtype),
        "encoder_hidden_states_2": d.normal(d.batch, glyphs, c.text_embed_2_dim),
        "encoder_attention_mask_2": valid.to(d.dtype).repeat(d.batch, 1),
    }


def _conditioned_step(d: Draw, sigma: float) -> dict[str, Any]:
    """A frame to start from and a mask, here zero, are further channels."""
    latents = d.video(d.config.in_channels)
    latents[:, d.config.out_channels :] = 0
    return {"hidden_states": latents, "timestep": d.timestep(sigma)}


def _conditioned_cast_step(d: Draw, sigma: float) -> dict[str, Any]:
    step = _conditioned_step(d, sigma)
    return {**step, "timestep": step["timestep"].to(d.dtype)}


def _mochi_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "encoder_attention_mask": d.mask(torch.bool),
        "attention_kwargs": None,
    }


_FOUR = {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2}
_HUNYUAN = {**_FOUR, "num_refiner_layers": 1, "text_embed_dim": 40, "rope_axes_dim": ROPE}
_LAYERS = ("num_layers",)
_BOTH = ("num_layers", "num_single_layers")

DENOISERS: Mapping[str, Denoiser] = {
    "hunyuan-video": Denoiser(
        "HunyuanVideoTransformer3DModel",
        {**_HUNYUAN, "num_single_layers": 2, "pooled_projection_dim": 24},
        _hunyuan_request,
        video_step,
        {
            "num_layers": 2,
            "num_single_layers": 4,
            "num_refiner_layers": 1,
            "attention_head_dim": 64,
            "num_attention_heads": 8,
            "text_embed_dim": 683,
            "pooled_projection_dim": 128,
            "rope_axes_dim": (8, 28, 28),
        },
        _BOTH,
    ),
    "hunyuan-video-framepack": Denoiser(
        "HunyuanVideoFramepackTransformer3DModel",
        {
            **_HUNYUAN,
            "num_single_layers": 2,
            "pooled_projection_dim": 24,
            "has_image_proj": True,
            "image_proj_dim": 24,
            "has_clean_x_embedder": True,
        },
        _framepack_request,
        video_step,
        blocks=_BOTH,
    ),
    "hunyuan-video-1.5": Denoiser(
        "HunyuanVideo15Transformer3DModel",
        {**_HUNYUAN, "in_channels": 9, "text_embed_2_dim": 24, "image_embed_dim": 16},
        _hunyuan_15_request,
        _conditioned_cast_step,
        blocks=_LAYERS,
    ),
    "motif-video": Denoiser(
        "MotifVideoTransformer3DModel",
        {**_FOUR, "in_channels": 9, "num_single_layers": 2, "text_embed_dim": 40, "rope_axes_dim": ROPE},
        _mochi_request,
        _conditioned_step,
        blocks=_BOTH,
    ),
    "mochi": Denoiser(
        "MochiTransformer3DModel",
        {**_FOUR, "pooled_projection_dim": 24, "text_embed_dim": 40, "time_embed_dim": 32},
        _mochi_request,
        _cast_step,
        blocks=_LAYERS,
    ),
}
