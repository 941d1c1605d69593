"""What a pass is told, and where it says what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from .binding_time import BindingTime


@dataclass
class PassContext:
    """Shared by the passes that run over one graph.

    Attributes:
        labels: binding time of each placeholder, by node name.
        in_place: whether the body may be lowered to writes in place; for a back end that runs graphs as they
            are.
        compiles: whether the back end compiles: then one more operation costs nothing, and a block that repeats
            becomes one function.
        fast: whether last bits may change (``numerics="fast"``).
        max_held_bytes: most that may be held for one call (request values and one row); ``None`` is no limit.
        verify: check the graph after every pass (``DITHOIST_VERIFY=1``; always on in the tests).
        dump: called with a title and the graph before and after every pass (``DITHOIST_DUMP``).
        notes: what a pass could not do and why, for the report.
    """

    labels: Mapping[str, BindingTime]
    in_place: bool = False
    compiles: bool = False
    fast: bool = False
    max_held_bytes: int | None = None
    verify: bool = False
    dump: Callable[[str, fx.GraphModule], None] | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, name: str, message: str) -> None:
        """Keep one line for the report."""
        self.notes.append(f"{name}: {message}")

    def count(self, name: str, amount: int = 1) -> None:
        """Count what a pass did, where torch keeps such counts and tests look for them."""
        if amount:
            counters["dithoist"][name] += amount
