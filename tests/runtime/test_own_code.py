"""Functions with code of their own: Dynamo keeps its books of them apart."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from twins import TinyDit, Twins, tiny_inputs

from dithoist import restore
from dithoist.runtime.own_code import with_own_code


def test_a_copy_does_what_the_function_does_with_code_of_its_own() -> None:
    kept = [0]

    def function(a: int, b: int = 2, *rest: int, c: int = 3, **others: Any) -> tuple[Any, ...]:
        kept[0] += 1
        return a, b, rest, c, others

    copies = [with_own_code(function) for _ in range(2)]
    for call in ({"c": 5}, {"d": 6}, {}):
        assert [copy(1, **call) for copy in copies] == [function(1, **call)] * 2
    assert copies[0](1, 2, 3) == function(1, 2, 3)
    assert kept == [11]
    assert len({id(f.__code__) for f in (function, *copies)}) == 3
    assert len({f.__code__.co_name for f in (function, *copies)}) == 3


def test_captures_of_other_modules_do_not_count_against_ours() -> None:
    """All modules share the function that is captured, and Dynamo bounds how often one is."""
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        for _ in range(4):
            Twins(TinyDit()).check(**tiny_inputs())  # Strict, so falling back would raise.


def test_restoring_frees_what_was_compiled() -> None:
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs())
    (graph,) = map(weakref.ref, twins.compiled._compiled_call_impl.state.graphs)
    assert graph() is not None
    restore(twins.compiled)
    gc.collect()
    assert graph() is None
