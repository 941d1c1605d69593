"""Denoisers of pictures in which text and picture attend to each other as one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .spec import HEADS, ROPE, Denoiser, Draw, packed_step, picture_step


def _aura_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.text(d.config.joint_attention_dim), "attention_kwargs": None}


def _aura_step(d: Draw, sigma: float) -> dict[str, Any]:
    # The pipeline makes a new tensor of the quotient and then casts it.
    timestep = torch.stack([d.t(sigma) / 1000]).expand(d.batch).to(d.dtype)
    return {"hidden_states": d.picture(d.config.in_channels, d.config.patch_size), "timestep": timestep}


def _fibo_2_request(d: Draw) -> dict[str, Any]:
    bundles = 1 + len(d.config.injection_layer_ids)
    return {
        "encoder_hidden_states": d.normal(d.batch, bundles, d.prompt, d.config.cap_feat_dim),
        # A mask that masks nothing is dropped.
        "encoder_attention_mask": d.mask(torch.bool) if d.batch > 1 else None,
        "context_latents": None,
    }


def _fibo_2_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": d.timestep(sigma) / 1000,
    }


def _cogview_sizes(d: Draw) -> dict[str, Any]:
    size = torch.tensor([[16.0 * n for n in d.picture_grid]], dtype=d.dtype)
    return {
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "original_size": size.repeat(d.batch, 1),
        "target_size": size.repeat(d.batch, 1),
        "crop_coords": torch.zeros(1, 2, dtype=d.dtype).repeat(d.batch, 1),
    }


def _cogview_4_request(d: Draw) -> dict[str, Any]:
    return {**_cogview_sizes(d), "attention_kwargs": None}


def _cogview_3_step(d: Draw, sigma: float) -> dict[str, Any]:
    return picture_step(d, sigma, torch.int64)


def _ernie_request(d: Draw) -> dict[str, Any]:
    # Each prompt has its own length, the longest has no padding.
    lengths = torch.tensor(d.lengths()) + d.prompt - max(d.lengths())
    mask = torch.arange(d.prompt) < lengths[:, None]
    return {"text_bth": d.text(d.config.text_in_dim) * mask[:, :, None], "text_lens": lengths}


def _ernie_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": torch.full((d.batch,), 1000 * sigma, dtype=d.dtype),
    }


def _hidream_request(d: Draw) -> dict[str, Any]:
    t5, llama = d.config.caption_channels
    return {
        "encoder_hidden_states_t5": d.text(t5),
        "encoder_hidden_states_llama3": d.normal(1 + max(d.config.llama_layers), d.batch, d.prompt, llama),
        "pooled_embeds": d.normal(d.batch, d.config.text_emb_dim),
        "attention_kwargs": None,
    }


def _hidream_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timesteps": d.timestep(sigma),
    }


def _hunyuan_request(d: Draw) -> dict[str, Any]:
    """The distilled model; with the glyphs of a quoted text in the prompt, half as long as the prompt."""
    glyphs = max(1, d.prompt // 2)
    valid = torch.arange(glyphs) < max(1, glyphs - 1)
    return {
        "guidance": torch.tensor([3.25] * d.batch, dtype=d.dtype) * 1000.0,
        "attention_kwargs": {},
        "encoder_hidden_states": d.text(d.config.text_embed_dim),
        "encoder_attention_mask": d.mask(),
        "encoder_hidden_states_2": d.normal(d.batch, glyphs, d.config.text_embed_2_dim),
        "encoder_attention_mask_2": valid.long().repeat(d.batch, 1),
    }


def _hunyuan_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.picture(d.config.in_channels),
        "timestep": d.timestep(sigma).to(d.dtype),
        "timestep_r": d.timestep(d.next_sigma(sigma)).to(d.dtype),
    }


def _nucleus_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "encoder_hidden_states_mask": d.mask(),
        "img_shapes": [(1, d.side, d.side)] * d.batch,
        "attention_kwargs": {},
    }


def _qwen_request(d: Draw) -> dict[str, Any]:
    """Without the cache that would let later steps skip the prompt."""
    slots = torch.ones(d.batch, d.tokens // 4, dtype=torch.bool)
    return {
        "encoder_hidden_states": d.text(d.config.context_in_dim),
        "encoder_hidden_states_mask": d.mask() if d.batch > 1 else None,
        "img_shapes": [[(1, d.side, d.side)]] * d.batch,
        "img_mask": torch.cat([torch.zeros(d.batch, d.prompt, dtype=torch.bool), slots], dim=1),
        "attention_kwargs": {},
        "kv_cache": None,
        "kv_cache_mode": None,
    }


_BOTH = ("num_layers", "num_single_layers")
_TEXT = {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": 40}

DENOISERS: Mapping[str, Denoiser] = {
    "aura-flow": Denoiser(
        "AuraFlowTransformer2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "joint_attention_dim": 40,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 256,
        },
        _aura_request,
        _aura_step,
        blocks=("num_mmdit_layers", "num_single_dit_layers"),
    ),
    "bria-fibo-2": Denoiser(
        "BriaFibo2Transformer2DModel",
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 3,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "cap_feat_dim": 40,
            "injection_layer_ids": (1,),
            "perceiver_num_layers": 1,
            "min_num_gist_tokens": 4,
            "max_num_gist_tokens": 8,
            "gist_step": 2,
            "gist_min_text_len": 4,
            "gist_max_text_len": 16,
            "axes_dims": ROPE,
        },
        _fibo_2_request,
        _fibo_2_step,
        blocks=("n_layers",),
    ),
    "cogview-3-plus": Denoiser(
        "CogView3PlusTransformer2DModel",
        {**_TEXT, "time_embed_dim": 32, "condition_dim": 16, "pos_embed_max_size": 16, "sample_size": 16},
        _cogview_sizes,
        _cogview_3_step,
        blocks=("num_layers",),
    ),
    "cogview-4": Denoiser(
        "CogView4Transformer2DModel",
        {**_TEXT, "time_embed_dim": 32, "condition_dim": 16, "sample_size": 16, "rope_axes_dim": (16, 16)},
        _cogview_4_request,
        picture_step,
        blocks=("num_layers",),
    ),
    "ernie-image": Denoiser(
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 2,
            "ffn_hidden_size": 64,
            "in_channels": 16,
            "out_channels": 16,
            "text_in_dim": 40,
            "rope_axes_dim": ROPE,
        },
        _ernie_request,
        _ernie_step,
        blocks=("num_layers",),
    ),
    "hidream": Denoiser(
        "HiDreamImageTransformer2DModel",
        {
            **HEADS,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "caption_channels": [40, 24],
            "text_emb_dim": 24,
            "axes_dims_rope": ROPE,
            "max_resolution": (64, 64),
            "llama_layers": [0, 1, 1, 2],
        },
        _hidream_request,
        _hidream_step,
    ),
    "hunyuan-image": Denoiser(
        "HunyuanImageTransformer2DModel",
        {
            **_TEXT,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_2_dim": 24,
            "rope_axes_dim": (8, 8),
            "guidance_embeds": True,
            "use_meanflow": True,
        },
        _hunyuan_request,
        _hunyuan_step,
        blocks=_BOTH,
    ),
    "nucleus-moe": Denoiser(
        "NucleusMoEImageTransformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 5,
            "joint_attention_dim": 40,
            "axes_dims_rope": ROPE,
            "num_experts": 4,
            "mlp_ratio": 6.0,
            "moe_intermediate_dim": 32,
            "capacity_factors": 2.0,
        },
        _nucleus_request,
        packed_step,
        blocks=("num_layers",),
    ),
    "qwen-image-2.1": Denoiser(
        "QwenImage21Transformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "context_in_dim": 40,
            "axes_dims_rope": ROPE,
        },
        _qwen_request,
        packed_step,
        blocks=("num_layers",),
    ),
}
