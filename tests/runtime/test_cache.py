"""Held values: bounded by bytes, least recently used out first, whole or not at all."""

from __future__ import annotations

import torch

from dithoist.runtime.cache import HeldValues, tensor_bytes


def row(value: float) -> tuple[torch.Tensor]:
    return (torch.full((25,), float(value)),)


def test_the_least_recently_used_goes_first() -> None:
    held = HeldValues(max_bytes=250)
    held.put("a", row(1))
    held.put("b", row(2))
    assert held.get("a") is not None
    held.put("c", row(3))
    assert held.get("b") is None
    assert held.get("a") is not None
    assert held.get("c") is not None
    assert (held.bytes, held.evictions, len(held)) == (200, 1, 2)
    assert (held.hits, held.misses) == (3, 1)


def test_an_entry_over_the_bound_is_not_kept_and_pushes_nothing_out() -> None:
    held = HeldValues(max_bytes=150)
    held.put("a", row(1))
    held.put("b", (torch.zeros(100),))
    assert held.get("a") is not None
    assert held.get("b") is None


def test_putting_again_replaces_and_dropping_frees() -> None:
    held = HeldValues(max_bytes=1000)
    held.put(("one", 1), row(1))
    held.put(("one", 1), row(2))
    held.put(("two", 1), row(3))
    assert held.bytes == 200
    held.drop("one")
    assert (held.bytes, len(held)) == (100, 1)
    held.clear()
    assert (held.bytes, len(held)) == (0, 0)


def test_views_of_one_storage_count_once() -> None:
    base = torch.zeros(10)
    assert tensor_bytes([base, base[2:], base.view(5, 2), 3]) == 40
