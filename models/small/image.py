"""Denoisers of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
    SEQUENCE_PADDING_INDICATOR,
)

from .spec import HEADS, ROPE, Denoiser, Draw, packed_step, picture_step


def _flux_request(d: Draw) -> dict[str, Any]:
    return {
        "guidance": d.guidance(3.5),
        "pooled_projections": d.normal(d.batch, d.config.pooled_projection_dim),
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "txt_ids": torch.zeros(d.prompt, 3, dtype=d.dtype),
        "img_ids": d.picture_ids(),
        "joint_attention_kwargs": {},
    }


def _qwen_request(d: Draw) -> dict[str, Any]:
    return {
        "guidance": d.guidance(1.0),
        # Prompts are padded to the longest, and a mask that masks nothing is dropped.
        "encoder_hidden_states_mask": d.mask() if d.batch > 1 else None,
        "encoder_hidden_states": (d.padded_text if d.batch > 1 else d.text)(d.config.joint_attention_dim),
        "img_shapes": [[(1, *d.picture_grid)]] * d.batch,
        "attention_kwargs": {},
    }


def _sd3_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "pooled_projections": d.normal(d.batch, d.config.pooled_projection_dim),
        "joint_attention_kwargs": None,
    }


def _pixart_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.caption_channels),
        "encoder_attention_mask": d.mask(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _pixart_step(d: Draw, sigma: float) -> dict[str, Any]:
    return picture_step(d, sigma, torch.int64)


def _glm_request(d: Draw) -> dict[str, Any]:
    size = [16.0 * n for n in d.picture_grid]
    prior = d.integers(d.config.prior_vq_quantizer_codebook_size, d.batch, d.tokens)
    return {
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "prior_token_id": prior,
        "prior_token_drop": torch.full_like(prior, False, dtype=torch.bool),
        "target_size": torch.tensor([size], dtype=d.dtype).repeat(d.batch, 1),
        "crop_coords": torch.zeros(d.batch, 2, dtype=d.dtype),
        "attention_kwargs": None,
        "kv_caches": GlmImageKVCache(num_layers=d.config.num_layers),
    }


def _glm_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": d.timestep(sigma) - 1,
    }


def _ideogram_request(d: Draw) -> dict[str, Any]:
    """Each row is padding, text, picture."""
    row = d.prompt + d.tokens
    text = d.text(d.config.llm_features_dim)
    positions = torch.zeros(d.batch, row, 3, dtype=torch.long)
    segments = torch.full((d.batch, row), SEQUENCE_PADDING_INDICATOR, dtype=torch.long)
    indicator = torch.zeros(d.batch, row, dtype=torch.long)
    for b, length in enumerate(d.lengths()):
        start = d.prompt - length
        text[b, :start] = 0
        positions[b, start : d.prompt] = torch.arange(length)[:, None]
        positions[b, d.prompt :] = d.picture_ids(dtype=torch.long) + IMAGE_POSITION_OFFSET
        segments[b, start:] = 1
        indicator[b, start : d.prompt] = LLM_TOKEN_INDICATOR
        indicator[b, d.prompt :] = OUTPUT_IMAGE_INDICATOR
    return {
        "encoder_hidden_states": torch.cat([text, text.new_zeros(d.batch, d.tokens, text.shape[-1])], dim=1),
        "position_ids": positions,
        "segment_ids": segments,
        "indicator": indicator,
        "attention_kwargs": None,
    }


def _ideogram_step(d: Draw, sigma: float) -> dict[str, Any]:
    latents = d.packed(d.config.in_channels)
    return {
        "hidden_states": torch.cat([latents.new_zeros(d.batch, d.prompt, latents.shape[-1]), latents], dim=1),
        "timestep": (1.0 - d.t(sigma) / 1000).expand(d.batch).to(d.dtype),
    }


DENOISERS: Mapping[str, Denoiser] = {
    "flux": Denoiser(
        "FluxTransformer2DModel",
        {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            **HEADS,
            "joint_attention_dim": 40,
            "pooled_projection_dim": 24,
            "guidance_embeds": True,
            "axes_dims_rope": ROPE,
        },
        _flux_request,
        packed_step,
        {
            "in_channels": 64,
            "num_layers": 2,
            "num_single_layers": 4,
            "attention_head_dim": 64,
            "num_attention_heads": 8,
            "joint_attention_dim": 683,
            "pooled_projection_dim": 128,
            "guidance_embeds": True,
            "axes_dims_rope": (8, 28, 28),
        },
        ("num_layers", "num_single_layers"),
    ),
    "qwen-image": Denoiser(
        "QwenImageTransformer2DModel",
        {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            **HEADS,
            "joint_attention_dim": 40,
            "axes_dims_rope": ROPE,
        },
        _qwen_request,
        packed_step,
        {
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 4,
            "attention_head_dim": 64,
            "num_attention_heads": 8,
            "joint_attention_dim": 597,
            "axes_dims_rope": (8, 28, 28),
        },
        ("num_layers",),
    ),
    "sd3": Denoiser(
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            **HEADS,
            "joint_attention_dim": 40,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 24,
            "pos_embed_max_size": 16,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        _sd3_request,
        picture_step,
        {
            "sample_size": 32,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 4,
            "attention_head_dim": 64,
            "num_attention_heads": 8,
            "joint_attention_dim": 862,
            "caption_projection_dim": 512,
            "pooled_projection_dim": 431,
            "pos_embed_max_size": 48,
            "qk_norm": "rms_norm",
        },
        ("num_layers",),
    ),
    "pixart": Denoiser(
        "PixArtTransformer2DModel",
        {
            "sample_size": 8,
            "num_layers": 2,
            **HEADS,
            "cross_attention_dim": 32,
            "caption_channels": 40,
            "use_additional_conditions": False,
        },
        _pixart_request,
        _pixart_step,
        {
            "sample_size": 32,
            "num_layers": 12,
            "attention_head_dim": 64,
            "num_attention_heads": 6,
            "cross_attention_dim": 384,
            "caption_channels": 1365,
            "use_additional_conditions": False,
        },
        ("num_layers",),
    ),
    "glm-image": Denoiser(
        "GlmImageTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            **HEADS,
            "text_embed_dim": 40,
            "time_embed_dim": 32,
            "condition_dim": 16,
            "prior_vq_quantizer_codebook_size": 64,
        },
        _glm_request,
        _glm_step,
        {
            "num_layers": 8,
            "attention_head_dim": 64,
            "num_attention_heads": 8,
            "text_embed_dim": 184,
            "time_embed_dim": 64,
            "condition_dim": 32,
            "prior_vq_quantizer_codebook_size": 2048,
        },
        ("num_layers",),
    ),
    "ideogram-4": Denoiser(
        "Ideogram4Transformer2DModel",
        {
            "in_channels": 16,
            "num_layers": 2,
            **HEADS,
            "intermediate_size": 64,
            "adaln_dim": 16,
            "llm_features_dim": 104,
            "mrope_section": (2, 1, 1),
        },
        _ideogram_request,
        _ideogram_step,
        {
            "num_layers": 12,
            "attention_head_dim": 64,
            "num_attention_heads": 6,
            "intermediate_size": 1024,
            "adaln_dim": 43,
            "llm_features_dim": 4437,
            "mrope_section": (6, 5, 5),
        },
        ("num_layers",),
    ),
}
