"""Weights that the loop does not need leave memory, and stay readable.

Only the prologue and the schedule read them (modulation, timestep and text projections: a third of some models). A
released weight is the same tensor object on the same device over slower memory, so nothing can read garbage:
``state_dict``, saving, copying, LoRA and ``.to()`` find the bytes they always found, and writes go where they lie.

* On the CPU (Linux) it lies in a file that is mapped into memory: pages that the system reads when somebody asks, and
  that are dropped again when a hoisted stage has used them, one weight at a time. (A forked process shares the file:
  what it writes to a released weight, its parent sees.)
* On a CUDA device it lies in page-locked memory of the host, which the device reads at the host's own address (unified
  addressing). A hoisted stage copies one weight at a time to the device and lets go of it after use.

The file has no name (it is unlinked as soon as it exists), so nobody can truncate or change it, and it goes with the
last tensor in it. Its space is reserved before anything is changed. Pages that were read stay in the system's file
cache as long as there is room, which costs the process no memory.

A weight is left alone if its memory is not its own: other tensors over it (tied weights that are two parameters, a
flattened buffer, other processes) would keep the old bytes alive and miss later writes. Addresses keep their
remainder, because a matrix product of a few rows takes its path, and with it its last bits, by how its operands are
aligned. Memory changes hands only while no other call of the denoiser is under way.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 64 * 2**10
"""Smaller weights are not worth a page of their own."""

ALIGNMENT = 64
"""Bytes, of a cache line and of PyTorch's own memory."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

SUPPORTED = hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fallocate")
"""Whether this system (Linux) can drop mapped pages and reserve room for them."""


@dataclass(frozen=True)
class _Place:
    """Where a released weight lies: in a mapped file from ``start`` on, or (``memory`` is ``None``) on the host."""

    memory: mmap.mmap | None
    start: int
    length: int
    storage: StorageWeakRef


class ReleasedWeights:
    """The released weights of one denoiser, by their addresses.

    Attributes:
        bytes_read_back: bytes that hoisted work read again from where they lie, the checks for changes included.
    """

    def __init__(self) -> None:
        self.bytes_read_back = 0
        self._places: dict[int, _Place] = {}
        # Ctrl-C may come where a lock is taken but not given back, or a call begun but not ended. Its own thread then
        # goes on as if it were.
        self._gate = threading.RLock()
        self._calling: set[int] = set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around each call that may read the weights."""
        with self._gate:
            self._calling.add(threading.get_ident())
        try:
            yield
        finally:
            self._calling.discard(threading.get_ident())

    def bytes(self, weights: Iterable[torch.Tensor]) -> int:
        """Bytes of those of ``weights`` that are released."""
        places = {w.data_ptr(): self._place(w) for w in weights}
        return sum(place.length for place in places.values() if place is not None)

    def release(self, weights: Sequence[torch.Tensor]) -> bool:
        """Move those of ``weights`` that can be to a file or to the host; the others stay as they are.

        Returns:
            Whether that was done; while another call is under way it is not.

        Raises:
            OSError: there is no room; what had been moved until then lies where it was moved.
        """
        with self._gate:  # No call begins meanwhile; the one that asks is one.
            if self._calling - {threading.get_ident()}:
                return False
            self._release(weights)
        return True

    def _release(self, weights: Sequence[torch.Tensor]) -> None:
        # Casting, fusing and the like leave weights in other memory; what was theirs must not fill the disk.
        for address in [a for a, place in list(self._places.items()) if place.storage.expired()]:
            self._places.pop(address, None)
        chosen = [w for w in dict.fromkeys(weights) if self._place(w) is None and _can_be_released(w)]
        self._map([w for w in chosen if w.device.type == "cpu"])
        for weight in (w for w in chosen if w.device.type == "cuda"):
            length = weight.untyped_storage().nbytes()
            _move([weight], _host_memory(length, weight.device))
            self._put(weight, None, 0, length)

    def _map(self, weights: Sequence[torch.Tensor]) -> None:
        starts, end = [], 0
        for weight in weights:
            starts.append(end + weight.data_ptr() % ALIGNMENT)
            end = -(-(starts[-1] + weight.untyped_storage().nbytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
        if not weights:
            return
        try:
            with tempfile.TemporaryFile(prefix="dithoist-") as file:
                os.posix_fallocate(file.fileno(), 0, end)
                memory = mmap.mmap(file.fileno(), end)
        except OSError as error:
            raise OSError(f"no file of {end / 2**20:.0f} MiB ({error}); let TMPDIR name a folder with room") from error
        for weight, start in zip(weights, starts, strict=True):
            length = weight.untyped_storage().nbytes()
            _move([weight], torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=start))
            self._put(weight, memory, start, length)
            self._drop_pages(memory, start, length)

    @staticmethod
    def _drop_pages(memory: mmap.mmap, start: int, length: int) -> None:
        page = start - start % mmap.PAGESIZE
        memory.madvise(mmap.MADV_DONTNEED, page, start + length - page)

    def _put(self, weight: torch.Tensor, memory: mmap.mmap | None, start: int, length: int) -> None:
        storage = StorageWeakRef(weight.untyped_storage())
        self._places[weight.data_ptr()] = _Place(memory, start, length, storage)

    def fetch(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight where work on it is fast: a copy on the device, or on the CPU the weight itself."""
        place = self._place(weight)
        return weight.clone() if place is not None and place.memory is None else weight

    def forget(self, weight: torch.Tensor) -> None:
        """A released weight has been read: drop its pages, and whoever reads it next gets them from the file."""
        place = self._place(weight)
        if place is None:
            return
        self.bytes_read_back += place.length
        if place.memory is not None:
            self._drop_pages(place.memory, place.start, place.length)

    def restore(self, weights: Iterable[torch.Tensor]) -> None:
        """Bring ``weights`` back into memory of their own, and forget about all others.

        Weights over one memory stay that. Where somebody else lies over it too, all stay where they are: readable.
        """
        by_memory: dict[int, list[torch.Tensor]] = {}
        for weight in dict.fromkeys(weights):
            if self._place(weight) is not None:
                by_memory.setdefault(weight.data_ptr(), []).append(weight)
        for together in by_memory.values():
            if _users(together[0]) == len(together):
                _move(together, _aligned_memory(together[0]))
        self.forget_all()

    def forget_all(self) -> None:
        """Let go of the files; each goes with the last tensor in it."""
        self._places.clear()

    def _place(self, weight: torch.Tensor) -> _Place | None:
        """Where a weight lies, if it is where it was put: ``.to()`` and the like give it memory elsewhere."""
        if not self._places or type(weight) not in _PLAIN or weight.layout != torch.strided:
            return None
        place = self._places.get(weight.data_ptr())
        return None if place is None or place.storage.expired() else place


