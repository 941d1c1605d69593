"""What one compiled denoiser remembers: its options, its graphs, what they hold, what went wrong."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch._guards import CompileContext

from ..passes import BindingTime
from .cache import HeldValues
from .env import log
from .loop import Loop
from .origins import Origins
from .release import ReleasedWeights
from .settings import Settings
from .trim import Trim

if TYPE_CHECKING:
    from .staged import StagedGraph

DEFAULT_CACHED_BYTES = 256 * 2**20

Captures = tuple[set["StagedGraph"], Counter[int | None]]
"""Graphs, and how many there were by the Python frame they were captured for."""

DOCTOR = "the result is right, only slower; `dithoist doctor` says what works here, strict=True raises with the cause"
"""What to do about a failure that is ours."""


class DithoistWarning(UserWarning):
    """A denoiser runs, in whole or in part, as it was; the message says why and what to do."""


class DenoiserState:
    """Shared by a denoiser's wrapper, its back end and its report."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        labels: Mapping[str, BindingTime] | None = None,
        arguments: list[str] | None = None,
        weight_bytes: int = 0,
        loop: Loop | None = None,
        chosen: Collection[str] = (),
        trim: Trim | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.labels = dict(labels or {})
        self.arguments = arguments or []
        self.loop = loop or Loop()
        self.chosen = frozenset(chosen)
        self.trim = trim
        limit = settings.max_cached_bytes
        self.held = HeldValues(max(weight_bytes // 4, DEFAULT_CACHED_BYTES) if limit is None else limit)
        self.released = ReleasedWeights()
        self.origins = Origins()
        self.graphs: weakref.WeakSet[StagedGraph] = weakref.WeakSet()
        self.fallbacks: list[str] = []
        self._of_thread = threading.local()
        self._compiles: Counter[int | None] = Counter()

    def close(self) -> None:
        """Let go of what is held, and of released weights' files: the denoiser is gone."""
        self.held.clear()
        self.released.forget_all()

    @property
    def graph_calls(self) -> int:
        """How often this thread has called a graph."""
        return getattr(self._of_thread, "graph_calls", 0)

    def count_graph_call(self) -> None:
        """A graph is called."""
        self._of_thread.graph_calls = self.graph_calls + 1

    def add_graph(self, graph: StagedGraph) -> None:
        """Keep a newly captured graph for the report (its owner is Dynamo's cache)."""
        self.graphs.add(graph)
        compile_id = CompileContext.current_compile_id()
        self._compiles[compile_id.frame_id if compile_id else None] += 1

    def captures(self) -> Captures:
        """The graphs there are, for :meth:`replace`."""
        return set(self.graphs), self._compiles.copy()

    def replace(self, earlier: Captures) -> None:
        """Free what earlier graphs hold, and leave them out of the report: they will not be called again."""
        graphs, compiles = earlier
        for graph in graphs:
            graph.drop()
            self.graphs.discard(graph)
        self._compiles -= compiles

    def clear(self) -> int:
        """Forget held values and the inputs they are known by; returns the bytes of held values freed."""
        for graph in list(self.graphs):
            graph.forget_inputs()
        if self.trim is not None:
            self.trim.forget()
        freed = self.held.clear()
        log.info("%s: %d bytes of held values freed", self.name, freed)
        return freed

    @property
    def captured(self) -> int:
        """Graphs captured so far, those that are no more included."""
        return self._compiles.total()

    @property
    def recompiles(self) -> int:
        """Graphs captured for a Python frame that had one already."""
        return self.captured - len(self._compiles)

    @property
    def graph_breaks(self) -> int:
        """Frames beyond the first that had to be captured: each begins where a graph broke."""
        return max(len(self._compiles) - 1, 0)

    def fall_back(self, reason: str, error: Exception | None = None) -> None:
        """Remember, and say once, why something runs as it was.

        Raises:
            RuntimeError: with ``strict=True``.
        """
        self.warn(reason, "runs as it was: ", error)

    def warn(self, reason: str, prefix: str = "", error: Exception | None = None) -> None:
        """Remember, and say once, what the user does not get.

        Raises:
            RuntimeError: with ``strict=True``.
        """
        if self.settings.strict:
            raise RuntimeError(f"dithoist ({self.name}): {reason}") from error
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            log.info("%s %s%s", self.name, prefix, reason, exc_info=error)
            warnings.warn(f"dithoist: {self.name} {prefix}{reason}", DithoistWarning, stacklevel=4)
