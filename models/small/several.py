"""Denoisers of several things at once: video and sound, video and camera, text and video in one packed row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

from .spec import HEADS, KANDINSKY, Denoiser, Draw

# Length of the sound, in latents.
_SOUND = 6


def _ltx_request(d: Draw) -> dict[str, Any]:
    frames, height, width = d.grid
    # The connectors before it put learned tokens in the place of padding.
    mask = torch.ones(d.batch, d.prompt, dtype=torch.int64)
    return {
        "encoder_hidden_states": d.text(d.config.caption_channels),
        "audio_encoder_hidden_states": d.text(d.config.caption_channels),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": 24.0,
        "audio_num_frames": _SOUND,
        "video_coords": d.module.rope.prepare_video_coords(d.batch, frames, height, width, "cpu", fps=24.0),
        "audio_coords": d.module.audio_rope.prepare_audio_coords(d.batch, _SOUND, "cpu"),
        "isolate_modalities": False,
        "spatio_temporal_guidance_blocks": None,
        "perturbation_mask": None,
        "use_cross_timestep": False,
        "attention_kwargs": None,
    }


def _ltx_step(d: Draw, sigma: float) -> dict[str, Any]:
    timestep = d.timestep(sigma)
    return {
        "hidden_states": d.packed(d.config.in_channels),
        "audio_hidden_states": d.normal(d.batch, _SOUND, d.config.audio_in_channels),
        "timestep": timestep,
        "sigma": timestep,
    }


def _kandinsky_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.in_text_dim),
        "pooled_projections": d.normal(d.batch, d.config.in_text_dim2),
        "visual_rope_pos": None,
        # A mask that masks nothing is dropped.
        "encoder_attention_mask": d.mask(torch.bool) if d.batch > 1 else None,
        "visual_token_type_ids": None,
    }


def _kandinsky_step(d: Draw, sigma: float) -> dict[str, Any]:
    """Frames to keep and a mask, here zero, are further channels."""
    frames, height, width = d.grid
    latents = d.normal(d.batch, frames, 2 * height, 2 * width, d.config.in_visual_dim)
    mask = torch.zeros(*latents.shape[:-1], 1, dtype=d.dtype)
    return {
        "hidden_states": torch.cat([latents, torch.zeros_like(latents), mask], dim=-1),
        "audio_hidden_states": d.normal(d.batch, _SOUND, d.config.in_audio_dim),
        "timestep": d.timestep(sigma),
    }


def _minimax_request(d: Draw) -> dict[str, Any]:
    """One packed row of text, sound and video, each token with its kind and its place in time and picture."""
    frames, height, width = d.grid
    start = d.prompt + _SOUND
    positions = torch.zeros(start + d.tokens, 3, dtype=torch.float64)
    positions[: d.prompt, 0] = torch.arange(d.prompt)
    positions[d.prompt : start, 0] = d.prompt + torch.arange(_SOUND)
    rows, columns = (torch.arange(n, dtype=torch.float64) * 32 / n for n in (height, width))
    times = d.prompt + torch.tensor([0.0, 1.0, *[4.0] * frames], dtype=torch.float64).cumsum(0)[:frames] * 5 / 3
    positions[start:] = torch.cartesian_prod(times, rows, columns)
    return {
        "encoder_hidden_states": d.normal(1, d.prompt, d.config.text_dim),
        "attention_kwargs": None,
        "token_tags": torch.tensor([1] * d.prompt + [2] * _SOUND + [0] * d.tokens),
        "position_ids": positions,
        "video_indices": torch.arange(start, start + d.tokens),
        "audio_indices": torch.arange(d.prompt, start),
        "text_indices": torch.arange(d.prompt),
    }


def _minimax_step(d: Draw, sigma: float) -> dict[str, Any]:
    """Sound is ahead of video, so but for the first step a row holds two timesteps."""
    video, sound = (1 - shift * sigma / (1 + (shift - 1) * sigma) for shift in (12.0, 3.0))
    rows = torch.full((d.prompt + _SOUND + d.tokens,), video)
    rows[d.prompt : d.prompt + _SOUND] = sound
    timesteps, indices = torch.unique(rows, sorted=True, return_inverse=True)
    return {
        "hidden_states": d.normal(1, d.tokens, 4 * d.config.in_channels, dtype=torch.float32),
        "audio_hidden_states": d.normal(1, _SOUND, d.config.audio_in_channels, dtype=torch.float32),
        "timestep": timesteps,
        "timestep_indices": indices,
    }


def _cosmos_request(d: Draw) -> dict[str, Any]:
    """One packed row of text and video."""
    frames, height, width = d.grid
    vision = torch.arange(d.prompt, d.prompt + d.tokens)
    text = torch.arange(d.prompt, dtype=torch.float32).expand(3, -1)
    offset = d.prompt + d.config.unified_3d_mrope_temporal_modality_margin
    places = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float32) for n in (frames, height, width))).T
    return {
        "input_ids": d.integers(d.config.vocab_size, d.prompt),
        "text_indexes": torch.arange(d.prompt),
        "position_ids": torch.cat([text, places + torch.tensor([[offset], [0], [0]])], dim=1),
        "und_len": d.prompt,
        "sequence_length": d.prompt + d.tokens,
        "vision_token_shapes": [(frames, height, width)],
        "vision_sequence_indexes": vision,
        "vision_mse_loss_indexes": vision.clone(),
        "vision_noisy_frame_indexes": [torch.arange(frames)],
    }


def _cosmos_step(d: Draw, sigma: float) -> dict[str, Any]:
    frames, height, width = d.grid
    return {
        "vision_tokens": [d.normal(1, d.config.latent_channel, frames, 2 * height, 2 * width)],
        "vision_timesteps": torch.full((d.tokens,), 1000 * sigma),
    }


def _world_request(d: Draw) -> dict[str, Any]:
    """A camera that moves: its pose and lens a frame, and the rays of every token."""
    frames, height, width = d.grid
    poses = torch.eye(4).repeat(d.batch, frames, 1, 1)
    poses[..., :3, 3] = 0.1 * d.normal(d.batch, frames, 3, dtype=torch.float32)
    lens = torch.tensor([1.0 * width, 1.0 * height, width / 2, height / 2]).expand(d.batch, frames, 4)
    return {
        "encoder_hidden_states": d.normal(d.batch, 1, d.prompt, d.config.caption_channels),
        "data_info": {"img_hw": torch.tensor([[32.0 * height, 32.0 * width]])},
        "mask": d.mask(),
        "camera_conditions": torch.cat([poses.flatten(2), lens], dim=-1).to(d.dtype),
        "chunk_plucker": d.normal(d.batch, d.config.chunk_plucker_channels, frames, height, width),
    }


def _world_step(d: Draw, sigma: float) -> dict[str, Any]:
    """The first frame is given, so its timestep is zero."""
    latents = d.video(d.config.in_channels)
    given = torch.zeros_like(latents)
    given[:, :, :1] = 1.0
    timestep = torch.min(d.t(sigma).expand(latents.shape).float(), (1.0 - given) * 1000.0)
    return {"hidden_states": latents, "timestep": timestep[:, :1, :, 0, 0]}


def _refiner_request(d: Draw) -> dict[str, Any]:
    """A later part of a video, for which the first frame has left its keys and values behind."""
    c = d.config
    _, height, width = d.grid
    inner = c.num_attention_heads * c.attention_head_dim
    cache = SanaWMRefinerKVCache(c.num_layers)
    for layer in range(c.num_layers):
        cache.get(layer).store_sink(*(d.normal(d.batch, height * width, inner) for _ in range(2)))
    cache.sink_pe = _refiner_rotary(d, [0])
    return {
        "encoder_hidden_states": d.text(c.caption_channels),
        "encoder_attention_mask": d.mask(),
        "kv_cache": cache,
        "kv_cache_mode": "inject",
    }


def _refiner_step(d: Draw, sigma: float) -> dict[str, Any]:
    # The pipeline makes the same rotary table anew at each step.
    frames, _, _ = d.grid
    return {
        "hidden_states": d.packed(d.config.in_channels),
        "timestep": torch.full((d.batch, d.tokens), sigma * d.config.timestep_scale_multiplier),
        "video_rotary_emb": _refiner_rotary(d, list(range(1, 1 + frames))),
    }


def _refiner_rotary(d: Draw, frames: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    _, height, width = d.grid
    table: tuple[torch.Tensor, torch.Tensor] = d.module.build_rotary_emb_for_absolute_positions(
        batch_size=d.batch, frame_positions=frames, height=height, width=width, device=torch.device("cpu"), fps=24.0
    )
    return table


_LTX = {
    **HEADS,
    "in_channels": 8,
    "out_channels": 8,
    "cross_attention_dim": 32,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "num_layers": 2,
    "caption_channels": 40,
    "rope_type": "split",
}

DENOISERS: Mapping[str, Denoiser] = {
    "ltx-2": Denoiser("LTX2VideoTransformer3DModel", _LTX, _ltx_request, _ltx_step, blocks=("num_layers",)),
    "kandinsky-6": Denoiser(
        "Kandinsky6Transformer3DModel",
        {**KANDINSKY, "in_visual_dim": 4, "out_visual_dim": 4, "in_audio_dim": 4, "out_audio_dim": 4},
        _kandinsky_request,
        _kandinsky_step,
        blocks=("num_visual_blocks",),
    ),
    "minimax-h3": Denoiser(
        "MiniMaxH3Transformer3DModel",
        {
            **HEADS,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 64,
            "in_channels": 4,
            "audio_in_channels": 4,
            "text_dim": 40,
            "freq_dim": 32,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        _minimax_request,
        _minimax_step,
        blocks=("num_layers",),
    ),
    "cosmos-3": Denoiser(
        "Cosmos3OmniTransformer",
        {
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "latent_channel": 4,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "patch_latent_dim": 16,
            "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
            "vocab_size": 100,
        },
        _cosmos_request,
        _cosmos_step,
        blocks=("num_hidden_layers",),
    ),
    "sana-wm": Denoiser(
        "SanaWMTransformer3DModel",
        {
            "in_channels": 4,
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "softmax_every_n": 2,
            "linear_head_dim": 16,
            "chunk_plucker_post_attn_blocks": 4,
            "caption_channels": 40,
        },
        _world_request,
        _world_step,
        blocks=("num_layers", "chunk_plucker_post_attn_blocks"),
    ),
    "sana-wm-refiner": Denoiser(
        "SanaWMLTX2RefinerTransformer3DModel", _LTX, _refiner_request, _refiner_step, blocks=("num_layers",)
    ),
}