def _can_be_released(weight: torch.Tensor) -> bool:
    if type(weight) not in _PLAIN or not (weight.is_cuda or (weight.device.type == "cpu" and SUPPORTED)):
        return False
    if weight.layout != torch.strided or weight.is_inference() or weight.is_conj() or weight.is_neg():
        return False
    whole = weight.storage_offset() == 0 and weight.nbytes == weight.untyped_storage().nbytes() >= LEAST_BYTES
    return whole and _users(weight) == 1 and (weight.is_cuda or not weight.is_shared())


def _users(weight: torch.Tensor) -> int:
    """How many tensors lie over the weight's memory."""
    storage = weight.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # The object in our hand.


def _aligned_memory(weight: torch.Tensor) -> torch.Tensor:
    """Memory for the bytes of a weight, aligned as it is."""
    length, shift = weight.untyped_storage().nbytes(), weight.data_ptr() % ALIGNMENT
    memory = torch.empty(length, dtype=torch.uint8, device=weight.device)
    if weight.is_cuda or memory.data_ptr() % ALIGNMENT == shift:
        return memory
    room = bytearray(length + 2 * ALIGNMENT)
    start = (shift - torch.frombuffer(room, dtype=torch.uint8).data_ptr()) % ALIGNMENT
    return torch.frombuffer(room, dtype=torch.uint8, count=length, offset=start)


class _HostArray:
    """Page-locked memory of the host, as an array that a CUDA device can read."""

    def __init__(self, length: int) -> None:
        self.host = torch.empty(length, dtype=torch.uint8, pin_memory=True)
        data = (self.host.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|u1", "data": data, "version": 2}


def _host_memory(length: int, device: torch.device) -> torch.Tensor:
    """``length`` bytes of the host as a tensor of the CUDA ``device``, without a copy there.

    Raises:
        OSError: there is no such memory, or the device cannot read it in place.
    """
    try:
        array = _HostArray(length)
        memory = torch.as_tensor(array, device=device)
    except RuntimeError as error:
        raise OSError(f"no page-locked memory: {error}") from error
    if memory.data_ptr() != array.host.data_ptr():
        raise OSError(f"{device} cannot read the host's memory in place")
    return memory


def _move(weights: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    """Let weights that lie over one memory lie in ``memory`` (bytes) instead, with the same bytes."""
    first = weights[0]
    with torch.no_grad():
        memory.copy_(torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage()))
        for weight in weights:
            moved = torch.empty(0, dtype=weight.dtype, device=weight.device)
            moved.set_(memory.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
            weight.data = moved
