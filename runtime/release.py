"""Weights that the loop does not need leave memory, and stay readable.

Only the prologue and the schedule read them (modulation, timestep and text projections: a third of some models). A
released weight lies in a file that is mapped into memory: the same tensor object over pages that the system reads when
somebody asks, and that are dropped again when a hoisted stage has used them, one weight at a time. So nothing can
read garbage: ``state_dict``, saving, copying, LoRA and ``.to()`` find the bytes they always found, and writes go to
the file. (A forked process shares the file: what it writes to a released weight, its parent sees.)

The file has no name (it is unlinked as soon as it exists), so nobody can truncate or change it, and it goes with the
last tensor in it. Its space is reserved before anything is changed. Pages that were read stay in the system's file
cache as long as there is room, which costs the process no memory.

A weight is left alone if its memory is not its own: other tensors over it (tied weights that are two parameters, a
flattened buffer) would keep the old bytes alive and miss later writes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from ..passes.effects import view_base

LEAST_BYTES = 64 * 2**10
"""Smaller weights are not worth a page of their own."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

SUPPORTED = hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fallocate")
"""Whether this system (Linux) can drop mapped pages and reserve room for them."""


@dataclass(frozen=True)
class _Place:
    """Where in which mapping a released weight lies. While the mapping is held, nothing else has its address."""

    memory: mmap.mmap
    start: int
    length: int
    storage: StorageWeakRef


class ReleasedWeights:
    """The released weights of one denoiser, by their addresses."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def bytes(self, weights: Iterable[torch.Tensor]) -> int:
        """Bytes of those of ``weights`` that are released."""
        places = {w.data_ptr(): self._place(w) for w in weights}
        return sum(place.length for place in places.values() if place is not None)

    def release(self, weights: Sequence[torch.Tensor]) -> int:
        """Move those of ``weights`` that can be to a file; the others stay as they are.

        Returns:
            How many bytes were moved.

        Raises:
            OSError: there is no room for the file; nothing has changed.
        """
        # Casting, fusing and the like leave weights in other memory; what was theirs must not fill the disk.
        for address in [a for a, place in list(self._places.items()) if place.storage.expired()]:
            self._places.pop(address, None)
        chosen = [w for w in dict.fromkeys(weights) if self._place(w) is None and _can_be_released(w)]
        if not chosen:
            return 0
        lengths = [w.untyped_storage().nbytes() for w in chosen]
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + -(-length // mmap.PAGESIZE) * mmap.PAGESIZE)
        with tempfile.TemporaryFile(prefix="dithoist-") as file:
            os.posix_fallocate(file.fileno(), 0, ends[-1])
            memory = mmap.mmap(file.fileno(), ends[-1])
        for weight, start, length in zip(chosen, ends, lengths, strict=False):
            _move(weight, torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=start))
            self._places[weight.data_ptr()] = _Place(memory, start, length, StorageWeakRef(weight.untyped_storage()))
            self.forget(weight)
        return sum(lengths)

    def forget(self, weight: torch.Tensor) -> None:
        """Drop the pages of a released weight from memory; whoever reads it next gets them from the file."""
        place = self._place(weight)
        if place is not None:
            place.memory.madvise(mmap.MADV_DONTNEED, place.start, place.length)

    def restore(self, weights: Iterable[torch.Tensor]) -> None:
        """Bring ``weights`` back into memory of their own, and forget about all others."""
        for weight in dict.fromkeys(weights):
            if self._place(weight) is not None:
                _move(weight, torch.empty(weight.untyped_storage().nbytes(), dtype=torch.uint8))
        self._places.clear()

    def _place(self, weight: torch.Tensor) -> _Place | None:
        """Where a weight lies, if it is where it was put: ``.to()`` and the like give it memory elsewhere."""
        if not self._places or weight.device.type != "cpu" or type(weight) not in _PLAIN:
            return None
        return self._places.get(weight.data_ptr())


class StreamedStage:
    """A hoisted stage that drops the pages of each weight as soon as nothing in it reads the weight any more."""

    def __init__(self, gm: fx.GraphModule, forget: Callable[[torch.Tensor], None]) -> None:
        self.gm = gm
        self.forget = forget
        last_reader = {view_base(s): node for node in gm.graph.nodes for s in node.all_input_nodes}
        inputs = gm.graph.find_nodes(op="placeholder")
        self.done: dict[fx.Node, list[int]] = {}
        for i, node in enumerate(inputs):
            if node in last_reader:
                self.done.setdefault(last_reader[node], []).append(i)

    def __call__(self, *args: Any) -> Any:
        """What the graph returns."""
        return _Streamed(self, args).run(*args, enable_io_processing=False)


class _Streamed(fx.Interpreter):
    """One run of a :class:`StreamedStage`."""

    def __init__(self, stage: StreamedStage, inputs: tuple[Any, ...]) -> None:
        super().__init__(stage.gm)
        self._stage = stage
        self._inputs = inputs

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for i in self._stage.done.get(n, ()):
            if isinstance(self._inputs[i], torch.Tensor):
                self._stage.forget(self._inputs[i])
        return result


def _can_be_released(weight: torch.Tensor) -> bool:
    if type(weight) not in _PLAIN or weight.device.type != "cpu":
        return False
    if weight.layout != torch.strided or weight.is_inference() or weight.is_conj() or weight.is_neg():
        return False
    storage = weight.untyped_storage()
    whole = weight.storage_offset() == 0 and weight.nbytes == storage.nbytes() >= LEAST_BYTES
    # Two hold it: the weight and the object in our hand.
    return whole and torch._C._storage_Use_Count(storage._cdata) == 2


def _move(weight: torch.Tensor, memory: torch.Tensor) -> None:
    """Let ``weight`` lie in ``memory`` (bytes) instead of where it lies, with the same bytes."""
    old = weight.untyped_storage()
    with torch.no_grad():
        memory.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
        moved = torch.empty(0, dtype=weight.dtype)
        moved.set_(memory.untyped_storage(), 0, weight.shape, weight.stride())
        weight.data = moved
