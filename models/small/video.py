"""Denoisers of videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .spec import Denoiser, Draw


def _wan_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.padded_text(d.config.text_dim), "attention_kwargs": None}


def _wan_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.video(d.config.in_channels, d.config.patch_size),
        # UniPC's timesteps are integers.
        "timestep": d.timestep(sigma, torch.int64),
    }


def _hunyuan_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "encoder_attention_mask": d.mask(d.dtype),
        "pooled_projections": d.normal(d.batch, d.config.pooled_projection_dim),
        "guidance": torch.tensor([6.0] * d.batch, dtype=d.dtype) * 1000.0,
        "attention_kwargs": None,
    }


def _hunyuan_step(d: Draw, sigma: float) -> dict[str, Any]:
    patch = (d.config.patch_size_t, d.config.patch_size, d.config.patch_size)
    return {"hidden_states": d.video(d.config.in_channels, patch), "timestep": d.timestep(sigma)}


DENOISERS: Mapping[str, Denoiser] = {
    "wan": Denoiser(
        "WanTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "text_dim": 40,
            "freq_dim": 32,
            "ffn_dim": 64,
            "rope_max_seq_len": 64,
        },
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
    "hunyuan-video": Denoiser(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "text_embed_dim": 40,
            "pooled_projection_dim": 24,
            "rope_axes_dim": (4, 6, 6),
        },
        _hunyuan_request,
        _hunyuan_step,
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
        ("num_layers", "num_single_layers"),
    ),
}
