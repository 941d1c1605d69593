"""When each argument of a denoiser's ``forward`` changes: the registry, and the rule for everything else.

Labels are speculation that run-time checks make safe: a wrong one costs speed, never a number. So the registry
holds only families whose arguments the rule would get wrong or that deserve to be explicit, one line each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..passes import BindingTime

_SCHEDULE = re.compile(
    r"(.*_)?(t|times?|timesteps?|sigmas?|guidance|guidance_scale|noise_level)(_cond|_r)?"
    r"|i|step|(step_)?(index|idx)|timestep_(index|idx|indices|indexes)"
)
_STEP = re.compile(
    r"x|z|sample|((audio|video)_)?hidden_states|(.*_)?(latents?|residuals?|block_samples)"
    r"|(.*_)?(action|audio|input|latent|sound|video|vision)_tokens"
)
_GIVEN_LATENTS = re.compile(
    r"(.*_)?(cond|condition|context|control|indices|inpaint|input_image|input_img|masked|ref|reference)_latents?"
)
_OWN_TIME = re.compile(r"(?P<of>.+)_(time|timestep|sigma)")


@dataclass(frozen=True)
class Family:
    """One kind of denoiser.

    Attributes:
        title: name for people.
        labels: binding time by argument name; arguments not named follow :func:`default_label`.
    """

    title: str
    labels: Mapping[str, BindingTime] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "GlmImageTransformer2DModel": Family(
        "GLM-Image", {"hidden_states": BindingTime.STEP, "timestep": BindingTime.SCHEDULE}
    ),
    "Ideogram4Transformer2DModel": Family(
        "Ideogram 4", {"hidden_states": BindingTime.STEP, "timestep": BindingTime.SCHEDULE}
    ),
}
"""Families by the class name of their transformer."""


def default_label(argument: str) -> BindingTime:
    """Binding time of an argument no family and no user named.

    Latents by their usual names are ``STEP``, unless the name says that they are given; timestep-like arguments are
    ``SCHEDULE``; all else, such as prompt embeddings, masks and sizes, is ``REQUEST``.
    """
    if _STEP.fullmatch(argument) and not _GIVEN_LATENTS.fullmatch(argument):
        return BindingTime.STEP
    if _SCHEDULE.fullmatch(argument):
        return BindingTime.SCHEDULE
    return BindingTime.REQUEST


def argument_labels(class_name: str, arguments: list[str], chosen: Mapping[str, BindingTime]) -> dict[str, BindingTime]:
    """Label of every argument: the user's, the family's, or the default rule's.

    An argument with a time of its own beside it (``x`` and ``x_time``) is taken for latents too, and where there are
    none at all, the first argument.
    """
    family = FAMILIES.get(class_name, Family(class_name))
    timed = {match["of"] for a in arguments if (match := _OWN_TIME.fullmatch(a))}
    defaults = {a: BindingTime.STEP if a in timed else default_label(a) for a in arguments}
    labels = defaults | dict(family.labels) | dict(chosen)
    if arguments and BindingTime.STEP not in labels.values():
        labels[arguments[0]] = BindingTime.STEP
    return labels
