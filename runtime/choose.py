"""Which denoiser :func:`dithoist.explain` is asked about, and how large its generation is."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..models.published import PUBLISHED, SCALES, Published, Scale
from .settings import close_matches

if TYPE_CHECKING:
    from ..models.small import Sizes


@dataclass(frozen=True)
class Choice:
    """A denoiser class with its configuration, and the generation it is called for.

    Attributes:
        name: for people.
        kind: the class.
        config: its configuration, defaults left out.
        denoiser: key of the entry of :data:`dithoist.models.small.DENOISERS` that knows how the class is called.
        family: class name of that entry.
        height: of the generation, in pixels.
        width: in pixels.
        frames: 1 for a picture.
        sizes: the same in tokens.
    """

    name: str
    kind: type[nn.Module]
    config: Mapping[str, Any]
    denoiser: str
    family: str
    height: int
    width: int
    frames: int
    sizes: Sizes

    def build(self) -> nn.Module:
        """The module."""
        make = getattr(self.kind, "from_config", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # What diffusers will rename is no concern of the user's.
            module = make(dict(self.config)) if make else self.kind(**self.config)
        assert isinstance(module, nn.Module)
        return module

    def prepare(self, module: nn.Module) -> str | None:
        """Make the module ready for a capture; returns what that takes for granted, if anything."""
        from ..models.small import prepare_capture

        return prepare_capture(self.denoiser, module, self.sizes)

    def call(self, module: nn.Module) -> dict[str, Any]:
        """Arguments of one step."""
        from ..models.small import example_calls

        return example_calls(self.denoiser, module, self.sizes, steps=1)[0]


def choose(
    model: str | Path | Mapping[str, Any],
    config: str | Path | Mapping[str, Any] | None,
    *,
    height: int | None,
    width: int | None,
    frames: int | None,
    batch: int,
    prompt: int | None,
) -> Choice:
    """Find the class, its configuration and how it is called; arguments as in :func:`dithoist.explain`.

    Raises:
        ValueError: no such model or class, or a size it cannot have.
        ModuleNotFoundError: diffusers is not installed.
    """
    from ..models.small import DENOISERS, Sizes  # Needs diffusers.

    published = PUBLISHED.get(str(model).lower()) if isinstance(model, str) else None
    if published is not None:
        if config is not None:
            raise ValueError(f"{published.title} has its own configuration; name its class to give another")
        name, values, denoiser = published.title, dict(published.config), published.denoiser
        kind = _class(f"diffusers.{DENOISERS[denoiser].class_name}")
    else:
        name, kind, values = _named(model, config)
        keys = {entry.class_name: key for key, entry in DENOISERS.items()}
        denoiser = next((keys[c.__name__] for c in kind.__mro__ if c.__name__ in keys), "")
        if not denoiser:
            raise ValueError(f"how {kind.__name__} is called is not known{close_matches(kind.__name__, keys)}")
        same = (p for p in PUBLISHED.values() if p.denoiser == denoiser)
        published = next(same, Published(name, denoiser))
    height, width = _or(height, published.height), _or(width, published.width)
    frames, prompt = _or(frames, published.frames), _or(prompt, published.prompt)
    grid = _grid(SCALES.get(denoiser, Scale()), height, width, frames)
    if batch < 1 or prompt < 1:
        raise ValueError(f"batch={batch} and prompt={prompt} must be at least 1")
    return Choice(
        name=name,
        kind=kind,
        config=values,
        denoiser=denoiser,
        family=DENOISERS[denoiser].class_name,
        height=height,
        width=width,
        frames=frames,
        sizes=Sizes(grid[0] * grid[1] * grid[2], prompt, batch, grid),
    )


def _named(
    model: str | Path | Mapping[str, Any], config: str | Path | Mapping[str, Any] | None
) -> tuple[str, type[nn.Module], dict[str, Any]]:
    """Name, class and configuration from a configuration or a class's path."""
    is_path = isinstance(model, Path) or (isinstance(model, str) and (model.endswith(".json") or Path(model).exists()))
    if isinstance(model, Mapping) or is_path:
        values = _config(model)
        if "_class_name" not in values:
            raise ValueError("the configuration names no class: give it a '_class_name', as a denoiser's has")
        kind = _class(f"diffusers.{values['_class_name']}")
        return (str(model) if is_path else kind.__name__), kind, values
    if re.fullmatch(r"[\w.]+\.[A-Z]\w*", str(model)):
        return str(model), _class(str(model)), {} if config is None else _config(config)
    raise ValueError(f"no published model is called {model!r}{close_matches(str(model).lower(), PUBLISHED)}")


def _config(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no configuration: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no configuration: it must hold an object, as the config.json of a denoiser does")
    return values


def _class(path: str) -> type[nn.Module]:
    place, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no class {name} in {place}: {error}") from error
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise ValueError(f"{path} must be a class derived from torch.nn.Module")
    return kind


def _or(chosen: int | None, default: int) -> int:
    return default if chosen is None else chosen


def _grid(scale: Scale, height: int, width: int, frames: int) -> tuple[int, int, int]:
    """Frames, height and width in tokens."""
    for name, size in {"height": height, "width": width}.items():
        if size < scale.pixels or size % scale.pixels:
            raise ValueError(f"{name}={size} must be a multiple of {scale.pixels} pixels")
    if frames < 1 or (frames - 1) % scale.frames:
        raise ValueError(f"frames={frames} must be 1 more than a multiple of {scale.frames}")
    return (frames - 1) // scale.frames + 1, height // scale.pixels, width // scale.pixels
