"""Hooks that move or cast weights within a call: nothing can be compiled across those, so the module runs as it was.

accelerate and diffusers hook a module by giving it another ``forward``. Most such hooks are captured, or break the
graph where they stand. These are not:

* Sequential offload, a device map, offload to disk (accelerate's hooks on submodules), group offload and layerwise
  casting (diffusers') bring the weights of a layer just before it runs and take them away after. Every layer would be a
  graph of its own, of which nothing could be hoisted. And group offload asks which module it was called for
  (``leader == module``), for which Dynamo puts no guard: one layer's code would serve another, whose weights would
  then be missing.
* A hook of accelerate on the whole module that fetches the weights at each call would have all of them compared by
  their bytes at each step.

``enable_model_cpu_offload`` moves a whole model between calls. That is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import contains
from typing import Any

from torch import nn

_DIFFUSERS = {"group_offloading": "group offload", "layerwise_casting": "layerwise casting"}
"""Names of diffusers' hooks that move or cast weights, and what people call them."""


class WeightHooks:
    """Looks for such hooks, at every call: users put them on and off between pictures."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.refresh()

    def refresh(self) -> None:
        """The submodules may be others than before."""
        self._modules: Sequence[nn.Module] = list(self._module.modules())
        self._attributes = [vars(module) for module in self._modules]

    def reason(self) -> str | None:
        """Why the module must run as it was, or ``None``."""
        if not any(map(contains, self._attributes, repeat("forward"))):  # The case of nearly every call, so fast.
            return None
        for module, attributes in zip(self._modules, self._attributes, strict=True):
            kind = _kind(module, whole=module is self._module) if "forward" in attributes else None
            if kind is not None:
                return (
                    f"{kind} moves or casts its weights within each call, and nothing can be compiled across that; "
                    "take it off, or use enable_model_cpu_offload()"
                )
        return None


def _kind(module: nn.Module, *, whole: bool) -> str | None:
    hook = getattr(module, "_hf_hook", None)
    if hook is not None and (not whole or _fetches_weights(hook)):
        return "accelerate's offload of its parts (sequential, to the disk, or by a device map)"
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return next((title for name, title in _DIFFUSERS.items() if name in hooks), None)


def _fetches_weights(hook: Any) -> bool:
    """Whether a hook of accelerate, or one of several in a row, fetches weights and takes them away."""
    return any(getattr(h, "offload", False) is True for h in (hook, *getattr(hook, "hooks", ())))
