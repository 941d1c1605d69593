"""Small diffusers pipelines with random weights, built without a download.

`build_pipeline` makes one, `example_call` the arguments of a call. Those of `FAMILIES`, described here, have text
encoders and draw pictures; to those of `EMBEDDED`, in the file beside this one, prompts are given as embeddings.

Pipelines, schedulers, VAEs, text encoders and transformers are of the classes a checkpoint loads; only widths
and depths shrink, and the weights are drawn from a seed. Tokenizers encode bytes, so they need no vocabulary.
"tiny" is for tests. "demo" keeps the proportions of a checkpoint's blocks and embeddings at an eighth
(GLM-Image) or a ninth (Ideogram 4) of the width. Its blocks and image tokens are fewer, so what a step can
skip is a larger part of it than in the checkpoint.

A family is one entry of `FAMILIES`: a builder of the pipeline and the arguments its call needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from .common import find, randomize, set_dtype
from .embedded import EMBEDDED, Embedded

Size = Literal["tiny", "demo"]

# GLM-Image encodes only the quoted part of a prompt, so the default has one.
DEFAULT_PROMPT = 'A bakery window with a sign that says "FRESH BREAD EVERY MORNING"'

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|user|>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# No picture goes in, so nothing runs the vision towers.
_VISION_CONFIG = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1}


class _Glm(NamedTuple):
    heads: int
    head_dim: int
    layers: int
    text_dim: int
    time_dim: int
    condition_dim: int
    codebook: int


class _Ideogram(NamedTuple):
    heads: int
    head_dim: int
    layers: int
    intermediate: int
    adaln_dim: int
    encoder_dim: int
    mrope: tuple[int, int, int]
    latent_channels: int


_PIXELS: dict[Size, int] = {"tiny": 64, "demo": 256}
_STEPS: dict[Size, int] = {"tiny": 3, "demo": 20}
# Four levels: both families reduce a picture by 8 in the VAE and by 2 in the patches.
_VAE_CHANNELS: dict[Size, tuple[int, ...]] = {"tiny": (8, 8, 8, 8), "demo": (16, 16, 32, 32)}
_GLM: dict[Size, _Glm] = {
    "tiny": _Glm(4, 16, 2, 48, 32, 16, 64),
    "demo": _Glm(16, 32, 8, 184, 64, 32, 4096),
}
_IDEOGRAM: dict[Size, _Ideogram] = {
    "tiny": _Ideogram(4, 16, 2, 128, 32, 16, (2, 2, 2), 4),
    "demo": _Ideogram(8, 64, 8, 1360, 56, 512, (6, 5, 5), 32),
}


def build_pipeline(
    name: str, size: Size = "tiny", *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> DiffusionPipeline:
    """The pipeline of a family, in eval mode, its parameters in `dtype` and drawn from `seed`."""
    family = _family(name, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = family.build(dtype, seed) if isinstance(family, Embedded) else family.build(size)
    denoisers = family.denoisers if isinstance(family, Embedded) else ()  # They have their dtype.
    for key, component in pipe.components.items():
        if isinstance(component, nn.Module) and key not in denoisers:
            set_dtype(component.eval(), dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def example_call(
    name: str,
    size: Size = "tiny",
    *,
    prompt: str | list[str] = DEFAULT_PROMPT,
    steps: int | None = None,
    guidance: bool = True,
    seed: int = 0,
    output_type: str = "latent",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Arguments for one text-to-image call of `build_pipeline(name, size)`, with a fresh generator.

    `steps` defaults to 3 ("tiny") or 20 ("demo"). Without guidance GLM-Image skips the unconditional forward;
    Ideogram 4 runs it and gives it no weight. A GLM-Image call seeds torch's global generator with `seed`, as
    its pipeline always does to draw prior tokens. `dtype` is that of embeddings, where these are given.
    """
    family = _family(name, size)
    call = {
        "num_inference_steps": _STEPS[size] if steps is None else steps,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": output_type,
    }
    if isinstance(family, Embedded):
        prompts = [prompt] if isinstance(prompt, str) else prompt
        return {**call, **family.arguments(prompts, guidance, dtype)}
    return {
        **call,
        "prompt": prompt,
        "height": _PIXELS[size],
        "width": _PIXELS[size],
        "guidance_scale": family.guidance if guidance else 1.0,
        **family.extra,
    }


