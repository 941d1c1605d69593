"""When is an input the one it was? The rules that make a held value safe to use again.

* :class:`InputIdentity` gives an input's value a token; equal tokens mean equal bits.

  - On the CPU the bits themselves are compared: small tensors are their own token, larger ones are compared
    with a private snapshot. So nothing that leaves no trace on a tensor (writes through ``.data``, NumPy or
    a raw pointer, tensors of ``inference_mode`` that have no version counter) can bring a stale value back,
    and an equal tensor in a new object is recognised.
  - On an accelerator reading the bits would make the host wait, so a tensor is the same if it is the same
    object with the same version counter; the object is held, so its ``id`` cannot be recycled. A tensor
    without a version counter is never the same. Writes that bypass the counter are not seen: a documented
    limit. A timestep is read (one wait at each call).

* :class:`WeightsIdentity` notices changed weights: another object, version counter or data pointer at every
  call, and at the start of each generation a hash of the bytes, because LoRA fusing writes through ``.data``,
  which none of the three shows.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

_SMALL_BYTES = 4096
_MAX_SNAPSHOTS = 8
_HASH_ROW = 8192
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors agree in layout and in every bit (``-0.0`` differs from ``0.0``)."""
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    if a.dtype == torch.bool:
        return torch.equal(a, b)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = _BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order, without a copy where they lie so already."""
    flat = value.detach().contiguous().reshape(-1)
    if flat.stride() != (1,):  # One element of an expanded tensor counts as contiguous and has stride 0.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _small_token(value: torch.Tensor) -> Hashable:
    return value.dtype, tuple(value.shape), value.stride(), _bytes(value).numpy().tobytes()


class InputIdentity:
    """Tokens for the successive values of one graph input."""

    def __init__(self, *, read_device: bool) -> None:
        """``read_device``: copy accelerator values to the host (a schedule input) or go by object."""
        self.read_device = read_device
        self.host_reads = 0
        self._fresh = itertools.count()
        self._snapshots: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._objects: OrderedDict[int, tuple[torch.Tensor, int]] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Memory of the private snapshots."""
        return sum(s.numel() * s.element_size() for s in self._snapshots.values())

    def token(self, value: Any) -> Hashable:
        """A token that two values share only if they have the same bits."""
        if not isinstance(value, torch.Tensor):
            return type(value), repr(value)
        if value.device.type != "cpu":
            if not self.read_device:
                return self._object_token(value)
            self.host_reads += 1
            value = value.cpu()
        if value.layout != torch.strided or value.is_conj() or value.is_neg() or type(value) is not torch.Tensor:
            return self._object_token(value)
        if value.numel() * value.element_size() <= _SMALL_BYTES:
            return _small_token(value)
        return self._snapshot_token(value)

    def _snapshot_token(self, value: torch.Tensor) -> Hashable:
        for token in reversed(self._snapshots):
            if same_bits(value, self._snapshots[token]):
                self._snapshots.move_to_end(token)
                return token
        token = next(self._fresh)
        snapshot = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        self._snapshots[token] = snapshot.copy_(value.detach())
        if len(self._snapshots) > _MAX_SNAPSHOTS:
            self._snapshots.popitem(last=False)
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
    except RuntimeError:  # Inference tensors have no counter; nothing outside inference mode can write them.
        return [0 if w.is_inference() else w._version for w in weights]


class WeightsIdentity:
    """Whether the weights that hoisted work reads are still those it read."""

    def __init__(self) -> None:
        self.epoch = 0
        self._weights: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._pointers: list[int] = []
        self._hashes: list[int] = []

    def check(self, weights: list[torch.Tensor], *, deep: bool) -> list[int]:
        """Which weights changed since the last check; a change begins a new epoch.

        Args:
            weights: what hoisted work reads, always the same number in the same order.
            deep: hash the bytes too (one pass over the weights).

        Returns:
            Positions in ``weights``; at the first check all of them.
        """
        pointers = list(map(torch.Tensor.data_ptr, weights))
        versions = _versions(weights)
        same = all(map(operator.is_, weights, self._weights)) and len(weights) == len(self._weights)
        same = same and versions == self._versions and pointers == self._pointers
        if same and not deep:
            return []
        hashes = _hash(weights)
        now = list(zip(map(id, weights), versions, pointers, hashes, strict=True))
        before = list(zip(map(id, self._weights), self._versions, self._pointers, self._hashes, strict=True))
        changed = [i for i, state in enumerate(now) if i >= len(before) or state != before[i]]
        if changed:
            self.epoch += 1
        self._weights, self._versions, self._pointers, self._hashes = list(weights), versions, pointers, hashes
        return changed


def _hash(weights: Sequence[torch.Tensor]) -> list[int]:
    """One 64-bit hash a weight, read from each device in one go."""
    hashes = [_hash_bytes(w) for w in weights]
    return torch.stack([h.to(hashes[0].device) for h in hashes]).tolist() if hashes else []


def _hash_bytes(weight: torch.Tensor) -> torch.Tensor:
    """The bytes as a table of 64-bit words: its row sums and column sums, each weighted by position.

    Two passes at memory speed, and moving values about changes it (``torch.hash_tensor``, an exclusive or,
    would not see that). Integer sums wrap, so the result does not depend on the order of summation.
    """
    data = _bytes(weight)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() - data.numel() % _HASH_ROW
    tail = torch.nn.functional.pad(data[whole:], (0, _HASH_ROW - (data.numel() - whole)))
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for part in (data[:whole], tail):
        words = part.view(torch.int64).view(-1, _HASH_ROW // 8)
        for sums in (words.sum(0), words.sum(1)):
            position = torch.arange(1, sums.numel() + 1, device=data.device)
            total = total * 6364136223846793005 + (sums * (position * 2862933555777941757 + 1)).sum()
    return total
