"""Held values, bounded by bytes, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

Values = tuple[Any, ...]

MAX_ENTRIES = 4096
"""However small the entries are: each also costs about a kilobyte of Python objects."""


def tensor_bytes(values: Sequence[Any]) -> int:
    """Bytes of memory the tensors keep alive, each storage once."""
    storages = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class HeldValues:
    """A bounded map from a key to tensors: what one run of a stage gave, or a private copy of an input.

    An entry appears only when it is whole. One that is larger than the bound is not kept: its stage runs
    again at each call, which costs time and never a number. Graphs of several threads may share one.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._entries: OrderedDict[Hashable, tuple[Values, int]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Of memory that the entries keep alive; counted each time, so that no interruption falsifies it."""
        with self._lock:
            return sum(size for _, size in self._entries.values())

    def get(self, key: Hashable) -> Values | None:
        """The entry's values, now the most recently used, or ``None``."""
        with self._lock:
            values = self.peek(key)
            self.hits += values is not None
            self.misses += values is None
            return values

    def peek(self, key: Hashable) -> Values | None:
        """As :meth:`get`, without counting a hit or a miss."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, values: Values) -> None:
        """Keep ``values``, dropping the least recently used entries over the bound."""
        size = tensor_bytes(values)
        with self._lock:
            if size > self.max_bytes:
                self.evictions += 1
                return
            self._entries.pop(key, None)
            self._entries[key] = (values, size)
            total = self.bytes
            while total > self.max_bytes or len(self._entries) > MAX_ENTRIES:
                _, (_, freed) = self._entries.popitem(last=False)
                total -= freed
                self.evictions += 1

    def drop(self, owner: Hashable) -> None:
        """Forget every entry whose key's first part is ``owner``."""
        with self._lock:
            for key in [k for k in self._entries if isinstance(k, tuple) and k[0] == owner]:
                self._entries.pop(key, None)

    def clear(self) -> int:
        """Forget everything; returns how many bytes that was."""
        with self._lock:
            freed = self.bytes
            self._entries.clear()
            return freed

    def shrink(self) -> None:
        """Memory ran out: forget everything, and from now on keep half of that at most."""
        with self._lock:
            freed = self.clear()
            if freed:
                self.max_bytes = min(self.max_bytes, freed) // 2