def _build_glm_image(size: Size) -> DiffusionPipeline:
    """GLM-Image with its autoregressive prior, which draws the prior tokens from the prompt.

    The prior's head covers the codebook only (a checkpoint's has a few more ids): untrained, it would else
    draw ids the transformer has no embedding for, or stop before the picture is complete. So text ids follow
    the codebook's. Any square picture costs 256 preview tokens, drawn before its own.
    """
    c = _GLM[size]
    start, end, image = "<|image_start|>", "<|image_end|>", "<|image|>"
    tokenizer = _byte_tokenizer(
        reserved=tuple(f"<|vq_{i}|>" for i in range(c.codebook)),
        special=[start, end, image, "<|user|>", "<|assistant|>", "<|pad|>", "<sop>", "<eop>"],
        bos_token=start,
        eos_token=end,
        extra_special_tokens={"image_token": image, "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
    )
    start_id, end_id, image_id = tokenizer.convert_tokens_to_ids([start, end, image])
    width = 32
    # Twice the range that keeps a signal's scale: with milder attention the draws soon forget the prompt.
    text_config = _decoder_config(tokenizer, width, 1, [2, 3, 3], 2 * width**-0.5)
    prior = transformers.GlmImageForConditionalGeneration(
        transformers.GlmImageConfig(
            text_config={**text_config, "vision_vocab_size": c.codebook, "eos_token_id": end_id},
            vision_config=_VISION_CONFIG,
            vq_config={"embed_dim": 16, "num_embeddings": c.codebook, "latent_channels": 16},
            image_token_id=image_id,
            image_start_token_id=start_id,
            image_end_token_id=end_id,
        )
    )
    text_encoder = transformers.T5EncoderModel(
        # ByT5's vocabulary: bytes, three special tokens and 125 sentinels.
        transformers.T5Config(vocab_size=384, d_model=c.text_dim, feed_forward_proj="gated-gelu")
    )
    channels = 16
    vae = diffusers.AutoencoderKL(
        **_vae_blocks(size),
        latent_channels=channels,
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    transformer = diffusers.GlmImageTransformer2DModel(
        in_channels=channels,
        out_channels=channels,
        num_layers=c.layers,
        num_attention_heads=c.heads,
        attention_head_dim=c.head_dim,
        text_embed_dim=c.text_dim,
        time_embed_dim=c.time_dim,
        condition_dim=c.condition_dim,
        prior_vq_quantizer_codebook_size=c.codebook,
    )
    return diffusers.GlmImagePipeline(
        tokenizer=transformers.ByT5Tokenizer(),
        processor=transformers.GlmImageProcessor(
            transformers.GlmImageImageProcessorPil(), tokenizer, chat_template=_CHAT_TEMPLATE
        ),
        text_encoder=text_encoder,
        vision_language_encoder=prior,
        vae=vae,
        transformer=randomize(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )


def _build_ideogram_4(size: Size) -> DiffusionPipeline:
    """Ideogram 4, whose conditional and unconditional transformers have different weights."""
    c = _IDEOGRAM[size]
    tokenizer = _byte_tokenizer(
        special=["<|pad|>", "<|user|>", "<|assistant|>", "<|image|>"], chat_template=_CHAT_TEMPLATE
    )
    vision_config = {
        "out_hidden_size": c.encoder_dim,
        "num_position_embeddings": 4,
        "deepstack_visual_indexes": [0],
    }
    text_encoder = transformers.Qwen3VLModel(
        transformers.Qwen3VLConfig(
            text_config=_decoder_config(
                tokenizer, c.encoder_dim, QWEN3_VL_ACTIVATION_LAYERS[-1] + 1, [4, 2, 2], c.encoder_dim**-0.5
            ),
            vision_config={**_VISION_CONFIG, **vision_config},
            image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        )
    )
    conditional, unconditional = (
        randomize(
            diffusers.Ideogram4Transformer2DModel(
                in_channels=4 * c.latent_channels,
                num_layers=c.layers,
                attention_head_dim=c.head_dim,
                num_attention_heads=c.heads,
                intermediate_size=c.intermediate,
                adaln_dim=c.adaln_dim,
                llm_features_dim=c.encoder_dim * len(QWEN3_VL_ACTIVATION_LAYERS),
                mrope_section=c.mrope,
            )
        )
        for _ in range(2)
    )
    return diffusers.Ideogram4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        # The latent statistics are those of a fresh batch norm: mean 0, variance 1.
        vae=diffusers.AutoencoderKLFlux2(**_vae_blocks(size), latent_channels=c.latent_channels),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=conditional,
        unconditional_transformer=unconditional,
    )


@dataclass(frozen=True)
class _Family:
    build: Callable[[Size], DiffusionPipeline]
    guidance: float
    extra: Mapping[str, Any]


FAMILIES: Mapping[str, _Family] = {
    "glm-image": _Family(_build_glm_image, 1.5, {}),
    # A checkpoint's guidance is 7, then 3. Two random transformers disagree more than a trained pair does:
    # 7 would drown the text in the latents it inflates.
    "ideogram-4": _Family(_build_ideogram_4, 3.0, {"guidance_schedule": None, "max_sequence_length": 256}),
}


def _family(name: str, size: Size) -> _Family | Embedded:
    families: dict[str, _Family | Embedded] = {**FAMILIES, **EMBEDDED}
    family = find(families, name, "pipeline")
    if isinstance(family, Embedded) and size != "tiny":
        raise ValueError(f"{name!r} has no configuration for {size!r}")
    return family


def _byte_tokenizer(special: list[str], reserved: tuple[str, ...] = (), **kwargs: Any) -> PreTrainedTokenizerFast:
    """One token per byte, after the `reserved` ids: every text has an encoding and no two share one."""
    vocabulary = [*reserved, *special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **kwargs,
    )


def _decoder_config(
    tokenizer: PreTrainedTokenizerFast, width: int, layers: int, mrope: list[int], init: float
) -> dict[str, Any]:
    """A language model with two heads of 16; `init` replaces the usual 0.02, meant for wide models."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "initializer_range": init,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": mrope},
        "pad_token_id": tokenizer.pad_token_id,
    }


def _vae_blocks(size: Size) -> dict[str, Any]:
    channels = _VAE_CHANNELS[size]
    return {
        "block_out_channels": channels,
        "down_block_types": ("DownEncoderBlock2D",) * len(channels),
        "up_block_types": ("UpDecoderBlock2D",) * len(channels),
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }
