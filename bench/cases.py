"""What is measured: one list. Adding a case is one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_ID = re.compile(
    r"(?P<family>[\w.-]+?)-(?P<tokens>\d+)t-(?P<prompt>\d+)p-(?P<steps>\d+)s(-(?P<blocks>\d+)b)?(-(?P<dtype>\w+))?"
)


@dataclass(frozen=True)
class Case:
    """One denoiser at one size.

    Attributes:
        family: name of a denoiser in :mod:`dithoist.models.small`.
        tokens: picture tokens.
        prompt: prompt tokens.
        steps: denoising steps per picture.
        blocks: depth; ``None`` is the family's own.
        dtype: of weights and inputs.
    """

    family: str
    tokens: int = 256
    prompt: int = 64
    steps: int = 20
    blocks: int | None = None
    dtype: str = "float32"

    @property
    def id(self) -> str:
        """``flux-256t-64p-20s``, with ``-24b`` and ``-bfloat16`` where these are not the default."""
        depth = f"-{self.blocks}b" if self.blocks else ""
        return f"{self.family}-{self.tokens}t-{self.prompt}p-{self.steps}s{depth}" + (
            f"-{self.dtype}" if self.dtype != "float32" else ""
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as PyTorch's object."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @classmethod
    def from_id(cls, text: str) -> Case:
        """The case whose :attr:`id` is ``text``.

        Raises:
            ValueError: ``text`` is no id.
        """
        match = _ID.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no case id such as {CASES[0].id!r}")
        found = match.groupdict()
        numbers = {name: int(found[name]) for name in ("tokens", "prompt", "steps", "blocks") if found[name]}
        return cls(found["family"], **numbers, dtype=found["dtype"] or "float32")


FAMILIES = ("flux", "qwen-image", "sd3", "pixart", "wan", "glm-image", "ideogram-4", "hunyuan-video")

CASES = (
    *(Case(family) for family in FAMILIES),
    *(Case(family, tokens=tokens) for family in ("flux", "pixart", "ideogram-4") for tokens in (64, 1024)),
    *(Case(family, steps=steps) for family in ("flux", "pixart") for steps in (4, 50)),
    *(Case(family, prompt=512) for family in ("flux", "ideogram-4")),
    *(Case(family, tokens=64, steps=4, blocks=blocks) for family in ("flux", "qwen-image") for blocks in (6, 24)),
)

QUICK = Case("flux", tokens=64, steps=4, blocks=1)
"""Under three minutes, compilers included: enough to see that everything works."""

FIELDS = ("family", "tokens", "prompt", "steps", "blocks", "dtype")


def unique(cases: Iterable[Case]) -> list[Case]:
    """The cases in order, each id once."""
    return list({case.id: case for case in cases}.values())


def select(cases: Iterable[Case] = CASES, **wanted: Sequence[Any] | None) -> list[Case]:
    """Cases that have one of the wanted values in every field named, each id once.

    Args:
        cases: where to look.
        wanted: by field of :class:`Case`, the values to keep; none or empty keeps all.

    Raises:
        ValueError: a value no case has, or no case with all of them; the message names the known values.
    """
    found = unique(cases)
    for name, values in wanted.items():
        known = {getattr(case, name) for case in found}
        for value in values or ():
            if value not in known:
                names = ", ".join(map(str, sorted(known - {None})))
                raise ValueError(f"no case has {name} {value!r} together with the rest (known: {names})")
        found = [case for case in found if not values or getattr(case, name) in values]
    return found


def series(cases: Iterable[Case], along: str) -> list[list[Case]]:
    """Groups of cases that differ in the field ``along`` alone, two or more in each, in its order."""
    others = [name for name in FIELDS if name != along]
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in unique(cases):
        groups.setdefault(tuple(getattr(case, name) for name in others), []).append(case)
    return [sorted(g, key=lambda c: getattr(c, along) or 0) for g in groups.values() if len(g) > 1]
