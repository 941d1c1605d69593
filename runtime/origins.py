"""Where a value comes from that one captured graph hands to the next, behind a graph break.

The name of a local variable says little of it (``temb``, Dynamo's ``___stack0``), but the graph that made it knows when
it is first known. That is what its label is in the next graph, if held values can be found again by it at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..passes import BindingTime
from .identity import SMALL_BYTES, reads_wait


class Origins:
    """The binding times of what graphs returned in this call, by the memory it lies in; keeps none of it alive."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[StorageWeakRef, BindingTime]] = {}

    def begin_call(self) -> None:
        """Forget everything: what an earlier call returned may stay from now on, as a key-value cache does."""
        self._times.clear()

    def note(self, values: Iterable[Any], times: Iterable[BindingTime]) -> None:
        """Remember when each of the values a graph returned is known."""
        for value, time in zip(values, times, strict=True):
            if _has_memory(value):
                ref = StorageWeakRef(value.untyped_storage())
                self._times[ref.cdata] = ref, time

    def label(self, value: Any) -> BindingTime | None:
        """The label of an input that a graph returned; ``None`` of what no graph did.

        An accelerator's tensor is known again only as an object, and each call gets a new one. A tensor that changes
        with the step is known again by its bits, so it must be a small one.
        """
        if not _has_memory(value):
            return None
        ref = StorageWeakRef(value.untyped_storage())
        _, time = self._times.get(ref.cdata, (ref, None))
        if time is None or time == BindingTime.STEP:
            return time
        if reads_wait(value.device):
            return None
        if time & BindingTime.SCHEDULE:
            return BindingTime.SCHEDULE if value.nbytes <= SMALL_BYTES else BindingTime.STEP
        return BindingTime.REQUEST


def _has_memory(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided
