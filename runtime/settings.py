"""What the user chose, checked before anything is changed."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch._dynamo.exc import InvalidBackend

from ..passes import TIMES, BindingTime
from . import release

F = TypeVar("F", bound=Callable[..., Any])

Backend = str | Callable[..., Any]
Numerics = Literal["exact", "fast"]
NUMERICS = get_args(Numerics)

_LABELS = {t.label: t for t in TIMES if t is not BindingTime.REQUEST_SCHEDULE}


@dataclass(frozen=True)
class Settings:
    """Options shared by ``compile_pipeline`` and ``compile_denoiser``.

    Attributes:
        backend: compiles the stages: ``"inductor"``, ``"eager"`` (bitwise equal to the untouched model), any
            other name or callable that ``torch.compile`` accepts.
        numerics: ``"exact"``, or ``"fast"``: last bits may differ; rows of a schedule are made as one batch, and
            padding of prompts is skipped.
        dynamic: as in ``torch.compile``.
        strict: raise where the default would fall back to the untouched module with a warning.
        release_weights: let weights that the loop does not read leave memory: of a CPU for the ``"disk"``, of a CUDA
            device for the ``"cpu"``; ``True`` is whichever it is.
        max_cached_bytes: bound on what is held between calls, per denoiser; ``None`` is a quarter of the
            denoiser's own weights, at least 256 MiB.
    """

    backend: Backend = "inductor"
    numerics: Numerics = "exact"
    dynamic: bool | None = None
    strict: bool = False
    release_weights: bool | str = False
    max_cached_bytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            known = [*torch.compiler.list_backends(exclude_tags=()), "eager"]
            if self.backend == "dithoist":
                raise ValueError("backend='dithoist' would compile with itself; name the back end for its stages")
            if self.backend not in known:
                raise ValueError(f"backend={self.backend!r} is unknown{close_matches(self.backend, known)}")
        elif not callable(self.backend):
            raise TypeError(f"backend must be a name or a callable, not {type(self.backend).__name__}")
        if self.numerics not in NUMERICS:
            raise ValueError(f"numerics={self.numerics!r} must be one of {', '.join(map(repr, NUMERICS))}")
        if self.dynamic not in (None, True, False):
            raise TypeError(f"dynamic={self.dynamic!r} must be None, True or False")
        if not isinstance(self.strict, bool):
            raise TypeError(f"strict={self.strict!r} must be True or False")
        if self.release_weights not in (True, False, "cpu", "disk"):
            raise ValueError(f"release_weights={self.release_weights!r} must be False, True, 'cpu' or 'disk'")
        limit = self.max_cached_bytes
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
            raise TypeError(f"max_cached_bytes={limit!r} must be a whole number of bytes, or None for the default")
        if limit is not None and limit < 0:
            raise ValueError(f"max_cached_bytes={limit} must be at least 0, or None for the default")

    def check_release(self, name: str, devices: set[str]) -> None:
        """Whether weights of the denoiser ``name`` can be released from ``devices``, their types.

        Raises:
            ValueError: they cannot, or not to where the user said.
        """
        chosen = f"release_weights={self.release_weights!r}"
        if not self.release_weights or not devices:
            return
        if devices - {"cpu", "cuda"}:
            raise ValueError(f"{chosen} is for the CPU and CUDA, and {name} is on {', '.join(sorted(devices))}")
        if self.release_weights == "cpu" and "cpu" in devices:
            raise ValueError(f"{chosen} would free nothing, as {name} is on the CPU; 'disk' does")
        if self.release_weights == "disk" and "cuda" in devices:
            raise ValueError(f"{chosen} is for denoisers on the CPU, and {name} is on CUDA; 'cpu' is for those")
        if "cpu" in devices and not release.SUPPORTED:
            raise ValueError(f"{chosen} needs Linux for a denoiser on the CPU; leave it out")

    def resolve_backend(self) -> Callable[..., Any]:
        """The back end as a function of a graph and its example inputs."""
        if callable(self.backend):
            return self.backend
        try:
            return torch._dynamo.lookup_backend(self.backend)
        except InvalidBackend as error:
            raise ValueError(f"backend={self.backend!r} cannot be loaded: {error}") from error


def parse_labels(labels: dict[str, str] | None, arguments: Iterable[str]) -> dict[str, BindingTime]:
    """Binding times by argument name, from the user's ``{"t": "schedule", "x": "step"}``.

    Raises:
        TypeError: not a dictionary.
        ValueError: an argument ``forward`` does not take, or a binding time that does not exist.
    """
    known = list(arguments)
    parsed: dict[str, BindingTime] = {}
    if labels is not None and not isinstance(labels, dict):
        raise TypeError(f"labels must map argument names to binding times, not {type(labels).__name__}")
    for name, label in (labels or {}).items():
        if name not in known:
            raise ValueError(f"labels[{name!r}]: forward has no such argument{close_matches(name, known)}")
        if not isinstance(label, str) or label not in _LABELS:
            raise ValueError(f"labels[{name!r}]={label!r} is no binding time{close_matches(label, _LABELS)}")
        parsed[name] = _LABELS[label]
    return parsed


def close_matches(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'? (known: ...)`` for an error message."""
    names = sorted(set(known))
    close = difflib.get_close_matches(str(name), names, n=3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"{hint} (known: {', '.join(names)})"


def suggest_arguments(function: F) -> F:
    """Make an unknown keyword argument's error name the close ones."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                hint = close_matches(name, known)
                raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}")
        return function(*args, **kwargs)

    return cast(F, checked)
