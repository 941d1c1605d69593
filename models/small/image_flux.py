"""Denoisers of pictures that are built or called as FLUX is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .spec import HEADS, ROPE, Denoiser, Draw, packed_step


def _bria_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "attention_kwargs": None,
        "txt_ids": torch.zeros(d.prompt, 3),
        "img_ids": d.picture_ids(),
    }


def _bria_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": d.packed(d.config.in_channels), "timestep": d.timestep(sigma)}


def _fibo_request(d: Draw) -> dict[str, Any]:
    mask = torch.cat([d.mask(torch.bool), torch.ones(d.batch, d.tokens, dtype=torch.bool)], dim=1)
    layers = d.config.num_layers + d.config.num_single_layers
    return {
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "text_encoder_layers": [d.text(d.config.text_encoder_dim) for _ in range(layers)],
        "joint_attention_kwargs": {"attention_mask": mask[:, None, None, :]},
        "txt_ids": torch.zeros(d.batch, d.prompt, 3, dtype=d.dtype),
        "img_ids": d.picture_ids(),
    }


def _fibo_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": d.packed(d.config.in_channels), "timestep": d.timestep(sigma).to(d.dtype)}


def _chroma_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "txt_ids": torch.zeros(d.prompt, 3, dtype=d.dtype),
        "img_ids": d.picture_ids(),
        "attention_mask": torch.cat([d.mask(d.dtype), torch.ones(d.batch, d.tokens, dtype=torch.bool)], dim=1),
        "joint_attention_kwargs": {},
    }


def _grid_ids(d: Draw, dtype: torch.dtype = torch.long) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of text and of the picture on the axes time, row, column, place in the text."""
    one = torch.arange(1)
    rows, columns = map(torch.arange, d.picture_grid)
    text = torch.cartesian_prod(one, one, one, torch.arange(d.prompt))
    return text.to(dtype), torch.cartesian_prod(one, rows, columns, one).to(dtype)


def _flux_2_request(d: Draw) -> dict[str, Any]:
    text, picture = _grid_ids(d)
    return {
        "guidance": torch.full((1,), 4.0).expand(d.batch),
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "txt_ids": torch.stack([text] * d.batch),
        "img_ids": picture[None].expand(d.batch, -1, -1),
        "joint_attention_kwargs": None,
    }


def _flux_3_request(d: Draw) -> dict[str, Any]:
    text, picture = _grid_ids(d, torch.float32)
    picture[:, 1:3] *= 0.5
    return {"encoder_hidden_states": d.text(d.config.joint_attention_dim), "txt_ids": text, "img_ids": picture}


def _flux_3_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "hidden_states": d.packed(d.config.in_channels),
        "timestep": (d.t(sigma) / 1000).expand(d.batch).to(d.dtype),
    }


def _krea_request(d: Draw) -> dict[str, Any]:
    ids = torch.cat([torch.zeros(d.prompt, 3), d.picture_ids(dtype=torch.float32)])
    return {
        "encoder_hidden_states": d.normal(d.batch, d.prompt, d.config.num_text_layers, d.config.text_hidden_dim),
        "position_ids": ids,
        "encoder_attention_mask": d.mask(torch.bool),
        "attention_kwargs": None,
    }


def _longcat_request(d: Draw) -> dict[str, Any]:
    text = torch.arange(d.prompt, dtype=torch.float32)
    picture = d.picture_ids(dtype=torch.float32) + d.prompt
    picture[:, 0] = 1
    return {
        "guidance": None,
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "txt_ids": torch.stack([torch.zeros(d.prompt), text, text], dim=1),
        "img_ids": picture,
    }


def _ovis_request(d: Draw) -> dict[str, Any]:
    text = torch.zeros(d.prompt, 3)
    text[:, 1:] = torch.arange(d.prompt)[:, None]
    return {
        "encoder_hidden_states": d.text(d.config.joint_attention_dim),
        "txt_ids": text.to(d.dtype),
        "img_ids": d.picture_ids(),
        "joint_attention_kwargs": {},
    }


_DOUBLE = {**HEADS, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 40}
_BOTH = ("num_layers", "num_single_layers")

DENOISERS: Mapping[str, Denoiser] = {
    "bria": Denoiser(
        "BriaTransformer2DModel",
        {**_DOUBLE, "in_channels": 16, "axes_dims_rope": ROPE},
        _bria_request,
        _bria_step,
        blocks=_BOTH,
    ),
    "bria-fibo": Denoiser(
        "BriaFiboTransformer2DModel",
        {**_DOUBLE, "in_channels": 16, "axes_dims_rope": ROPE, "text_encoder_dim": 24},
        _fibo_request,
        _fibo_step,
        blocks=_BOTH,
    ),
    "chroma": Denoiser(
        "ChromaTransformer2DModel",
        {
            **_DOUBLE,
            "in_channels": 16,
            "axes_dims_rope": ROPE,
            "approximator_num_channels": 16,
            "approximator_hidden_dim": 32,
            "approximator_layers": 2,
        },
        _chroma_request,
        packed_step,
        blocks=_BOTH,
    ),
    "flux-2": Denoiser(
        "Flux2Transformer2DModel",
        {**_DOUBLE, "in_channels": 16, "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
        _flux_2_request,
        packed_step,
        blocks=_BOTH,
    ),
    "flux-3": Denoiser(
        "Flux3Transformer2DModel",
        {
            **_DOUBLE,
            "in_channels": 16,
            "cond_in_channels": 16,
            "timestep_channels": 32,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        _flux_3_request,
        _flux_3_step,
        blocks=_BOTH,
    ),
    "krea-2": Denoiser(
        "Krea2Transformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "num_layers": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 64,
            "timestep_embed_dim": 32,
            "text_hidden_dim": 24,
            "num_text_layers": 3,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 32,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": ROPE,
        },
        _krea_request,
        _flux_3_step,
        blocks=("num_layers",),
    ),
    "longcat-image": Denoiser(
        "LongCatImageTransformer2DModel",
        {**_DOUBLE, "in_channels": 16, "pooled_projection_dim": 40, "axes_dims_rope": ROPE},
        _longcat_request,
        packed_step,
        blocks=_BOTH,
    ),
    "ovis-image": Denoiser(
        "OvisImageTransformer2DModel",
        {**_DOUBLE, "in_channels": 16, "out_channels": 16, "axes_dims_rope": ROPE},
        _ovis_request,
        packed_step,
        blocks=_BOTH,
    ),
}
