"""Padding that no row of a call needs is cut off before the denoiser sees it (``numerics="fast"``).

Pipelines pad prompts to a fixed length. For denoisers whose class promises not to notice
(:mod:`dithoist.models.padding`), and that run no code but their class's, columns that are padding in every row are
dropped, so nothing is computed for them: not only no attention, as with packed tokens
(:mod:`dithoist.passes.attention`), but no layer. Where the result has them, they come back as zeros.

How many columns are left is rounded up to eighths of the whole, so that most prompts need no other graph than the
last. A call whose mask hides all tokens of a row is left as it is: some models then attend to the padding.

The mask has to be read. On an accelerator that is done once for each object and version counter, as everything of
a request is known there (:mod:`dithoist.runtime.identity`); and a tensor is cut once, so that its part is known
again too. Parts are laid out as a shorter prompt would be: graphs are captured by layout as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from ..models.padding import Padding
from .identity import reads_wait

PARTS = 8
_KNOWN_CODE = frozenset({"diffusers", "peft", "torch", "transformers"})
_REMEMBERED = 4

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Trim:
    """Cuts the arguments of one denoiser's calls.

    Attributes:
        tokens_given: of all calls so far, columns of masks.
        tokens_run: how many of them were left.
        untrusted: why calls are left as they are, if they are.
    """

    def __init__(self, paddings: Sequence[Padding], arguments: Sequence[str]) -> None:
        """``arguments`` are the names of the positional ones."""
        self._paddings = paddings
        self._position = {name: i for i, name in enumerate(arguments)}
        self.untrusted: str | None = None
        self._with_processor: list[torch.nn.Module] = []
        self._seen_processors: list[type] = []
        self._known: dict[str, list[tuple[torch.Tensor, int, Hashable, Any]]] = {}
        self.tokens_given = self.tokens_run = 0

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Callable[[Any], Any] | None]:
        """The arguments to call with, and what to do with the result; ``None`` where nothing was cut."""
        if self._processors() != self._seen_processors:
            self.look_at(self._module)
        if self.untrusted is not None:
            return (args, kwargs), None
        widened: list[tuple[int, int, int]] = []
        cut_any = False
        for padding in self._paddings:
            mask = self._get(padding.mask, args, kwargs)
            if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not mask.numel():
                continue
            names = [padding.mask, *padding.tokens]
            given = {name: self._get(name, args, kwargs) for name in names}
            given = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.ndim > 1}
            if any(value.shape[1] != mask.shape[1] for value in given.values()):
                continue
            whole = mask.shape[1]
            start, stop = self._remember(padding.mask, mask, None, partial(_columns, leading=padding.leading))
            self.tokens_given += whole
            self.tokens_run += stop - start
            if stop - start == whole:
                continue
            cut_any = True
            for name, value in given.items():
                cut = self._remember(name, value, (start, stop), partial(_part, start=start, stop=stop))
                args, kwargs = self._put(name, cut, args, kwargs)
            if padding.result:
                widened.append((start, stop, whole))
        return (args, kwargs), (lambda result: _widen(result, widened)) if cut_any else None

    def look_at(self, module: torch.nn.Module) -> None:
        """Whether ``module`` still runs the code that makes the promise: its class's, without hooks and the like."""
        self._module = module
        self._with_processor = [m for m in module.modules() if hasattr(m, "processor")]
        self._seen_processors = self._processors()
        self.untrusted = next(filter(None, map(_others_code, module.modules())), None)

    def _processors(self) -> list[type]:
        return [type(m.processor) for m in self._with_processor]

    def forget(self) -> None:
        """Let go of the arguments of earlier calls."""
        self._known.clear()

    def _get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self._position.get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name)

    def _put(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        position = self._position.get(name, len(args))
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, kwargs | {name: value}

    def _remember(self, name: str, value: torch.Tensor, about: Hashable, make: Callable[[torch.Tensor], Any]) -> Any:
        """``make(value)``, which is the same object for the same object, where knowing that matters."""
        if not reads_wait(value.device) or value.is_inference():  # Which has no version counter.
            return make(value)
        known = self._known.setdefault(f"{name} {about is None}", [])
        for source, version, subject, made in known:
            if source is value and version == value._version and subject == about:
                return made
        made = make(value)
        known.insert(0, (value, value._version, about, made))
        del known[_REMEMBERED:]
        return made


def _others_code(module: torch.nn.Module) -> str | None:
    kind = type(module)
    if "forward" in vars(module):
        return f"a {kind.__name__} has a forward of its own"
    if module._forward_pre_hooks or module._forward_hooks:
        return f"a {kind.__name__} has hooks"
    for part in (kind, type(getattr(module, "processor", module))):
        if part.__module__.split(".")[0] not in _KNOWN_CODE:
            return f"{part.__name__} is not of diffusers"
    return None


def _columns(mask: torch.Tensor, leading: bool) -> tuple[int, int]:
    """The first column to keep and the one behind the last, of a mask ``[B, T]``."""
    host = mask.cpu()
    tokens, whole = host != 0, host.shape[1]
    # Numbers below 0 are added to scores, where 0 is what a token has. (An `item` would count as a wait for a device.)
    if not all(tokens.any(dim=1).tolist()) or (host < 0).any().tolist():
        return 0, whole
    kept = tokens.any(dim=0).nonzero().flatten().tolist()
    first, stop = (kept[0] if leading else 0), kept[-1] + 1
    unit = -(-whole // PARTS)
    length = min(-(-(stop - first) // unit) * unit, whole)
    if first + length <= whole:
        return first, first + length
    return whole - length, whole


def _part(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return value[:, start:stop].contiguous()


def _widen(result: Any, cuts: Sequence[tuple[int, int, int]]) -> Any:
    """The result with zeros where columns were cut."""
    for start, stop, whole in cuts:

        def widen(value: torch.Tensor, a: int = start, b: int = stop, n: int = whole) -> torch.Tensor:
            if value.ndim < 2 or value.shape[1] != b - a:
                return value
            return pad(value, [0, 0] * (value.ndim - 2) + [a, n - b])

        result = tree_map_only(torch.Tensor, widen, result)
    return result
