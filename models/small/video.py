"""Denoisers of videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro

from .spec import HEADS, ROPE, Denoiser, Draw, no_request


def _video(d: Draw) -> torch.Tensor:
    c = d.config
    return d.video(c.in_channels, (c.get("patch_size_t") or 1, c.patch_size, c.patch_size))


def _frames_first(d: Draw) -> torch.Tensor:
    return _video(d).transpose(1, 2).contiguous()


def _float_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": _video(d), "timestep": d.timestep(sigma)}


def _int_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": _video(d), "timestep": d.timestep(sigma, torch.int64)}


def _cast_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": _video(d), "timestep": d.timestep(sigma).to(d.dtype)}


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
    latents = d.video(d.config.in_channels, d.config.patch_size)
    return {"hidden_states": latents, "timestep": d.timestep(sigma).to(d.dtype)}


def _easyanimate_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.text(d.config.text_embed_dim)}


def _easyanimate_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": _video(d), "timestep": torch.tensor([d.t(sigma)] * d.batch).to(d.dtype)}


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
    latents = _video(d)
    latents[:, d.config.out_channels :] = 0
    return {"hidden_states": latents, "timestep": d.timestep(sigma)}


def _conditioned_cast_step(d: Draw, sigma: float) -> dict[str, Any]:
    step = _conditioned_step(d, sigma)
    return {**step, "timestep": step["timestep"].to(d.dtype)}


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


def _mochi_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "encoder_attention_mask": d.mask(torch.bool),
        "attention_kwargs": None,
    }


def _sana_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.caption_channels),
        "encoder_attention_mask": d.mask(),
        "attention_kwargs": None,
    }


def _sana_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": d.video(d.config.in_channels, d.config.patch_size), "timestep": d.timestep(sigma)}


_FOUR = {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2}
_HUNYUAN = {**_FOUR, "num_refiner_layers": 1, "text_embed_dim": 40, "rope_axes_dim": ROPE}
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
_BOTH = ("num_layers", "num_single_layers")

DENOISERS: Mapping[str, Denoiser] = {
    "hunyuan-video": Denoiser(
        "HunyuanVideoTransformer3DModel",
        {**_HUNYUAN, "num_single_layers": 2, "pooled_projection_dim": 24},
        _hunyuan_request,
        _float_step,
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
        _float_step,
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
        {
            "in_text_dim": 40,
            "in_text_dim2": 24,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 64,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": ROPE,
        },
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
        _sana_step,
        blocks=_LAYERS,
    ),
}
