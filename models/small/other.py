"""Denoisers of sound, proteins and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from .spec import HEADS, Denoiser, Draw


def _sound(d: Draw, channels: int) -> torch.Tensor:
    return d.normal(d.batch, channels, d.tokens)


def _ace_request(d: Draw) -> dict[str, Any]:
    c = d.config
    return {
        "encoder_hidden_states": d.text(c.hidden_size),
        "context_latents": d.packed(c.in_channels - c.audio_acoustic_hidden_dim),
        "attention_kwargs": None,
    }


def _ace_step(d: Draw, sigma: float) -> dict[str, Any]:
    timestep = sigma * torch.ones(d.batch, dtype=d.dtype)
    return {
        "hidden_states": d.packed(d.config.audio_acoustic_hidden_dim),
        "timestep": timestep,
        "timestep_r": timestep,
    }


def _longcat_request(d: Draw) -> dict[str, Any]:
    return {
        "encoder_hidden_states": d.text(d.config.dit_text_dim),
        "encoder_attention_mask": d.mask(torch.bool),
        "attention_mask": torch.ones(d.batch, d.tokens, dtype=torch.bool),
        "latent_cond": torch.zeros(d.batch, d.tokens, d.config.latent_dim, dtype=d.dtype),
    }


def _longcat_step(d: Draw, sigma: float) -> dict[str, Any]:
    timestep = (d.t(sigma) / 1000).expand(d.batch).to(d.dtype)
    return {"hidden_states": d.packed(d.config.latent_dim), "timestep": timestep}


def _minimax_request(d: Draw) -> dict[str, Any]:
    return {"encoder_hidden_states": d.packed(d.config.condition_dim)}


def _minimax_step(d: Draw, sigma: float) -> dict[str, Any]:
    """Time runs from noise at 0 to sound at 1."""
    timestep = torch.tensor(1 - sigma).expand(d.batch).to(d.dtype)
    return {"hidden_states": _sound(d, d.config.in_channels), "timestep": timestep}


def _stable_audio_request(d: Draw) -> dict[str, Any]:
    c = d.config
    return {
        "encoder_hidden_states": d.text(c.cross_attention_input_dim),
        "global_hidden_states": d.normal(d.batch, 1, c.global_states_input_dim),
        "rotary_embedding": get_1d_rotary_pos_embed(
            c.attention_head_dim // 2, d.tokens + 1, use_real=True, repeat_interleave_real=False
        ),
    }


def _stable_audio_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": _sound(d, d.config.in_channels), "timestep": torch.tensor(sigma).unsqueeze(0)}


def _stable_audio_3_request(d: Draw) -> dict[str, Any]:
    """The last token of the prompt is the length of the sound, which is also given on its own."""
    length = d.normal(d.batch, d.config.global_cond_dim)
    text = torch.cat([d.text(d.config.cond_token_dim), length[:, None]], dim=1)
    mask = torch.cat([d.mask(), torch.ones(d.batch, 1, dtype=torch.int64)], dim=1)
    return {"encoder_hidden_states": text, "global_hidden_states": length, "encoder_attention_mask": mask}


def _stable_audio_3_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": _sound(d, d.config.io_channels), "timestep": torch.tensor(sigma).expand(d.batch)}


def _spectrogram_request(d: Draw) -> dict[str, Any]:
    """Encoded notes, and the encoded part of the spectrogram before."""
    notes, before = (d.normal(d.batch, n, d.config.d_model) for n in (d.prompt, d.tokens))
    masks = (d.mask(torch.bool), torch.ones(d.batch, d.tokens, dtype=torch.bool))
    return {"encodings_and_masks": [(notes, masks[0]), (before, masks[1])]}


def _spectrogram_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "decoder_input_tokens": d.packed(d.config.input_dims),
        "decoder_noise_time": (d.t(sigma, torch.int64) / 1000)[None] * torch.ones(d.batch),
    }


def _prior_request(d: Draw) -> dict[str, Any]:
    """The prompt is as long as the configuration says."""
    c = d.config
    return {
        "proj_embedding": d.normal(d.batch, c.embedding_dim),
        "encoder_hidden_states": d.normal(d.batch, c.num_embeddings, c.embedding_dim),
        "attention_mask": d.mask(torch.bool, length=c.num_embeddings),
    }


def _prior_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {"hidden_states": d.normal(d.batch, d.config.embedding_dim), "timestep": d.t(sigma, torch.int64)}


def _protein_request(d: Draw) -> dict[str, Any]:
    """Two molecules, the end of the second one padding."""
    mask = torch.arange(d.tokens) < d.tokens - 1
    half = (torch.arange(d.tokens) >= d.tokens // 2).long().repeat(d.batch, 1)
    return {
        "padding_mask": mask.repeat(d.batch, 1),
        "token_type": d.integers(d.config.num_token_types, d.batch, d.tokens),
        "atom37_mask": torch.ones(d.batch, d.tokens, 37, dtype=torch.bool),
        "conditioning": {
            "is_in_context_conditioning": torch.zeros(d.batch, d.tokens, dtype=torch.bool),
            "supports_local_latent": torch.ones(d.batch, d.tokens, dtype=torch.bool),
            "molecule_iid": half,
            "molecule_entity_id": half.clone(),
        },
        "recycle_depth": 2,
        "attention_kwargs": None,
    }


def _protein_step(d: Draw, sigma: float) -> dict[str, Any]:
    return {
        "bb_ca": d.normal(d.batch, d.tokens, 3, dtype=torch.float32),
        "local_latents": d.normal(d.batch, d.tokens, d.config.latent_dim, dtype=torch.float32),
        "bb_ca_time": torch.tensor(1 - sigma).expand(d.batch),
        "local_latents_time": torch.tensor((1 - sigma) ** 2).expand(d.batch),
    }


DENOISERS: Mapping[str, Denoiser] = {
    "ace-step": Denoiser(
        "AceStepTransformer1DModel",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "in_channels": 12,
            "audio_acoustic_hidden_dim": 4,
            "sliding_window": 4,
        },
        _ace_request,
        _ace_step,
        blocks=("num_hidden_layers",),
    ),
    "longcat-audio": Denoiser(
        "LongCatAudioDiTTransformer",
        {"dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 40, "latent_dim": 8, "ff_mult": 2.0},
        _longcat_request,
        _longcat_step,
        blocks=("dit_depth",),
    ),
    "minimax-music-3": Denoiser(
        "MiniMaxMusic3Transformer1DModel",
        {
            **HEADS,
            "in_channels": 8,
            "condition_dim": 24,
            "num_layers": 2,
            "ff_inner_dim": 64,
            "rotary_dim": 8,
            "fourier_embedding_dim": 16,
        },
        _minimax_request,
        _minimax_step,
        blocks=("num_layers",),
    ),
    "stable-audio": Denoiser(
        "StableAudioDiTModel",
        {
            **HEADS,
            "sample_size": 16,
            "in_channels": 8,
            "out_channels": 8,
            "num_layers": 2,
            "num_key_value_attention_heads": 1,
            "cross_attention_dim": 16,
            "time_proj_dim": 16,
            "global_states_input_dim": 24,
            "cross_attention_input_dim": 40,
        },
        _stable_audio_request,
        _stable_audio_step,
        blocks=("num_layers",),
    ),
    "stable-audio-3": Denoiser(
        "StableAudio3DiTModel",
        {
            "io_channels": 8,
            "embed_dim": 64,
            "depth": 2,
            "num_heads": 2,
            "cond_token_dim": 24,
            "global_cond_dim": 24,
            "local_add_cond_dim": 9,
            "timestep_features_dim": 16,
            "ff_mult": 2.0,
            "num_memory_tokens": 4,
        },
        _stable_audio_3_request,
        _stable_audio_3_step,
        blocks=("depth",),
    ),
    "spectrogram": Denoiser(
        "T5FilmDecoder",
        {
            "input_dims": 8,
            "targets_length": 64,
            "d_model": 32,
            "num_layers": 2,
            "num_heads": 2,
            "d_kv": 16,
            "d_ff": 64,
        },
        _spectrogram_request,
        _spectrogram_step,
        blocks=("num_layers",),
    ),
    "kandinsky-prior": Denoiser(
        "PriorTransformer",
        {**HEADS, "num_layers": 2, "embedding_dim": 24, "num_embeddings": 8},
        _prior_request,
        _prior_step,
        blocks=("num_layers",),
    ),
    "rfd4-proteina": Denoiser(
        "RFD4ProteinaTransformer",
        {
            "nlayers": 2,
            "token_dim": 32,
            "nheads": 2,
            "dim_cond": 16,
            "pair_repr_dim": 16,
            "latent_dim": 4,
            "token_type_emb_dim": 8,
            "t_emb_dim": 16,
            "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
            "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents", "recycle_remaining"),
            "feats_pair_repr": ("xt_bb_ca_pair_dists", "molecule_idx_pair", "molecule_entity_pair"),
            "feats_pair_cond": ("time_emb_bb_ca", "time_emb_local_latents"),
            "tri_mult_c": 8,
        },
        _protein_request,
        _protein_step,
        blocks=("nlayers",),
    ),
}
