"""Labels: the registry, the default rule, and what the user says."""

from __future__ import annotations

import inspect

import diffusers
import pytest

from dithoist.models.families import FAMILIES, argument_labels, default_label
from dithoist.passes import BindingTime


@pytest.mark.parametrize(
    ("argument", "label"),
    [
        ("hidden_states", "STEP"), ("sample", "STEP"), ("x", "STEP"), ("noisy_latents", "STEP"),
        ("controlnet_block_samples", "STEP"), ("timestep", "SCHEDULE"), ("t", "SCHEDULE"),
        ("sigma", "SCHEDULE"), ("guidance", "SCHEDULE"), ("timestep_cond", "SCHEDULE"),
        ("encoder_hidden_states", "REQUEST"), ("attention_mask", "REQUEST"), ("img_ids", "REQUEST"),
        ("pooled_projections", "REQUEST"), ("text", "REQUEST"), ("target_size", "REQUEST"),
        ("condition_latents", "REQUEST"), ("context_latents", "REQUEST"), ("video_ref_latents", "REQUEST"),
        ("indices_latents", "REQUEST"), ("position_indices", "REQUEST"), ("timestep_indices", "SCHEDULE"),
        ("vision_tokens", "STEP"), ("decoder_input_tokens", "STEP"), ("text_tokens", "REQUEST"),
    ],
)  # fmt: skip
def test_the_default_rule(argument: str, label: str) -> None:
    assert default_label(argument) == BindingTime[label]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_names_arguments_its_class_has(name: str) -> None:
    arguments = inspect.signature(getattr(diffusers, name).forward).parameters
    assert set(FAMILIES[name].labels) <= set(arguments)


def test_what_has_a_time_of_its_own_is_noisy() -> None:
    labels = argument_labels("", ["bb_ca", "bb_ca_time", "text", "sigma"], {})
    assert labels == {
        "bb_ca": BindingTime.STEP, "bb_ca_time": BindingTime.SCHEDULE, "text": BindingTime.REQUEST,
        "sigma": BindingTime.SCHEDULE,
    }  # fmt: skip


def test_the_user_overrides_the_family_and_the_first_argument_stands_for_missing_latents() -> None:
    labels = argument_labels(
        "GlmImageTransformer2DModel", ["hidden_states", "timestep"], {"timestep": BindingTime.STEP}
    )
    assert labels == {"hidden_states": BindingTime.STEP, "timestep": BindingTime.STEP}
    labels = argument_labels("Mine", ["picture", "timestep"], {})
    assert labels == {"picture": BindingTime.STEP, "timestep": BindingTime.SCHEDULE}
    assert argument_labels("Mine", [], {}) == {}
