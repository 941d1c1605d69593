"""When is an input the one it was? The rules that make a held value safe to use again.

* :class:`InputIdentity` gives an input's value a token; equal tokens mean equal bits.

  - On the CPU the bits themselves are compared: small tensors are their own token, larger ones are compared
    with a private snapshot. So nothing that leaves no trace on a tensor (writes through ``.data``, NumPy or
    a raw pointer, tensors of ``inference_mode`` that have no version counter) can bring a stale value back,
    and an equal tensor in a new object is recognised.
  - On an accelerator reading the bits would make the host wait, so a tensor is the same if it is the same
    object with the same version counter; the object is held, so its ``id`` cannot be recycled. A tensor
    without a version counter is never the same. Writes that bypass the counter are not seen: a documented
    limit. What a timestep is, the scheduler says (:mod:`dithoist.runtime.device_schedule`).

* :class:`WeightsIdentity` notices changed weights by a hash of their bytes. It is made when one is another object, or
  has another version counter or data pointer, and at the start of each generation, because LoRA fusing writes through
  ``.data``, which none of the three shows. So weights that offloading brings back are those they were.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .cache import HeldValues
from .release import ALIGNMENT

SMALL_BYTES = 4096
_MAX_SNAPSHOTS = 8
_HASH_ROW = 1024  # Words; with the next, a block of 2 MiB stays in the cache.
_HASH_ROWS = 256
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors agree in dtype, shape and every bit (``-0.0`` differs from ``0.0``)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == torch.bool:
        return torch.equal(a, b)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order, without a copy where they lie so already."""
    flat = value.detach().contiguous().reshape(-1)
    if flat.stride() != (1,):  # One element of an expanded tensor counts as contiguous and has stride 0.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _small_token(value: torch.Tensor) -> Hashable:
    if not value.is_contiguous():
        return value.dtype, value.shape, value.stride(), _bytes(value).numpy().tobytes()
    # This runs for every small input at every call; views and NumPy would cost ten times as much.
    return value.dtype, value.shape, value.stride(), ctypes.string_at(value.data_ptr(), value.nbytes)


def memory_span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a tensor with this layout lies over."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def host_value(token: Hashable) -> torch.Tensor | None:
    """The value a token spells out, on the host with its strides; ``None`` of one that does not."""
    if isinstance(token, tuple) and len(token) == 2:  # With the remainder of its address.
        token = token[0]
    if not isinstance(token, tuple) or len(token) != 4 or not isinstance(token[0], torch.dtype) or not token[3]:
        return None
    dtype, shape, stride, data = token
    value = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    once = value[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    flat = torch.empty(memory_span(shape, stride), dtype=dtype)
    flat.as_strided(once.shape, stride).copy_(once)
    return flat.as_strided(shape, stride)


def reads_wait(device: torch.device) -> bool:
    """Whether the host must wait for queued work before it can read a tensor there."""
    return device.type != "cpu"


DeviceToken = Callable[[torch.Tensor, Callable[[torch.Tensor], Hashable]], Hashable]
"""Token of a value on an accelerator, with the help of what makes tokens of host values."""


class InputIdentity:
    """Tokens for the successive values of one graph input."""

    def __init__(
        self, held: HeldValues, owner: Hashable, schedule: DeviceToken | None = None, *, aligned: bool = False
    ) -> None:
        """
        Args:
            held: where private copies live, within its bound.
            owner: first part of their keys.
            aligned: where a value lies matters too: a matrix product reads it, and one of a few rows takes its path,
                and with it its last bits, by the remainder of the address.
            schedule: for a schedule input, makes the tokens of values on an accelerator.
        """
        self._schedule = schedule
        self._aligned = aligned
        self._held = held
        self._owner = owner
        self._fresh = itertools.count()
        self._strides: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._objects: OrderedDict[int, tuple[torch.Tensor, int]] = OrderedDict()

    def token(self, value: Any) -> Hashable:
        """A token that two values share only if they have the same bits."""
        if not isinstance(value, torch.Tensor):
            return type(value), repr(value)
        if reads_wait(value.device):
            if self._schedule is None:
                return self._object_token(value)
            return self._schedule(value, self.bits_token)
        return self.bits_token(value)

    def bits_token(self, value: torch.Tensor) -> Hashable:
        """The token of a value on the host."""
        token = self._bits_token(value)
        if not self._aligned or value.layout != torch.strided:
            return token
        return token, value.data_ptr() % ALIGNMENT

    def _bits_token(self, value: torch.Tensor) -> Hashable:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return self._object_token(value)
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        return _small_token(value) if value.nbytes <= SMALL_BYTES else self._snapshot_token(value.detach())

    def forget(self) -> None:
        """Let go of every value seen; tokens given are never given again."""
        self._strides.clear()
        self._objects.clear()

    def _key(self, token: int) -> Hashable:
        return self._owner, "snapshot", id(self), token

    def _snapshot_token(self, value: torch.Tensor) -> Hashable:
        for token in reversed(list(self._strides)):
            snapshot = self._held.peek(self._key(token))
            if snapshot is None:
                del self._strides[token]
            elif value.stride() == self._strides[token] and same_bits(value, snapshot[0]):
                self._strides.move_to_end(token)
                return token
        token = next(self._fresh)
        # Contiguous, whatever the strides: an expanded tensor's memory could not be written.
        self._held.put(self._key(token), (value.clone(memory_format=torch.contiguous_format),))
        self._strides[token] = value.stride()
        if len(self._strides) > _MAX_SNAPSHOTS:
            self._strides.popitem(last=False)
        return token

    def _object_token(self, value: torch.Tensor) -> Hashable:
        if value.is_inference():
            return next(self._fresh)
        for token, (known, version) in reversed(self._objects.items()):
            if known is value and version == value._version:
                self._objects.move_to_end(token)
                return token
        token = next(self._fresh)
        self._objects[token] = (value, value._version)
        if len(self._objects) > _MAX_SNAPSHOTS:
            self._objects.popitem(last=False)
        return token


_version = operator.attrgetter("_version")


def _versions(weights: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_version, weights))
    except RuntimeError:  # Inference tensors have no counter.
        return [-1 if w.is_inference() else w._version for w in weights]


