"""Denoisers of videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro

from .spec import HEADS, KANDINSKY, ROPE, Denoiser, Draw, no_request, video_step


def _frames_first(d: Draw) -> torch.Tensor:
    return d.video(d.config.in_channels).transpose(1, 2).contiguous()


def _int_step(d: Draw, sigma: float) -> dict[str, Any]:
    return video_step(d, sigma, torch.int64)


def _allegro_request(d: Draw) -> dict[str, Any]:
    c = d.config
    frames, height, width = d.grid
    scale = (c.interpolation_scale_t, c.interpolation_scale_h, c.interpolation_scale_w)
    *freqs, t, h, w = get_3d_rotary_pos_embed_allegro(
        c.attention_head_dim, ((0, 0), (height, width)), (height, width), frames, interpolation_scale=scale
    )
    places = torch.cartesian_prod(t.long(), h.long(), w.long()).T.reshape(3, 1, -1).contiguous()
    return {
        "encoder_hidden_states": d.text(c.caption_channels),
        "encoder_attention_mask": d.mask(),
        "image_rotary_emb": (tuple(freqs), tuple(places)),
    }


def _cogvideox_request(d: Draw) -> dict[str, Any]:
    frames, height, width = d.grid
    return {
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "image_rotary_emb": get_3d_rotary_pos_embed(
            d.config.attention_head_dim, ((0, 0), (height, width)), (height, width), frames
        ),
        "attention_kwargs": None,
    }


def _cogvideox_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": _frames_first(d), "timestep": d.timestep(sigma, torch.int64)}


def _consisid_request(d: Draw) -> dict[str, Any]:
    """With what face recognition and a vision model say of the picture."""
    c = d.config
    return {
        **_cogvideox_request(d),
        "id_cond": d.normal(d.batch, c.LFE_id_dim),
        "id_vit_hidden": [d.normal(d.batch, 7, c.LFE_vit_dim) for _ in range(c.LFE_num_scale)],
    }


def _cosmos_request(d: Draw) -> dict[str, Any]:
    """The mask goes unused here: with it as a further channel, as in checkpoints, torchvision is needed."""
    _, height, width = d.grid
    return {
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "fps": 30,
        "padding_mask": torch.zeros(1, 1, 16 * height, 16 * width, dtype=d.dtype),
    }


def _cosmos_step(d: Draw, sigma: float) -> dict[str, Any]:
    latents = d.video(d.config.in_channels)
    return {"hidden_states": latents, "timestep": d.timestep(sigma).to(d.dtype)}


def _easyanimate_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.text(d.config.text_embed_dim)}


def _easyanimate_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.video(d.config.in_channels),
        "timestep": torch.stack([d.t(sigma)] * d.batch).to(d.dtype),
    }


def _kandinsky_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.in_text_dim),
        "pooled_projections": d.normal(d.batch, d.config.in_text_dim2),
        "visual_rope_pos": [torch.arange(n) for n in d.grid],
        "text_rope_pos": torch.arange(d.prompt),
        "scale_factor": (1.0, 2.0, 2.0),
        "sparse_params": None,
    }


def _kandinsky_step(d: Draw, sigma: float) -> dict[str, Any]:
    frames, height, width = d.grid
    return {
        "hidden_states": d.normal(d.batch, frames, 2 * height, 2 * width, d.config.in_visual_dim),
        "timestep": d.t(sigma).unsqueeze(0).repeat(d.batch).to(d.dtype),
    }


def _kandinsky_sr_step(d: Draw, sigma: float) -> dict[str, Any]:
    """Attention is sparse in tiles of 8 x 8 tokens, so there is one a frame at least; two thirds are an anchor."""
    c = d.config
    latents = d.normal(d.batch, max(1, d.tokens // 64), 8, 8, c.in_visual_dim)
    rest = torch.zeros(*latents.shape[:-1], c.in_visual_dim + 1, dtype=d.dtype)
    return {"hidden_states": torch.cat([latents, rest], dim=-1), "timestep": d.timestep(sigma)}


def _latte_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.text(d.config.caption_channels), "enable_temporal_attentions": True}


def _ltx_request(d: Draw) -> dict[str, Any]:
    frames, height, width = d.grid
    return {
        "encoder_hidden_states": d.text(d.config.caption_channels),
        "encoder_attention_mask": d.mask(torch.bool),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "attention_kwargs": None,
    }


def _ltx_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": d.packed(d.config.in_channels), "timestep": d.timestep(sigma)}


def _sana_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.caption_channels),
        "encoder_attention_mask": d.mask(),
        "attention_kwargs": None,
    }


_FOUR = {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2}
_COGVIDEOX = {
    **_FOUR,
    "time_embed_dim": 32,
    "text_embed_dim": 40,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 13,
    "max_text_seq_length": 8,
    "use_rotary_positional_embeddings": True,
}
_LAYERS = ("num_layers",)

DENOISERS: Mapping[str, Denoiser] = {
    "allegro": Denoiser(
        "AllegroTransformer3DModel",
        {
            **_FOUR,
            "attention_head_dim": 24,
            "cross_attention_dim": 48,
            "caption_channels": 40,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 4,
        },
        _allegro_request,
        _int_step,
        blocks=_LAYERS,
    ),
    "cogvideox": Denoiser(
        "CogVideoXTransformer3DModel", _COGVIDEOX, _cogvideox_request, _cogvideox_step, blocks=_LAYERS
    ),
    "consisid": Denoiser(
        "ConsisIDTransformer3DModel",
        {
            **_COGVIDEOX,
            "num_attention_heads": 3,
            # A picture's latents come along.
            "in_channels": 8,
            "is_train_face": True,
            "cross_attn_interval": 1,
            "cross_attn_dim_head": 16,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 24,
            "LFE_vit_dim": 16,
            "LFE_depth": 2,
            "LFE_dim_head": 8,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 2,
            "LFE_num_querie": 4,
            "LFE_output_dim": 32,
            "LFE_ff_mult": 1,
            "LFE_num_scale": 2,
        },
        _consisid_request,
        _cogvideox_step,
        blocks=_LAYERS,
    ),
    "cosmos": Denoiser(
        "CosmosTransformer3DModel",
        {
            **_FOUR,
            "text_embed_dim": 40,
            "adaln_lora_dim": 8,
            "max_size": (8, 32, 32),
            "concat_padding_mask": False,
        },
        _cosmos_request,
        _cosmos_step,
        blocks=_LAYERS,
    ),
    "easy-animate": Denoiser(
        "EasyAnimateTransformer3DModel",
        {
            **_FOUR,
            "patch_size": 2,
            "sample_width": 8,
            "sample_height": 8,
            "mmdit_layers": 1,
            "time_embed_dim": 32,
            "text_embed_dim": 40,
        },
        _easyanimate_request,
        _easyanimate_step,
        blocks=("num_layers", "mmdit_layers"),
    ),
    "kandinsky-5": Denoiser(
        "Kandinsky5Transformer3DModel",
        KANDINSKY,
        _kandinsky_request,
        _kandinsky_step,
        blocks=("num_visual_blocks",),
    ),
    "kandinsky-6-sr": Denoiser(
        "Kandinsky6SRTransformer3DModel",
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 64,
            "num_visual_blocks": 2,
            "axes_dims": ROPE,
        },
        no_request,
        _kandinsky_sr_step,
        blocks=("num_visual_blocks",),
    ),
    "latte": Denoiser(
        "LatteTransformer3DModel",
        {
            **_FOUR,
            "cross_attention_dim": 32,
            "sample_size": 8,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": 40,
            "video_length": 4,
        },
        _latte_request,
        _int_step,
        blocks=_LAYERS,
    ),
    "ltx-video": Denoiser(
        "LTXVideoTransformer3DModel",
        {**_FOUR, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 40},
        _ltx_request,
        _ltx_step,
        blocks=_LAYERS,
    ),
    "sana-video": Denoiser(
        "SanaVideoTransformer3DModel",
        {
            **_FOUR,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 40,
            "sample_size": 8,
        },
        _sana_request,
        video_step,
        blocks=_LAYERS,
    ),
}
