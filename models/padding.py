"""Which arguments of a denoiser are padded, and neither influence nor carry the result where they are.

A declaration is a promise about a class: whatever stands at a padded position, the result is the same, and so it is
without that position. ``tests/models/test_padding.py`` holds each to it. A class without one is not trimmed. Why some
have none: Chroma adds a mask of ones and zeros to the scores, which hides nothing; the results of LongCat-Audio and
Stable Audio 3 change with the number of padded tokens; Z-Image and others are given lists that have no padding.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Padding:
    """Arguments of ``forward`` that hold one and the same row of tokens.

    Attributes:
        mask: argument of shape ``[B, T]`` that is 0 or false where a token is padding.
        tokens: arguments of shape ``[B, T, ...]``; those that a call leaves out, or gives without ``T``, stay.
        leading: whether padding may stand before the tokens too. That needs positions that are given, not counted.
        result: whether the result has these tokens, along its dimension 1.
    """

    mask: str
    tokens: tuple[str, ...]
    leading: bool = False
    result: bool = False


_TEXT = Padding("encoder_attention_mask", ("encoder_hidden_states",))
_TEXT_2 = Padding("encoder_attention_mask_2", ("encoder_hidden_states_2",))
_STATES = Padding("encoder_hidden_states_mask", ("encoder_hidden_states",))

PADDING: dict[str, tuple[Padding, ...]] = {
    "AllegroTransformer3DModel": (_TEXT,),
    "HunyuanImageTransformer2DModel": (_TEXT, _TEXT_2),
    "HunyuanVideo15Transformer3DModel": (_TEXT, _TEXT_2),
    "HunyuanVideoFramepackTransformer3DModel": (_TEXT,),
    "HunyuanVideoTransformer3DModel": (_TEXT,),
    "Ideogram4Transformer2DModel": (
        Padding(
            "indicator",
            ("hidden_states", "timestep", "encoder_hidden_states", "position_ids", "segment_ids"),
            leading=True,
            result=True,
        ),
    ),
    "JoyImageEditPlusTransformer3DModel": (_STATES,),
    "Kandinsky6Transformer3DModel": (_TEXT,),
    "LTXVideoTransformer3DModel": (_TEXT,),
    "Lumina2Transformer2DModel": (_TEXT,),
    "LuminaNextDiT2DModel": (Padding("encoder_mask", ("encoder_hidden_states",)),),
    "MochiTransformer3DModel": (_TEXT,),
    "NucleusMoEImageTransformer2DModel": (_STATES,),
    "PRXTransformer2DModel": (Padding("attention_mask", ("encoder_hidden_states",)),),
    "PixArtTransformer2DModel": (_TEXT,),
    "QwenImageTransformer2DModel": (_STATES,),
    "SanaTransformer2DModel": (_TEXT,),
    "SanaVideoTransformer3DModel": (_TEXT,),
}
"""By class name."""
