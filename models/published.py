"""Published models: the configuration of their denoiser, and the size their pipeline gives a generation by default.

A configuration lists what differs from the defaults of the class. Called they are as :mod:`dithoist.models.small` calls
the same class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scale:
    """What a latent token stands for.

    Attributes:
        pixels: height and width of the picture part that one token covers: the autoencoder's factor times the patch's.
        frames: frames of a video that one token covers; the first token of each place covers one frame.
    """

    pixels: int = 16
    frames: int = 4


@dataclass(frozen=True)
class Published:
    """One published model.

    Attributes:
        title: name for people.
        denoiser: key of its class in :data:`dithoist.models.small.DENOISERS`.
        config: what differs from the class's defaults.
        height: of a generation, in pixels.
        width: in pixels.
        frames: 1 for a picture.
        prompt: text tokens, padding included: what the pipeline pads to, or else a long one.
    """

    title: str
    denoiser: str
    config: Mapping[str, Any] = field(default_factory=dict)
    height: int = 1024
    width: int = 1024
    frames: int = 1
    prompt: int = 512


SCALES: Mapping[str, Scale] = {"sana": Scale(32), "sana-video": Scale(32), "ltx-video": Scale(32, 8)}
"""Scale by key of the class; all others have :class:`Scale`'s defaults."""

PUBLISHED: Mapping[str, Published] = {
    "flux.1-dev": Published("FLUX.1-dev", "flux", {"guidance_embeds": True}),
    "qwen-image": Published("Qwen-Image", "qwen-image"),
    "sd3.5-large": Published(
        "SD3.5-large",
        "sd3",
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        prompt=77 + 256,
    ),
    "hunyuan-video": Published("HunyuanVideo", "hunyuan-video", height=720, width=1280, frames=129, prompt=256),
    "wan2.1-14b": Published("Wan2.1-14B", "wan", height=480, width=832, frames=81),
    "ideogram-4": Published("Ideogram 4", "ideogram-4", prompt=2048),
    "pixart-sigma": Published(
        "PixArt-Sigma", "pixart", {"caption_channels": 4096, "use_additional_conditions": False}, prompt=300
    ),
    "flux.2-dev": Published("FLUX.2-dev", "flux-2"),
    "z-image": Published("Z-Image", "z-image", {"axes_lens": [1536, 512, 512]}),
    "sana-1.6b": Published("SANA 1.6B", "sana", prompt=300),
    "cogview4-6b": Published(
        "CogView4-6B",
        "cogview-4",
        {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128},
        prompt=1024,
    ),
    "ltx-video": Published("LTX-Video", "ltx-video", height=512, width=704, frames=161, prompt=128),
    "lumina-image-2.0": Published("Lumina-Image 2.0", "lumina-2", {"cap_feat_dim": 2304}, prompt=256),
    "auraflow": Published("AuraFlow", "aura-flow", prompt=256),
    "chroma1-hd": Published("Chroma1-HD", "chroma"),
    "glm-image": Published("GLM-Image", "glm-image", {"num_attention_heads": 32, "attention_head_dim": 128}),
}
"""Published models by name."""
