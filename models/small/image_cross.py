"""Denoisers of pictures that read the prompt by cross-attention, or in ways of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed, get_2d_rotary_pos_embed_lumina

from .spec import HEADS, ROPE, Denoiser, Draw, picture_step


def _dit_request(d: Draw) -> dict[str, Any]:
    return {"class_labels": d.integers(d.config.num_embeds_ada_norm, d.batch)}


def _dit_step(d: Draw, sigma: float) -> dict[str, Any]:
    return picture_step(d, sigma, torch.int64)


def _hunyuan_request(d: Draw) -> dict[str, Any]:
    """Both prompts are as long as the configuration says."""
    c = d.config
    pixels = 16 * d.side
    sizes = torch.tensor([[pixels, pixels, pixels, pixels, 0, 0]], dtype=d.dtype)
    return {
        "encoder_hidden_states": d.normal(d.batch, c.text_len, c.cross_attention_dim),
        "text_embedding_mask": d.mask(length=c.text_len),
        "encoder_hidden_states_t5": d.normal(d.batch, c.text_len_t5, c.cross_attention_dim_t5),
        "text_embedding_mask_t5": d.mask(length=c.text_len_t5),
        "image_meta_size": sizes.repeat(d.batch, 1),
        "style": torch.tensor([0]).repeat(d.batch),
        "image_rotary_emb": get_2d_rotary_pos_embed(
            c.attention_head_dim, ((0, 0), (d.side, d.side)), (d.side, d.side), output_type="pt"
        ),
    }


def _hunyuan_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": torch.stack([d.t(sigma, torch.int64)] * d.batch).to(d.dtype),
    }


def _joy_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.text(d.config.text_dim)}


def _joy_step(d: Draw, sigma: float) -> dict[str, Any]:
    """A picture made from text alone, so the only one of its item axis."""
    height = 2 * d.side
    return {
        "hidden_states": d.normal(d.batch, 1, d.config.in_channels, 1, height, height),
        "timestep": d.t(sigma).repeat(d.batch),
    }


def _joy_plus_request(d: Draw) -> dict[str, Any]:
    """Half of the tokens are the new picture, the others a reference."""
    half = d.side // 2
    return {
        "encoder_hidden_states": d.text(d.config.text_dim),
        "encoder_hidden_states_mask": d.mask(),
        "shape_list": [[(1, d.side, half), (1, d.side, d.side - half)]] * d.batch,
    }


def _joy_plus_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.normal(d.batch, d.tokens, d.config.in_channels, *d.config.patch_size),
        "timestep": d.t(sigma).repeat(d.batch),
    }


def _lumina_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.cross_attention_dim),
        "encoder_mask": d.mask(),
        "cross_attention_kwargs": {"base_sequence_length": 16},
    }


def _lumina_step(d: Draw, sigma: float) -> dict[str, Any]:
    # The pipeline makes the same rotary table anew at each step.
    head_dim = d.config.hidden_size // d.config.num_attention_heads
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": 1 - d.timestep(sigma) / 1000,
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(head_dim, 384, 384),
    }


def _lumina_2_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.cap_feat_dim),
        "encoder_attention_mask": d.mask(),
        "attention_kwargs": None,
    }


def _lumina_2_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": (1 - d.t(sigma) / 1000).expand(d.batch),
    }


class _KnownLengths:
    """Stands for a mask of which only the shape, and the number of ones in each row, are asked."""

    def __init__(self, lengths: list[int], padded: int) -> None:
        self.lengths = lengths
        self.shape = (len(lengths), padded)

    def sum(self, dim: int) -> _KnownLengths:
        return self

    def tolist(self) -> list[int]:
        return self.lengths


def _lumina_2_prepare(d: Draw) -> str:
    lengths = _KnownLengths(d.lengths(), d.prompt)
    d.module.rope_embedder.register_forward_pre_hook(lambda _, args: (args[0], lengths))
    return "the host reads the prompts' lengths at each call, which breaks the graph; here they are constants"


def _omnigen_request(d: Draw) -> dict[str, Any]:
    """Padding, text, time, picture: causal up to the time, and the picture sees all but the padding."""
    row = d.prompt + 1 + d.tokens
    mask = torch.zeros(d.batch, row, row)
    positions = torch.zeros(d.batch, row, dtype=torch.long)
    ids = d.integers(d.config.vocab_size, d.batch, d.prompt)
    for b, length in enumerate(d.lengths()):
        pad = d.prompt - length
        ids[b, :pad] = 0
        mask[b, :pad] = 1
        mask[b, pad:, pad:] = torch.ones(row - pad, row - pad).tril()
        mask[b, d.prompt + 1 :, pad:] = 1
        positions[b, pad:] = torch.arange(row - pad)
    return {
        "input_ids": ids,
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask,
        "position_ids": positions,
    }


def _prx_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.text(d.config.context_in_dim), "attention_mask": d.mask(torch.bool)}


def _prx_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": (d.t(sigma) / 1000).view(1).repeat(d.batch),
    }


def _sana_request(d: Draw) -> dict[str, Any]:
    guidance = d.guidance(4.5)
    return {
        "encoder_hidden_states": d.text(d.config.caption_channels),
        "encoder_attention_mask": d.mask(),
        "guidance": None if guidance is None else guidance.to(d.dtype) * d.config.guidance_embeds_scale,
        "attention_kwargs": None,
    }


def _sana_step(d: Draw, sigma: float) -> dict[str, Any]:
    """As the few-step pipeline, whose timesteps are angles, if guidance is embedded, else as the first one."""
    if not d.config.guidance_embeds:
        step = picture_step(d, sigma)
        return {**step, "timestep": step["timestep"] * d.config.timestep_scale}
    angle = torch.atan2(torch.tensor(sigma), torch.tensor(1 - sigma)).expand(d.batch)
    return {
        "hidden_states": d.picture(d.config.in_channels, d.config.patch_size),
        "timestep": torch.sin(angle) / (torch.cos(angle) + torch.sin(angle)),
    }


def _z_request(d: Draw) -> dict[str, Any]:
    """Each prompt is a tensor of its own length."""
    return {
        "cap_feats": [d.normal(length, d.config.cap_feat_dim) for length in d.lengths()],
        "joint_attention_kwargs": None,
    }


def _z_prepare(d: Draw) -> None:
    # The first call makes them.
    rope = d.module.rope_embedder
    rope.freqs_cis = rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, theta=rope.theta)


def _z_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "x": list(d.picture(d.config.in_channels, 2)[:, :, None].unbind(dim=0)),
        "t": (1000 - d.timestep(sigma)) / 1000,
    }


_JOY = {"hidden_size": 32, "num_attention_heads": 2, "text_dim": 40, "num_layers": 2, "rope_dim_list": [4, 6, 6]}

DENOISERS: Mapping[str, Denoiser] = {
    "dit": Denoiser(
        "DiTTransformer2DModel",
        {**HEADS, "num_layers": 2, "norm_num_groups": 4, "sample_size": 8, "num_embeds_ada_norm": 10},
        _dit_request,
        _dit_step,
        blocks=("num_layers",),
    ),
    "hunyuan-dit": Denoiser(
        "HunyuanDiT2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 8,
            "hidden_size": 32,
            "num_layers": 4,
            "cross_attention_dim": 24,
            "cross_attention_dim_t5": 40,
            "pooled_projection_dim": 16,
            "text_len": 8,
            "text_len_t5": 12,
        },
        _hunyuan_request,
        _hunyuan_step,
        blocks=("num_layers",),
    ),
    "joy-image-edit": Denoiser("JoyImageEditTransformer3DModel", _JOY, _joy_request, _joy_step, blocks=("num_layers",)),
    "joy-image-edit-plus": Denoiser(
        "JoyImageEditPlusTransformer3DModel", _JOY, _joy_plus_request, _joy_plus_step, blocks=("num_layers",)
    ),
    "lumina": Denoiser(
        "LuminaNextDiT2DModel",
        {
            "sample_size": 16,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "cross_attention_dim": 40,
        },
        _lumina_request,
        _lumina_step,
        blocks=("num_layers",),
    ),
    "lumina-2": Denoiser(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (8, 8, 8),
            "axes_lens": (300, 64, 64),
            "cap_feat_dim": 40,
        },
        _lumina_2_request,
        _lumina_2_step,
        blocks=("num_layers",),
        prepare=_lumina_2_prepare,
    ),
    "omnigen": Denoiser(
        "OmniGenTransformer2DModel",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 100,
            "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
            "pos_embed_max_size": 32,
            "time_step_dim": 32,
        },
        _omnigen_request,
        picture_step,
        blocks=("num_layers",),
    ),
    "prx": Denoiser(
        "PRXTransformer2DModel",
        {
            "in_channels": 4,
            "context_in_dim": 40,
            "hidden_size": 32,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [8, 8],
        },
        _prx_request,
        _prx_step,
        blocks=("depth",),
    ),
    "sana": Denoiser(
        "SanaTransformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 40,
            "sample_size": 4,
            "guidance_embeds": True,
            "qk_norm": "rms_norm_across_heads",
            "timestep_scale": 1000.0,
        },
        _sana_request,
        _sana_step,
        blocks=("num_layers",),
    ),
    "z-image": Denoiser(
        "ZImageTransformer2DModel",
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 40,
            "axes_dims": list(ROPE),
            "axes_lens": [256, 64, 64],
        },
        _z_request,
        _z_step,
        blocks=("n_layers",),
        prepare=_z_prepare,
    ),
}