class WeightsIdentity:
    """Whether the weights that hoisted work reads are still those it read.

    Keeps none of them alive and puts nothing on them: a weak reference to a tensor would forbid
    ``torch.utils.swap_tensors``.
    """

    def __init__(self, forget: Callable[[torch.Tensor], None] = lambda weight: None) -> None:
        """``forget`` is called with a weight whose bytes have been read."""
        self.epoch = 0
        self.arrivals = 0
        """How often weights were found to be other objects, written, or elsewhere in memory, changed or not."""
        self._forget = forget
        self._contents: list[Hashable] = []
        self._seen: tuple[list[int], list[int], list[int]] = ([], [], [])
        # Together, as an address means something only while its weak reference lives.
        self._watched: tuple[list[StorageWeakRef], list[int]] = ([], [])

    def check(self, weights: Sequence[torch.Tensor], *, deep: bool) -> list[int]:
        """Which weights changed since the last check; a change begins a new epoch.

        Args:
            weights: what hoisted work reads, always the same number in the same order.
            deep: compare the bytes too (one pass over the weights). Weights without a version counter, made in
                ``inference_mode``, have theirs compared at every check.

        Returns:
            Positions in ``weights``; at the first check all of them.
        """
        seen = _look(weights)
        # While the memory of a weight lives, nothing else can lie at its address.
        expired = list(map(_expired, self._watched[1]))
        if seen == self._seen and True not in expired and not deep and -1 not in seen[1]:
            return []
        self.arrivals += seen != self._seen or True in expired
        contents = _contents(weights, self._forget)
        changed = [i for i, (a, b) in enumerate(zip_longest(contents, self._contents)) if a != b]
        self.epoch += bool(changed)
        self._contents = contents
        self._remember(weights, seen)
        return changed

    def moved(self, weights: Sequence[torch.Tensor]) -> None:
        """Take the same weights at other places in memory for unchanged."""
        self._remember(weights, _look(weights))

    def _remember(self, weights: Sequence[torch.Tensor], seen: tuple[list[int], list[int], list[int]]) -> None:
        storages = [StorageWeakRef(w.untyped_storage()) for w in weights]
        self._seen = seen
        self._watched = storages, [s.cdata for s in storages]


_expired = cast(Callable[[int], bool], torch.UntypedStorage._expired)


def _look(weights: Sequence[torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Object, version and place of each weight: at every call, so without a line of Python for each."""
    return list(map(id, weights)), _versions(weights), list(map(torch.Tensor.data_ptr, weights))


def _contents(
    weights: Sequence[torch.Tensor], forget: Callable[[torch.Tensor], None] = lambda weight: None
) -> list[Hashable]:
    """For each weight its layout, its address as far as results depend on it, and its bytes.

    Those of a small one are there as they are, of a larger one as a 64-bit hash, read from each device in one go.
    """
    small = [w.device.type == "cpu" and w.nbytes <= SMALL_BYTES for w in weights]
    hashes = []
    for weight in itertools.compress(weights, map(operator.not_, small)):
        hashes.append(_hash_bytes(weight))
        forget(weight)
    numbers = iter(torch.stack([h.to(hashes[0].device) for h in hashes]).tolist() if hashes else [])
    return [
        (w.data_ptr() % ALIGNMENT, _small_token(w) if s else (w.dtype, w.shape, w.stride(), next(numbers)))
        for w, s in zip(weights, small, strict=True)
    ]


def _hash_bytes(weight: torch.Tensor) -> torch.Tensor:
    """A number that depends on every byte and its place: with the bytes as a table ``W`` of 64-bit words, their
    halves folded, ``r W c`` for fixed vectors of odd pseudo-random numbers.

    (``torch.hash_tensor``, an exclusive or, would not see values that changed places.) Integers wrap, so the
    result does not depend on the order of summation. Blocks bound the temporary memory.
    """
    data = _bytes(weight)
    if data.storage_offset() % 8:
        data = data.clone()
    row = _HASH_ROW * 8
    whole = data.numel() - data.numel() % row
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    parts = list(data[:whole].split(row * _HASH_ROWS)) if whole else []
    if whole < data.numel():
        parts.append(torch.nn.functional.pad(data[whole:], (0, row - (data.numel() - whole))))
    for part in parts:
        words = part.view(torch.int64).view(-1, _HASH_ROW)
        # A product keeps only the low bits of what it is multiplied with where a word differs in its high ones.
        words = words ^ (words >> 32)
        sums = words.mul_(_odd_numbers(_HASH_ROW, data.device)).sum(1)
        total = total * 6364136223846793005 + (sums * _odd_numbers(len(sums), data.device)).sum()
    return total


@functools.lru_cache(maxsize=64)
def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """``count`` odd 64-bit numbers without a pattern, always the same (the finaliser of splitmix64)."""
    x = torch.arange(1, count + 1, device=device) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) | 1
