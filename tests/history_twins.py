"""Pipelines of which a history (``test_histories.py``) has one compiled and one that stays untouched.

They are diffusers' own with one block. Qwen-Image's modulation depends on the schedule alone and its guidance branches
take turns; Stable Diffusion 3's depends on the prompt too and its branches share a batch.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler as Euler
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import nn

from dithoist import compile_pipeline
from dithoist.models.small.common import randomize

Request = dict[str, torch.Tensor]

_DICTS = (dict, OrderedDict)
WIDTH, TEXT = 48, 24
"""Of the prompt: more than 4 KiB, so that it is compared with a snapshot. (Modulation has 64 KiB: it is released.)"""

_HEADS = {"num_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": WIDTH}
_NO_ENCODERS = ("vae", "text_encoder", "tokenizer")


def louder(processor: Any) -> Any:
    """Attention of the same signature, which ``Attention`` looks at, that gives twice as much."""

    class Louder(processor):  # type: ignore[misc]
        @functools.wraps(processor.__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return tuple(2 * x for x in super().__call__(*args, **kwargs))

    return Louder


@dataclass(frozen=True)
class Family:
    """A pipeline, how it is called, and which of its parts are worth changing."""

    pipeline: Any
    without: tuple[str, ...]
    transformer: Callable[[], nn.Module]
    guidance: str
    weights: tuple[str, ...]
    """Layers whose work is hoisted to the schedule and to the request, and one of the body."""
    schedulers: tuple[Callable[[], Any], ...]
    processor: Any
    kwargs: str
    dynamic: bool | None

    def build(self) -> Any:
        """The pipeline, its weights drawn from a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformer = randomize(self.transformer()).eval()
        parts = {"transformer": transformer, "scheduler": Euler(), **dict.fromkeys(self.without)}
        pipe = self.pipeline(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def prompt(self, seed: int, batch: int) -> Request:
        """Embeddings of a prompt and of a negative one."""
        generator = torch.Generator().manual_seed(seed)
        request = {}
        for sign in ("", "negative_"):
            request[f"{sign}prompt_embeds"] = torch.randn(batch, TEXT, WIDTH, generator=generator)
            if "text_encoder_2" in self.without:
                name = f"{sign}pooled_prompt_embeds"
                request[name] = torch.randn(batch, WIDTH, generator=generator)
            else:
                mask = torch.ones(batch, TEXT, dtype=torch.int64)
                mask[0, -1 - seed :] = 0
                request[f"{sign}prompt_embeds_mask"] = mask
        return request


FAMILIES = {
    "qwen-image": Family(
        diffusers.QwenImagePipeline,
        _NO_ENCODERS,
        lambda: diffusers.QwenImageTransformer2DModel(
            **_HEADS, in_channels=16, out_channels=4, axes_dims_rope=(8, 12, 12)
        ),
        "true_cfg_scale",
        ("transformer_blocks.0.img_mod.1", "txt_in", "transformer_blocks.0.attn.to_q"),
        (Euler, lambda: Euler(shift=3.0), lambda: _flow(diffusers.UniPCMultistepScheduler)),
        QwenDoubleStreamAttnProcessor2_0,
        "attention_kwargs",
        dynamic=False,  # It compiles anew for each size anyway, and quicker so.
    ),
    "stable-diffusion-3": Family(
        diffusers.StableDiffusion3Pipeline,
        (*_NO_ENCODERS, "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"),
        lambda: diffusers.SD3Transformer2DModel(
            **_HEADS, in_channels=4, out_channels=4, sample_size=8, pos_embed_max_size=8,
            caption_projection_dim=64, pooled_projection_dim=WIDTH,
        ),
        "guidance_scale",
        ("transformer_blocks.0.norm1.linear", "context_embedder", "transformer_blocks.0.attn.to_q"),
        (
            Euler,
            diffusers.FlowMatchHeunDiscreteScheduler,
            lambda: _flow(diffusers.UniPCMultistepScheduler),
            lambda: _flow(diffusers.DPMSolverMultistepScheduler),
        ),
        JointAttnProcessor2_0,
        "joint_attention_kwargs",
        dynamic=None,
    ),
}  # fmt: skip


def _flow(scheduler: Any) -> Any:
    return scheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


class CompiledTwin:
    """A compiled pipeline, and all that it takes to have it as it was at first."""

    def __init__(self, family: Family, options: dict[str, Any]) -> None:
        self.pristine = family.build()
        self.pipe = compile_pipeline(copy.deepcopy(self.pristine), **options)
        transformer = self.pipe.transformer
        self.state = transformer._compiled_call_impl.state
        objects = (self.pipe, *transformer.modules(), *transformer.attn_processors.values())
        self._attributes = [(vars(o), _copies(vars(o))) for o in objects]
        self._bits = [(t, t.detach().clone()) for t in (*transformer.parameters(), *transformer.buffers())]

    def reset(self) -> None:
        """Put every attribute and weight back; hold nothing."""
        for attributes, saved in self._attributes:
            _put_back(attributes, saved)
        for tensor, bits in self._bits:
            tensor.data = bits.clone()
        self.state.held.clear()
        self.pipe.scheduler = Euler()

    @property
    def worn(self) -> bool:
        """Whether Dynamo may soon compile no more, or an input has lost its label."""
        return self.state.captured > 14 or any(g.demoted for g in self.state.graphs)


def _copies(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if type(value) in _DICTS else value for name, value in attributes.items()}


def _put_back(attributes: dict[str, Any], saved: dict[str, Any]) -> None:
    for name in attributes.keys() - saved.keys():
        del attributes[name]
    for name, value in saved.items():
        if type(value) in _DICTS:
            attributes[name].clear()
            attributes[name].update(value)
        else:
            attributes[name] = value
