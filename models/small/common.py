"""What the small pipelines and the small denoisers share: finding them by name, and their weights."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")


def find(table: Mapping[str, T], name: str, kind: str) -> T:
    """The entry called `name`, or a ValueError that names close and known ones."""
    if name not in table:
        close = difflib.get_close_matches(name.lower(), table)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"no small {kind} is called {name!r}.{hint} Known names: {', '.join(table)}.")
    return table[name]


def randomize(module: nn.Module) -> nn.Module:
    """Weights that keep the signal's scale, in place.

    The default initialisation leaves gates and modulations near zero: blocks would hardly change their input,
    and a wrong timestep or text embedding would go unnoticed. Norm weights of exactly one would hide as much.
    """
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if isinstance(child, nn.Embedding):
                nn.init.normal_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            else:
                nn.init.normal_(parameter, mean=0.0 if name == "bias" else 1.0, std=0.1)
    return module


def set_dtype(module: nn.Module, dtype: torch.dtype, keep: Iterable[str] = ()) -> None:
    """What a checkpoint holds, parameters and buffers, in `dtype`, but for submodules called as `keep` says.

    Rotary frequencies and other buffers that no checkpoint holds stay float32.
    """
    kept = set(keep)
    for name, value in module.state_dict(keep_vars=True).items():
        if not value.is_floating_point() or kept.intersection(name.split(".")):
            continue
        if isinstance(value, nn.Parameter):
            value.data = value.data.to(dtype)
        else:  # A new one: a buffer may be a view, of which only the base has the dtype.
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, value.to(dtype))
